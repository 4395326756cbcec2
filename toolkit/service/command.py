"""The unit of a profile: which command serves it, in which environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.layout import Layout
from toolkit.profile.checkpoints import located
from toolkit.profile.schema import Checkpoint, Profile, SecretRef
from toolkit.service.unit import RestartPolicy, SecretSource, Unit

_EMBEDDED = "toolkit.ddtree.server"
_SGLANG = "sglang.launch_server"
_NOFILE = 1 << 16
_NOFILE_GPU = 1 << 20


def unit_for(
    profile: Profile,
    *,
    release_dir: Path,
    layout: Layout,
    python: Path,
    environment: Mapping[str, str] | None = None,
) -> Unit:
    """The unit that serves `profile` as the release in `release_dir`.

    Args:
        profile: resolved profile.
        release_dir: folder of the release; its name is the release id.
        layout: where things lie on the host.
        python: interpreter that can import the engine.
        environment: variables that the build found necessary; the profile's win.

    Raises:
        ConfigError: an argument or a variable holds what no service can be given.
    """
    profile = located(profile, layout)
    service, paths = profile.service, layout.service(profile.name)
    secrets = _secrets(profile)
    secrets_file = paths.state / "secrets" / f"{release_dir.name}.yaml" if secrets else None
    config = () if secrets_file is None else ("--config", str(secrets_file))
    arguments = flags_for(profile, paths.cache)
    module = _SGLANG if profile.engine.kind == "sglang" else _EMBEDDED
    return Unit(
        name=profile.name,
        release=release_dir.name,
        description=f"ddtoolkit {profile.name}: {profile.model.served_name}",
        argv=(str(python), "-m", module, *arguments, *config, *profile.engine.extra_args),
        environment=_environment(profile, paths.cache, release_dir, environment or {}),
        working_directory=str(paths.cache),
        host=service.bind,
        port=service.port,
        manager=service.manager,
        user=profile.system_user,
        secrets=secrets,
        secrets_file=None if secrets_file is None else str(secrets_file),
        cache=str(paths.cache),
        load_timeout=service.load_timeout,
        stop_timeout=service.stop_timeout,
        restart=RestartPolicy(service.restart.delay, service.restart.burst, service.restart.interval),
        limits=_limits(profile),
        log=str(paths.log),
        log_max_size=service.log_max_size,
        gpus=profile.hardware.count if profile.hardware.device == "cuda" else 0,
        nvlink=profile.hardware.interconnect == "nvlink",
    )


def release_unit(profile: Profile, manifest: Mapping[str, Any], folder: Path, layout: Layout) -> Unit:
    """The unit of a release, with what the build measured wherever the profile leaves it open."""
    environment = manifest["environment"]
    threads = manifest["engine"].get("tuned", {}).get("threads")
    if profile.engine.threads is None and threads is not None:
        engine = profile.engine.model_copy(update={"threads": threads})
        profile = profile.model_copy(update={"engine": engine})
    return unit_for(
        profile,
        release_dir=folder,
        layout=layout,
        python=Path(environment["python"]),
        environment={"PYTHONPATH": environment["path"]},
    )


def flags_for(profile: Profile, cache: Path) -> list[str]:
    """The server's own flags, without secrets and `engine.extra_args`; checkpoints are located already.

    Args:
        profile: resolved profile.
        cache: the folder that the service may write.
    """
    flags = _sglang(profile) if profile.engine.kind == "sglang" else _embedded(profile)
    return [*flags, *_debug(profile, cache)]


def _common(profile: Profile) -> list[str]:
    """Flags that both engines share."""
    service, model = profile.service, profile.model
    flags = ["--model-path", _location(model.target)]
    flags += ["--served-model-name", model.served_name]
    flags += ["--host", service.bind, "--port", str(service.port)]
    flags += ["--dtype", profile.engine.dtype, "--device", profile.hardware.device]
    if model.context_length is not None:
        flags += ["--context-length", str(model.context_length)]
    flags += ["--max-running-requests", str(service.max_running_requests)]
    flags += ["--max-queued-requests", str(service.max_queued_requests)]
    return flags


def _speculative(profile: Profile) -> list[str]:
    spec, drafter = profile.speculative, profile.model.drafter
    if spec.algorithm == "NONE":
        return []
    flags = ["--speculative-algorithm", spec.algorithm]
    if drafter is not None:
        flags += ["--speculative-draft-model-path", _location(drafter)]
    flags += ["--speculative-dflash-block-size", str(spec.block_size)]
    if spec.algorithm == "DDTREE":
        flags += ["--speculative-ddtree-budget", str(spec.budget)]
        flags += ["--speculative-ddtree-topk-cap", str(spec.topk_cap)]
        flags += ["--speculative-ddtree-expansion", spec.expansion]
    return flags


def _embedded(profile: Profile) -> list[str]:
    flags = _common(profile)
    if profile.engine.threads is not None:
        flags += ["--cpu-threads", str(profile.engine.threads)]
    flags += _speculative(profile)
    # The server gives up on what is in flight before the manager gives up on the server.
    flags += ["--shutdown-timeout", f"{profile.service.stop_timeout * 0.8:g}"]
    if profile.service.allow_unauthenticated:
        flags.append("--allow-unauthenticated")
    return flags


def _sglang(profile: Profile) -> list[str]:
    parallel = profile.parallelism
    flags = _common(profile)
    flags += ["--tp-size", str(parallel.tp), "--pp-size", str(parallel.pp), "--ep-size", str(parallel.ep)]
    if parallel.dp_attention:
        flags.append("--enable-dp-attention")
    flags += _computing(profile)
    if profile.model.trust_remote_code:
        flags.append("--trust-remote-code")
    flags += ["--enable-metrics", *_speculative(profile)]
    return flags


def _computing(profile: Profile) -> list[str]:
    """How SGLang computes and what it keeps in memory."""
    engine = profile.engine
    values = {
        "--attention-backend": engine.attention_backend or "triton",
        "--quantization": engine.quantization,
        # SGLang's other name for it, the only one that all its checks know.
        "--kv-cache-dtype": "bf16" if engine.kv_cache_dtype == "bfloat16" else engine.kv_cache_dtype,
        "--moe-runner-backend": engine.moe_backend,
        "--mem-fraction-static": engine.memory_fraction,
        "--chunked-prefill-size": engine.prefill_chunk,
        "--page-size": engine.page_size,
        # SGLang's own default, 512 on large GPUs, times budget + 1 rows would take tens of GiB.
        "--cuda-graph-max-bs-decode": engine.max_graph_batch or profile.service.max_running_requests,
    }
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _debug(profile: Profile, cache: Path) -> list[str]:
    if not (profile.speculative.debug_metrics and profile.speculative.algorithm == "DDTREE"):
        return []
    return [
        "--speculative-ddtree-debug-metrics",
        "--speculative-ddtree-debug-file",
        str(cache / "ddtree-debug.jsonl"),
    ]


def _location(checkpoint: Checkpoint) -> str:
    return "bundled" if checkpoint.source == "bundled" else str(Path(checkpoint.source).expanduser())


def _environment(
    profile: Profile, cache: Path, release_dir: Path, built: Mapping[str, str]
) -> dict[str, str]:
    """Caches lie in the one folder that the service may write, whoever it runs as."""
    return {
        "HOME": str(cache),
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache / "huggingface"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # its own cache folder is no place to import from
        "DDTOOLKIT_RELEASE": release_dir.name,
        **built,
        **profile.service.environment,
    }


def _limits(profile: Profile) -> dict[str, int | None]:
    # Only root may raise the limit on locked memory: without systemd a user keeps the one he has.
    memlock: dict[str, int | None] = {"memlock": None}
    if profile.hardware.device == "cuda":
        return {**memlock, "nofile": _NOFILE_GPU}
    return {**(memlock if profile.service.manager == "systemd" else {}), "nofile": _NOFILE}


def _secrets(profile: Profile) -> dict[str, SecretSource]:
    given = {"api-key": profile.service.api_key, "admin-api-key": profile.service.admin_api_key}
    return {key: _source(ref) for key, ref in given.items() if ref is not None}


def _source(ref: SecretRef) -> SecretSource:
    return SecretSource(env=ref.env, file=ref.file, command=ref.command)
