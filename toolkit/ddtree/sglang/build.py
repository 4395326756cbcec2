"""`python -m toolkit.ddtree.sglang.build --out FILE -- FLAGS`: what can be known before SGLang is started.

FLAGS are those of `sglang.launch_server`. They are parsed by SGLang itself with the plugin loaded, so a flag
or a combination that it refuses is refused here, while another release still serves. No weights are loaded:
the GPUs may be full. Progress goes to standard error, one line a step. Exit status 0: the manifest is
written; 1: it cannot be; 2: the environment, a checkpoint or a flag cannot be served.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.ddtree.manifest import (
    BuildError,
    Cache,
    conclude,
    device_facts,
    hashes,
    say,
    versions_of,
)
from toolkit.ddtree.sglang.version import SUPPORTED

_PACKAGES = ("sglang", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
_INDEX = "model.safetensors.index.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Build; returns the exit status."""
    args = _parse(argv)
    return conclude(lambda: build(args.flags, args.device, args.cache_dir), args.out)


def build(flags: Sequence[str], device: str, cache_dir: Path | None) -> dict[str, Any]:
    """Check the environment, the checkpoints and the flags.

    Args:
        flags: of `sglang.launch_server`.
        device: `cuda` or `cpu`.
        cache_dir: where hashes of checkpoints are kept; None: nowhere.

    Returns:
        The manifest: `versions`, `device`, `checkpoints`, `seconds`.

    Raises:
        BuildError: something cannot be served; says what.
    """
    started = time.monotonic()
    cache = Cache(cache_dir)
    say(f"environment: Python {platform.python_version()}, torch {torch.__version__}")
    versions, facts = versions_of(_PACKAGES), device_facts(device)
    say(f"device: {facts['name']}")
    if versions["sglang"] != SUPPORTED:
        raise BuildError(f"SGLang {versions['sglang']} is installed; DDTREE is made for {SUPPORTED}")
    folders = _folders(flags)
    for part, folder in folders.items():
        say(f"{part}: {folder}")
        _require_whole(folder)
    say("flags: as SGLang reads them")
    _require_flags(flags)
    return {
        "versions": versions,
        "device": facts,
        "checkpoints": {part: hashes(folder, cache) for part, folder in folders.items()},
        "seconds": round(time.monotonic() - started, 3),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.ddtree.sglang.build", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cache-dir", type=Path, help="where hashes of checkpoints are kept; none: nowhere")
    parser.add_argument("--out", type=Path, required=True, help="manifest to write, JSON")
    parser.add_argument("flags", nargs="+", help="of sglang.launch_server, after --")
    return parser.parse_args(argv)


def _folders(flags: Sequence[str]) -> dict[str, Path]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--speculative-draft-model-path", type=Path)
    found, _ = parser.parse_known_args(list(flags))
    folders = {"target": found.model_path}
    if found.speculative_draft_model_path is not None:
        folders["drafter"] = found.speculative_draft_model_path
    return folders


def _require_whole(folder: Path) -> None:
    """Raise BuildError unless the config can be read and every file of weights that it names is there."""
    config = _read(folder / "config.json")
    if not isinstance(config, dict):
        raise BuildError(f"{folder / 'config.json'}: is no JSON object")
    if not (folder / _INDEX).is_file():
        if not any(folder.glob("*.safetensors")):
            raise BuildError(f"{folder}: there is no safetensors file")
        return
    index = _read(folder / _INDEX)
    names = set(index.get("weight_map", {}).values()) if isinstance(index, dict) else set()
    missing = sorted(str(name) for name in names if not (folder / str(name)).is_file())
    if not names or missing:
        lacks = f"{len(missing)} of {len(names)} files are missing, first" if missing else "names no file"
        raise BuildError(f"{folder / _INDEX}: {' '.join([lacks, *missing[:1]])}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BuildError(f"{path}: is no JSON: {error}") from None


def _require_flags(flags: Sequence[str]) -> None:
    """Raise BuildError with SGLang's own reason unless it accepts the flags."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            load_plugins()
            prepare_server_args(list(flags))
    except SystemExit as error:  # argparse, and the plugin's own refusals
        lines = [line for line in said.getvalue().splitlines() if "error:" in line]
        reason = lines[-1] if lines else str(error)
        raise BuildError(f"SGLang refuses the flags: {_one_line(reason.rpartition('error: ')[2])}") from None
    except Exception as error:
        # Of any kind: what SGLang finds wrong with a combination it raises as it comes.
        raise BuildError(f"SGLang refuses the flags: {type(error).__name__}: {_one_line(error)}") from None


def _one_line(said: object) -> str:
    return " ".join(str(said).split())


if __name__ == "__main__":
    sys.exit(main())
