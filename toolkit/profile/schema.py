"""Profile schema, version 1.

Every model is frozen and refuses unknown keys. Durations are seconds once parsed and are written as
numbers with a unit (`90s`, `20m`, `2h`); sizes are bytes and are written as `512MiB` or `12GB`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolkit.profile.units import Duration, Size

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="a DNS label (RFC 1123)")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hardware(_Section):
    """What the host must have."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpu: str | None = Field(None, description="GPU name as nvidia-smi prints it")
    count: int = Field(0, ge=0, le=64, description="GPUs the service uses")
    memory_gib: float | None = Field(None, gt=0, description="memory of one GPU in GiB")
    compute_capability: str | None = Field(None, pattern=r"^\d{1,2}\.\d$")
    interconnect: Literal["none", "pcie", "nvlink"] = "none"


class Host(_Section):
    """Where things lie on the host and what it needs installed."""

    root: str | None = Field(None, description="folder that everything lies below; unset: the system's places")
    user: str | None = Field(None, description="system user of the service (systemd manager)")
    packages: tuple[str, ...] = Field((), description="Debian packages; installed when provisioning as root")
    min_free_disk: Size = Field(1 << 30, description="free space needed below root")


class Engine(_Section):
    """Which engine serves, and how it computes."""

    kind: Literal["embedded", "sglang"] = "embedded"
    version: str | None = Field(None, description="pinned engine version (sglang)")
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; unset: tuned by the build")
    attention_backend: str | None = None
    extra_args: tuple[str, ...] = Field((), description="further arguments, passed on byte for byte")


class Checkpoint(_Section):
    """A model checkpoint: `bundled`, or a folder on the host."""

    source: str = Field("bundled", min_length=1)
    revision: str | None = None


class Model(_Section):
    """What is served."""

    target: Checkpoint = Checkpoint()
    drafter: Checkpoint | None = None
    served_name: str = Field("default", min_length=1, max_length=200)
    context_length: int | None = Field(None, ge=16, le=1 << 24, description="tokens, prompt and output together")
    trust_remote_code: bool = False


class Parallelism(_Section):
    """How the model is spread over GPUs."""

    tp: int = Field(1, ge=1, le=1024)
    pp: int = Field(1, ge=1, le=1024)
    ep: int = Field(1, ge=1, le=1024)
    dp_attention: bool = False


class Speculative(_Section):
    """Speculative decoding; `budget` counts tree nodes without the root."""

    algorithm: Literal["NONE", "DFLASH", "DDTREE"] = "DDTREE"
    block_size: int = Field(8, ge=2, le=64, description="drafted slots, bonus token included")
    budget: int = Field(16, ge=1, le=1024)
    topk_cap: int = Field(8, ge=1, le=1024)
    expansion: Literal["chain", "best_first", "chain_seeded"] = "best_first"
    debug_metrics: bool = False


class SecretRef(_Section):
    """Where a secret is read when it is needed; the secret itself is never in a profile.

    Exactly one of the keys is set.
    """

    env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    file: str | None = Field(None, min_length=1)
    command: tuple[str, ...] | None = Field(None, min_length=1)


class Restart(_Section):
    """When a server that ended by itself is started again (systemd.unit(5): StartLimit*)."""

    delay: Duration = Field(1.0, ge=0)
    burst: int = Field(5, ge=0, le=1000, description="starts within `interval` before it is left stopped")
    interval: Duration = Field(300.0, gt=0)


class Service(_Section):
    """The long-running server."""

    manager: Literal["process", "systemd"] = "process"
    bind: str = "127.0.0.1"
    port: int = Field(30000, ge=1, le=65535)
    max_running_requests: int = Field(16, ge=1, le=4096)
    max_queued_requests: int = Field(256, ge=1, le=1 << 20)
    load_timeout: Duration = Field(90.0, gt=0, description="from start to the first real token")
    stop_timeout: Duration = Field(30.0, gt=0)
    restart: Restart = Restart()
    environment: dict[str, str] = Field(default_factory=dict)
    api_key: SecretRef | None = None
    admin_api_key: SecretRef | None = None
    allow_unauthenticated: bool = False
    log_max_size: Size = Field(16 << 20, description="the log is rotated at this size")
    keep_releases: int = Field(5, ge=2, le=1000)


class Acceptance(_Section):
    """What a release must show before it counts as deployed."""

    level: Literal["quick", "full"] = "quick"
    min_acceptance_length: float | None = Field(None, ge=1, description="tokens a verify step, bonus included")
    min_tokens_per_second: float | None = Field(None, gt=0)
    tolerance: float = Field(0.1, ge=0, lt=1, description="allowed fall against the base release's report")
    requests: int = Field(160, ge=151, le=100000)
    concurrency: int = Field(16, ge=1, le=1024)
    time_limit: Duration = Field(120.0, gt=0)
    prompts: str | None = Field(None, description="JSON lines file with a `prompt` each; unset: the built-in set")


class Profile(_Section):
    """A hardware profile, version 1."""

    schema_version: Literal[1] = Field(1, alias="schema")
    name: Name
    description: str = ""
    hardware: Hardware = Hardware()
    host: Host = Host()
    engine: Engine = Engine()
    model: Model = Model()
    parallelism: Parallelism = Parallelism()
    speculative: Speculative = Speculative()
    service: Service = Service()
    acceptance: Acceptance = Acceptance()
