"""Command line of the server: SGLang's flag names, a YAML file for them, and the combinations refused."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, TreeLimits

BUNDLED = "bundled"
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


class UsageError(Exception):
    """A flag, a value or a combination that the server refuses; the message is one line."""


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """What the server was asked to be. The keys never appear in `repr`, logs or `/server_info`.

    Attributes:
        engine: the engine's configuration.
        served_model_name: the name in `/v1/models` and in answers.
        host, port: listening address; port 0 takes a free one.
        max_queued_requests: requests that may wait beyond those in the batch; more are answered 503.
        max_request_bytes: longest request body; a longer one is answered 413.
        api_key, admin_api_key: bearer tokens, or None.
        log_level: of the standard error log.
        debug_file: where each verify step's debug line goes, or None.
        debug_file_bytes: size at which that file is rotated.
        shutdown_timeout: seconds that requests in flight are given after SIGTERM.
        warnings: what is allowed but not wise.
    """

    engine: EngineConfig
    served_model_name: str
    host: str
    port: int
    max_queued_requests: int
    max_request_bytes: int
    api_key: str | None
    admin_api_key: str | None
    log_level: str
    debug_file: Path | None
    debug_file_bytes: int
    shutdown_timeout: float
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ServerArgs({self.served_model_name!r} on {self.host}:{self.port})"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Read the flags and the `--config` file; a flag on the command line wins over the file.

    Raises:
        UsageError: an unknown flag or key, a value out of range, or a combination that cannot run.
    """
    parser = _build_parser()
    early, _ = _config_parser().parse_known_args(argv)
    from_file = _read_config(early.config, parser) if early.config else []
    return _to_server_args(parser.parse_args([*from_file, *argv]))


def _config_parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    return parser


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m toolkit.ddtree.server",
        description=__doc__,
        parents=[_config_parser()],
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model-path", metavar="DIR", help=f"target checkpoint, or '{BUNDLED}'")
    model.add_argument("--tokenizer-path", metavar="DIR", help="default: the target checkpoint")
    model.add_argument("--served-model-name", metavar="NAME", help="default: the model path as given")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    model.add_argument("--context-length", type=_int(2), metavar="TOKENS", help="default: the checkpoint's")
    model.add_argument("--random-seed", type=_int(0), default=0, metavar="N")
    model.add_argument("--cpu-threads", type=_int(1), metavar="N", help="default: torch's")

    spec = parser.add_argument_group("speculative decoding")
    algorithms = [str(item) for item in Algorithm]
    spec.add_argument("--speculative-algorithm", choices=algorithms, default="NONE")
    spec.add_argument("--speculative-draft-model-path", metavar="DIR", help=f"DFlash drafter, or '{BUNDLED}'")
    spec.add_argument(
        "--speculative-dflash-block-size", type=_int(2), metavar="N", help="default: the drafter's"
    )
    spec.add_argument("--speculative-ddtree-budget", type=_int(1, 1024), metavar="N")
    spec.add_argument("--speculative-ddtree-topk-cap", type=_int(1, 1024), metavar="N")
    spec.add_argument("--speculative-ddtree-expansion", choices=[str(item) for item in Expansion])
    spec.add_argument("--speculative-ddtree-debug-metrics", action="store_true")
    spec.add_argument("--speculative-ddtree-debug-file", type=Path, metavar="FILE")
    spec.add_argument("--speculative-ddtree-debug-file-bytes", type=_int(4096), default=16 << 20, metavar="N")

    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=_int(0, 65535), default=30000)
    serving.add_argument("--max-running-requests", type=_int(1), default=16, metavar="N")
    serving.add_argument("--max-queued-requests", type=_int(0), default=256, metavar="N")
    serving.add_argument("--max-request-bytes", type=_int(1024), default=4 << 20, metavar="N")
    serving.add_argument("--disable-radix-cache", action="store_true")
    serving.add_argument("--api-key", metavar="KEY", help="better in the --config file than here")
    serving.add_argument("--admin-api-key", metavar="KEY", help="better in the --config file than here")
    serving.add_argument("--allow-unauthenticated", action="store_true")
    serving.add_argument("--shutdown-timeout", type=_seconds, default=20.0, metavar="SECONDS")
    serving.add_argument("--log-level", choices=_LOG_LEVELS, default="info")
    return parser


def _int(low: int, high: int | None = None) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{value} is out of range: {bound}")
        return value

    parse.__name__ = "integer"  # argparse names it in "invalid integer value"
    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is out of range: from 0 to 3600 seconds")
    return value


def _read_config(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a YAML file whose keys are flag names, as command-line arguments."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        # The text of a YAML error quotes the file, which may hold keys.
        raise UsageError(f"--config {path}: not valid YAML{line}") from None
    if values is None:
        return []
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(f"--config {path}: must be a mapping of flag names to values")
    names = [str(key.value) for key, _ in node.value]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--config {path}: '{name}' is given twice")
    arguments: list[str] = []
    for key, value in values.items():
        arguments += _config_arguments(path, str(key), value, parser)
    return arguments


def _config_arguments(path: Path, key: str, value: Any, parser: argparse.ArgumentParser) -> list[str]:
    flag = "--" + key.removeprefix("--").replace("_", "-")
    actions = parser._option_string_actions
    action = actions.get(flag)
    if action is None or flag in ("--config", "--help"):
        near = difflib.get_close_matches(flag, actions, n=1)
        raise UsageError(
            f"--config {path}: unknown key '{key}'" + (f", nearest is '{near[0][2:]}'" if near else "")
        )
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: '{key}' must be true or false")
        return [flag] if value else []
    if value is None:
        return []
    wants_text = action.type is None or action.type is Path
    if isinstance(value, bool) or not isinstance(value, str if wants_text else (int, float, str)):
        raise UsageError(
            f"--config {path}: '{key}' must be {'a quoted string' if wants_text else 'a number'}"
        )
    return [f"{flag}={value}"]


def _to_server_args(ns: argparse.Namespace) -> ServerArgs:
    if not ns.model_path:
        raise UsageError(f"--model-path is required: a checkpoint directory, or '{BUNDLED}'")
    _check_speculative(ns)
    _check_exposure(ns)
    if ns.tokenizer_path not in (None, ns.model_path):
        raise UsageError(
            "--tokenizer-path must be the same as --model-path: the tokenizer is read from there"
        )
    if ns.speculative_ddtree_debug_metrics and ns.speculative_ddtree_debug_file is None:
        raise UsageError("--speculative-ddtree-debug-metrics needs --speculative-ddtree-debug-file FILE")
    algorithm = Algorithm(ns.speculative_algorithm)
    draft = ns.speculative_draft_model_path
    engine = EngineConfig(
        model_path=_checkpoint(ns.model_path, "target"),
        draft_model_path=_checkpoint(draft, "drafter") if draft else None,
        algorithm=algorithm,
        limits=_limits(ns),
        block_size=ns.speculative_dflash_block_size,
        dtype=ns.dtype,
        device=ns.device,
        context_length=ns.context_length,
        max_running_requests=ns.max_running_requests,
        prefix_cache_tokens=0 if ns.disable_radix_cache else _DEFAULTS["prefix_cache_tokens"],
        threads=ns.cpu_threads,
        random_seed=ns.random_seed,
    )
    return ServerArgs(
        engine=engine,
        served_model_name=ns.served_model_name or ns.model_path,
        host=ns.host,
        port=ns.port,
        max_queued_requests=ns.max_queued_requests,
        max_request_bytes=ns.max_request_bytes,
        api_key=ns.api_key,
        admin_api_key=ns.admin_api_key,
        log_level=ns.log_level,
        debug_file=ns.speculative_ddtree_debug_file if ns.speculative_ddtree_debug_metrics else None,
        debug_file_bytes=ns.speculative_ddtree_debug_file_bytes,
        shutdown_timeout=ns.shutdown_timeout,
        warnings=tuple(_warnings(ns)),
    )


def _limits(ns: argparse.Namespace) -> TreeLimits:
    default: TreeLimits = _DEFAULTS["limits"]
    return TreeLimits(
        budget=ns.speculative_ddtree_budget or default.budget,
        topk_cap=ns.speculative_ddtree_topk_cap or default.topk_cap,
        expansion=Expansion(ns.speculative_ddtree_expansion or default.expansion),
    )


def _checkpoint(path: str, part: str) -> Path:
    if path == BUNDLED:
        return Path(__file__).resolve().parent.parent / "bundled" / part
    return Path(path)


def _check_speculative(ns: argparse.Namespace) -> None:
    algorithm = ns.speculative_algorithm
    if algorithm == Algorithm.NONE:
        _refuse_given(
            ns, "speculative_draft_model_path", "speculative_dflash_block_size", needs="DFLASH or DDTREE"
        )
    elif not ns.speculative_draft_model_path:
        raise UsageError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path")
    if algorithm != Algorithm.DDTREE:
        names = ("budget", "topk_cap", "expansion", "debug_metrics", "debug_file")
        _refuse_given(ns, *(f"speculative_ddtree_{name}" for name in names), needs="DDTREE")


def _refuse_given(ns: argparse.Namespace, *names: str, needs: str) -> None:
    for name in names:
        if getattr(ns, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} needs --speculative-algorithm {needs}, not {ns.speculative_algorithm}")


def _check_exposure(ns: argparse.Namespace) -> None:
    for name in ("api_key", "admin_api_key"):
        key = getattr(ns, name)
        if key is not None and not (key and key == key.strip() and key.isprintable()):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} must be printable text, not empty, without spaces around it")
    if _is_loopback(ns.host) or ns.allow_unauthenticated:
        return
    if not (ns.api_key and ns.admin_api_key):
        raise UsageError(
            f"--host {ns.host} is reachable from other machines: set api-key and admin-api-key in the "
            "--config file, or pass --allow-unauthenticated"
        )


def _warnings(ns: argparse.Namespace) -> Iterator[str]:
    if not (_is_loopback(ns.host) or ns.api_key):
        yield f"--host {ns.host} is served without an API key to whoever can reach it"
    if ns.config is not None and (ns.api_key or ns.admin_api_key) and ns.config.stat().st_mode & 0o044:
        yield f"--config {ns.config} can be read by other users; it should have mode 0600"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
