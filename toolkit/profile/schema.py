"""Profile schema, version 1.

Every model is frozen and refuses unknown keys. Durations are seconds once parsed and are written as
numbers with a unit (`90s`, `20m`, `2h`); sizes are bytes and are written as `512MiB` or `12GB`. The JSON
form writes both with their units again, so that it is itself a valid profile.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from toolkit.profile.source import SCHEMES, Source, endpoint_problem, is_remote, parse
from toolkit.profile.units import Duration, Size, format_duration, format_size

SCHEMA_VERSION = 1

_MONTH = 30 * 86400.0
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_PARAGRAPH = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _printable(value: str, forbidden: re.Pattern[str]) -> str:
    match = forbidden.search(value)
    if match is None:
        return value
    name = {"\n": "a newline", "\r": "a carriage return", "\0": "a NUL"}.get(match[0], "a control character")
    raise ValueError(f"holds {name} (U+{ord(match[0]):04X}) at character {match.start() + 1}: take it out")


def _one_line(value: str) -> str:
    return _printable(value, _CONTROL)


def _paragraph(value: str) -> str:
    return _printable(value, _CONTROL_IN_PARAGRAPH)


def _address(value: str) -> str:
    if value == "localhost":
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError("is no IP address: write one such as 127.0.0.1, 0.0.0.0 or ::1") from None
    return value


def _checkpoint(value: str) -> str:
    if value == "bundled" or value.startswith(("/", "~/", *SCHEMES)):
        return value
    raise ValueError(
        "is neither `bundled`, nor a folder on the host that starts with / or ~/, nor one of "
        "hf://OWNER/REPOSITORY@COMMIT, https://HOST/NAME/ and peer://HOST/NAME@REVISION"
    )


def _model_hub(value: str) -> str:
    if (problem := endpoint_problem(value)) is not None:
        raise ValueError(problem)
    return value


def _allowed(text: str) -> dict[str, Any]:
    """Extra JSON schema that says in words what a pattern or range allows."""
    return {"allowed": text}


def _duration(default: float, least: float, most: float, description: str) -> Any:
    words = f"a duration from {format_duration(least)} to {format_duration(most)}, such as 90s"
    return Field(default, ge=least, le=most, description=description, json_schema_extra=_allowed(words))


def _size(default: int, least: int, most: int, description: str) -> Any:
    words = f"a size from {format_size(least)} to {format_size(most)}, such as 512MiB"
    return Field(default, ge=least, le=most, description=description, json_schema_extra=_allowed(words))


DEFAULT_USER = "ddtoolkit"
Text = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        json_schema_extra=_allowed("1 to 63 of a-z, 0-9 and '-', with a letter or digit at both ends"),
    ),
]
Address = Annotated[
    str, AfterValidator(_address), Field(json_schema_extra=_allowed("an IP address, or localhost"))
]
AbsolutePath = Annotated[
    str,
    AfterValidator(_one_line),
    Field(
        pattern=r"^(~/|/)[^/]",
        json_schema_extra=_allowed("an absolute path, starting with / or ~/"),
    ),
]
Package = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$",
        json_schema_extra=_allowed("a Debian package name, with =VERSION if it is pinned"),
    ),
]
PackageName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$", json_schema_extra=_allowed("a Debian package's name")),
]
KernelArgument = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}(=[A-Za-z0-9_.,:/@+-]{1,128})?$",
        json_schema_extra=_allowed("one argument such as iommu=pt"),
    ),
]
ModuleOption = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9_]{1,64} [A-Za-z0-9_]{1,64}=[A-Za-z0-9_.,:+-]{1,64}$",
        json_schema_extra=_allowed("a module and an option such as nvidia_uvm uvm_disable_hmm=1"),
    ),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Driver(_Section):
    """The NVIDIA driver and what a host boots with: for `ddtoolkit hosts prepare`, not for a deploy."""

    branch: int = Field(ge=300, le=9999, description="driver branch, the first number of its version")
    package: PackageName | None = Field(
        None,
        description="package that brings the driver; unset: nvidia-driver-BRANCH-server-open, "
        "nvidia-open-BRANCH or nvidia-open, the first that a configured apt source has",
    )
    fabric_manager: PackageName | None = Field(
        None,
        description="package of the fabric manager (nvlink); unset: nvidia-fabricmanager-BRANCH, or "
        "nvidia-fabricmanager, in the driver's version",
    )
    cuda_toolkit: bool = Field(
        True, description="install the CUDA toolkit of hardware.cuda and ninja, which compile kernels"
    )
    kernel_arguments: tuple[KernelArgument, ...] = Field(
        (), max_length=32, description="arguments that are added to the kernel's command line, by GRUB"
    )
    module_options: tuple[ModuleOption, ...] = Field(
        (), max_length=32, description="options of kernel modules"
    )
    acs_off: bool = Field(
        False, description="turn ACS redirection off on PCI bridges at each boot, before anything serves"
    )


class Hardware(_Section):
    """What the host must have."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="what the engine computes on")
    gpu: Text | None = Field(None, description="GPU name as nvidia-smi prints it")
    count: int = Field(0, ge=0, le=64, description="GPUs that the service uses")
    memory_gib: float | None = Field(None, gt=0, le=65536, description="memory of one GPU in GiB")
    compute_capability: str | None = Field(
        None,
        pattern=r"^[0-9]{1,2}[.][0-9]$",
        description="CUDA compute capability of the GPUs",
        json_schema_extra=_allowed("two numbers such as 12.0"),
    )
    interconnect: Literal["none", "pcie", "nvlink"] = Field("none", description="what joins the GPUs")
    min_driver: str | None = Field(
        None,
        pattern=r"^[0-9]{3,4}([.][0-9]{1,4}){1,2}$",
        description="oldest NVIDIA driver that the host may have",
        json_schema_extra=_allowed("a driver version such as 580.65.06"),
    )
    cuda: str | None = Field(
        None,
        pattern=r"^[0-9]{2}[.][0-9]$",
        description="CUDA version that the engine is built for",
        json_schema_extra=_allowed("two numbers such as 13.0"),
    )
    driver: Driver | None = Field(None, description="what `ddtoolkit hosts prepare` installs; unset: nothing")


class Host(_Section):
    """Where things lie on the host and what it needs installed."""

    root: AbsolutePath | None = Field(
        None, description="folder that everything lies below; unset: the system's places (/opt, /var)"
    )
    user: str | None = Field(
        None,
        pattern=r"^[a-z_][a-z0-9_-]{0,31}$",
        description="system user of the service (systemd manager); unset: ddtoolkit",
        json_schema_extra=_allowed("a system user's name such as ddtree"),
    )
    python: AbsolutePath | None = Field(
        None,
        description=(
            "interpreter on the host that has the engine's libraries; unset: under systemd they are "
            "installed, hash-locked, else the toolkit's own"
        ),
    )
    wheelhouse: AbsolutePath | None = Field(
        None,
        description="folder on the host with wheels of the engine's libraries; unset: pip's package index",
    )
    os: str | None = Field(
        None,
        pattern=r"^[a-z]+-[0-9]+([.][0-9]+)*$",
        max_length=64,
        description="ID and VERSION_ID of the host's /etc/os-release; unset: any",
        json_schema_extra=_allowed("a distribution such as ubuntu-24.04"),
    )
    python_version: str | None = Field(
        None,
        pattern=r"^3[.][0-9]{1,2}$",
        description="Python of the engine's environment; unset: any that the engine takes",
        json_schema_extra=_allowed("a version such as 3.12"),
    )
    packages: tuple[Package, ...] = Field(
        (), max_length=200, description="Debian packages; installed when provisioning as root"
    )
    time_sync: bool = Field(
        True,
        description="see to it that an NTP client runs, and install systemd-timesyncd where there is none; "
        "systemd manager only, and never in a container",
    )
    journal_max_size: Size | None = Field(
        None,
        ge=16 << 20,
        le=1 << 50,
        description="most that the system's journal takes on the disk (systemd manager); unset: left alone",
        json_schema_extra=_allowed("a size such as 4GB"),
    )
    min_free_disk: Size = _size(1 << 30, 0, 1 << 50, "free space needed below root")
    model_hub: Annotated[Text, AfterValidator(_model_hub)] | None = Field(
        None,
        description="base URL of the hub that hf:// sources are fetched from; unset: Hugging Face's own",
        json_schema_extra=_allowed("an https:// URL"),
    )
    download_rate: Size | None = Field(
        None,
        ge=1 << 10,
        le=1 << 50,
        description="bytes a second in all that checkpoints are fetched with; unset: as fast as they come",
        json_schema_extra=_allowed("a size such as 100MB, meant per second"),
    )
    download_files: int = Field(4, ge=1, le=64, description="files of a checkpoint fetched at the same time")


class Engine(_Section):
    """Which engine serves, and how it computes."""

    kind: Literal["embedded", "sglang"] = Field(
        "embedded", description="the toolkit's own engine, or SGLang with the DDTREE plugin"
    )
    version: str | None = Field(
        None,
        pattern=r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$",
        max_length=64,
        description="pinned engine version (sglang)",
        json_schema_extra=_allowed("a version such as 0.5.17"),
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of weights and values")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; unset: tuned by the build")
    attention_backend: (
        Literal[
            "triton",
            "fa3",
            "flashinfer",
            "flashmla",
            "cutlass_mla",
            "trtllm_mla",
            "trtllm_mha",
            "torch_native",
        ]
        | None
    ) = Field(None, description="attention backend (sglang); unset: triton, which takes tree masks")
    quantization: (
        Literal[
            "awq",
            "awq_marlin",
            "compressed-tensors",
            "fp8",
            "gptq",
            "gptq_marlin",
            "modelopt",
            "modelopt_fp4",
            "modelopt_fp8",
            "mxfp4",
            "mxfp8",
        ]
        | None
    ) = Field(None, description="quantization of the weights (sglang); unset: what the checkpoint says")
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        None, description="data type of cached keys and values (sglang); unset: auto, the model's"
    )
    moe_backend: (
        Literal[
            "auto",
            "cutlass",
            "deep_gemm",
            "flashinfer_cutedsl",
            "flashinfer_cutlass",
            "flashinfer_mxfp4",
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "marlin",
            "triton",
            "triton_kernel",
        ]
        | None
    ) = Field(None, description="kernels of the experts (sglang); unset: auto, SGLang chooses")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="part of a GPU's memory for weights and K/V (sglang); unset: SGLang's own estimate",
    )
    prefill_chunk: int | None = Field(
        None, ge=1, le=1 << 20, description="tokens of one prefill step (sglang); unset: by the GPU's memory"
    )
    page_size: int | None = Field(
        None, ge=1, le=1024, description="tokens of a page of cached K/V (sglang); unset: 1 for DDTREE"
    )
    max_graph_batch: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="requests of the largest CUDA graph (sglang); unset: service.max_running_requests",
    )
    extra_args: tuple[Text, ...] = Field(
        (), max_length=200, description="further arguments of the server, passed on byte for byte"
    )


class Checkpoint(_Section):
    """A model checkpoint: `bundled`, a folder on the host, or a source that it is fetched from."""

    source: Annotated[Text, AfterValidator(_checkpoint)] = Field(
        "bundled",
        max_length=4096,
        description="the bundled checkpoint, a folder on the host, or where it is fetched from",
        json_schema_extra=_allowed("bundled, a path starting with / or ~/, hf://, https:// or peer://"),
    )
    revision: Text | None = Field(
        None, min_length=1, max_length=200, description="pinned revision of the checkpoint"
    )
    shape: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$",
        description="known checkpoint whose layers, heads and sizes it has; the memory rule needs it",
        json_schema_extra=_allowed("the name of a shape such as kimi-k2.6-int4"),
    )

    @property
    def remote(self) -> Source | None:
        """Where it is fetched from; None where it is on the host already."""
        return parse(self.source, self.revision) if is_remote(self.source) else None

    @property
    def pinned(self) -> bool:
        """Whether it is of one revision."""
        return self.revision is not None or self.remote is not None

    @model_validator(mode="after")
    def _one_revision(self) -> Self:
        if (remote := self.remote) is not None and not remote.pinned:
            said = f"is at {remote.revision!r}, which moves: name its commit (40 hexadecimal digits)"
            raise ValueError(said)
        return self


class Model(_Section):
    """What is served."""

    target: Checkpoint = Field(Checkpoint(), description="the model whose text is served")
    drafter: Checkpoint | None = Field(None, description="the DFlash drafter; needed by DFLASH and DDTREE")
    served_name: Text = Field("default", min_length=1, max_length=200, description="model name in the API")
    context_length: int | None = Field(
        None, ge=16, le=1 << 24, description="tokens of prompt and output together; unset: the checkpoint's"
    )
    trust_remote_code: bool = Field(False, description="run Python files of a local, pinned checkpoint")


class Parallelism(_Section):
    """How the model is spread over GPUs."""

    tp: int = Field(1, ge=1, le=1024, description="tensor parallel size")
    pp: int = Field(1, ge=1, le=1024, description="pipeline parallel size")
    ep: int = Field(1, ge=1, le=1024, description="expert parallel size")
    dp_attention: bool = Field(False, description="data-parallel attention")


class Speculative(_Section):
    """Speculative decoding."""

    algorithm: Literal["NONE", "DFLASH", "DDTREE"] = Field("DDTREE", description="how tokens are decoded")
    block_size: int = Field(8, ge=2, le=64, description="slots that the drafter fills, bonus token included")
    budget: int = Field(
        16, ge=1, le=1024, description="tree nodes without the root; a verify step is budget + 1 rows wide"
    )
    topk_cap: int = Field(8, ge=1, le=1024, description="candidates that each drafted slot offers")
    expansion: Literal["chain", "best_first", "chain_seeded", "transition"] = Field(
        "best_first",
        description="which prefixes of the drafted block become nodes; transition needs a drafter with a "
        "transition table, as the bundled one has",
    )
    debug_metrics: bool = Field(False, description="write one JSON line a verify step to the debug file")


class SecretRef(_Section):
    """Where a secret is read when it is needed; the secret itself is never in a profile.

    Exactly one of the keys is set.
    """

    model_config = ConfigDict(json_schema_extra={"secret": True})

    env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable that holds the secret",
        json_schema_extra=_allowed("the name of an environment variable"),
    )
    file: AbsolutePath | None = Field(None, description="file with the secret, readable by its owner only")
    command: tuple[Text, ...] | None = Field(
        None, min_length=1, max_length=100, description="command that prints the secret; run without a shell"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(value is not None for value in (self.env, self.file, self.command)) != 1:
            raise ValueError("needs exactly one of the keys env, file and command")
        return self


class Restart(_Section):
    """When a server that ended by itself is started again (systemd.unit(5): StartLimit*)."""

    delay: Duration = _duration(1.0, 0, 3600, "wait before the next start")
    burst: int = Field(5, ge=0, le=1000, description="starts within `interval` before it is left stopped")
    interval: Duration = _duration(600.0, 0.001, _MONTH, "the time over which starts are counted")


class Service(_Section):
    """The long-running server."""

    manager: Literal["process", "systemd"] = Field(
        "process", description="a detached supervisor without root, or a systemd system unit"
    )
    bind: Address = Field("127.0.0.1", description="address that the server listens on")
    port: int = Field(30000, ge=1, le=65535, description="TCP port that the server listens on")
    max_running_requests: int = Field(16, ge=1, le=4096, description="requests decoded in one batch")
    max_queued_requests: int = Field(
        256, ge=1, le=1 << 20, description="requests that wait for a place; more are answered 503"
    )
    load_timeout: Duration = _duration(90.0, 0.001, 86400, "from start to the first real token")
    stop_timeout: Duration = _duration(30.0, 0.001, 3600, "from the stop signal to the kill")
    restart: Restart = Field(Restart(), description="restarts of a server that ended by itself")
    environment: dict[str, Text] = Field(
        default_factory=dict, max_length=200, description="environment variables of the server"
    )
    api_key: SecretRef | None = Field(None, description="key that clients need")
    admin_api_key: SecretRef | None = Field(None, description="key for flushing the cache and the self-check")
    allow_unauthenticated: bool = Field(
        False, description="serve on other addresses than loopback without keys; warned of in every status"
    )
    log_max_size: Size = _size(16 << 20, 4096, 1 << 40, "the log is rotated at this size")
    keep_releases: int = Field(5, ge=2, le=1000, description="releases kept on the host")


class Acceptance(_Section):
    """What a release must show before it counts as deployed."""

    level: Literal["quick", "full"] = Field(
        "quick", description="quick restarts nothing; full also swaps to linear DFLASH and back"
    )
    min_acceptance_length: float | None = Field(
        None, ge=1, le=64, description="tokens a verify step, bonus included"
    )
    min_tokens_per_second: float | None = Field(None, gt=0, le=1e9, description="output tokens a second")
    tolerance: float = Field(0.1, ge=0, lt=1, description="allowed fall against the base release's report")
    speed_tolerance: float | None = Field(
        None, ge=0, lt=1, description="allowed fall of tokens/s, where it is more noisy; unset: `tolerance`"
    )
    requests: int = Field(160, ge=151, le=100000, description="requests sent in all")
    concurrency: int = Field(16, ge=1, le=1024, description="requests sent at once")
    time_limit: Duration = _duration(120.0, 1, 86400, "the whole acceptance ends by then")
    prompts: AbsolutePath | None = Field(
        None, description="JSON lines file with a `prompt` each; unset: the built-in set"
    )


class Profile(_Section):
    """A hardware profile, version 1."""

    schema_version: Literal[1] = Field(1, alias="schema", description="version of this schema")
    name: Name = Field(
        description="the profile's and the service's name; a profile found by name has that of its file"
    )
    description: Annotated[str, AfterValidator(_paragraph)] = Field(
        "", max_length=2000, description="what the profile is for"
    )
    hardware: Hardware = Field(Hardware(), description="what the host must have")
    host: Host = Field(Host(), description="where things lie on the host")
    engine: Engine = Field(Engine(), description="which engine serves")
    model: Model = Field(Model(), description="what is served")
    parallelism: Parallelism = Field(Parallelism(), description="how the model is spread over GPUs")
    speculative: Speculative = Field(Speculative(), description="speculative decoding")
    service: Service = Field(Service(), description="the long-running server")
    acceptance: Acceptance = Field(Acceptance(), description="what a release must show")

    @property
    def installs_libraries(self) -> bool:
        """Whether the engine's libraries are installed for it, from the engine's lock."""
        return self.service.manager == "systemd" and self.host.python is None

    @property
    def system_user(self) -> str | None:
        """The user that systemd runs the service as; None under the process manager."""
        return (self.host.user or DEFAULT_USER) if self.service.manager == "systemd" else None
