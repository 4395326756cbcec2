"""What an acceptance run is to do: settings as a JSON file, or from a profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import ConfigError, Problem
from toolkit.profile.schema import Profile, SecretRef

KEY_VARIABLES = {"api_key": "DDTOOLKIT_API_KEY", "admin_api_key": "DDTOOLKIT_ADMIN_API_KEY"}


class Settings(BaseModel):
    """Settings of one acceptance run. Secrets are references, never values.

    `required` names checks that must end as passed; any check that ends as failed refuses anyway.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    url: str = Field(min_length=1)
    level: Literal["quick", "full"] = "quick"
    mode: Literal["acceptance", "experiment"] = "acceptance"
    api_key: SecretRef | None = None
    admin_api_key: SecretRef | None = None
    algorithm: Literal["NONE", "DFLASH", "DDTREE"] | None = None
    block_size: int | None = Field(None, ge=2)
    budget: int | None = Field(None, ge=1)
    topk_cap: int | None = Field(None, ge=1)
    dtype: Literal["float32", "bfloat16"] | None = None
    fp8_kv_cache: bool = False
    top_logit: float | None = Field(
        None, gt=0, description="size of the plain model's top logit, where known"
    )
    min_acceptance_length: float | None = Field(None, ge=1)
    min_tokens_per_second: float | None = Field(None, gt=0)
    tolerance: float = Field(0.1, ge=0, lt=1)
    speed_tolerance: float | None = Field(None, ge=0, lt=1)
    base_reports: tuple[str, ...] = Field(
        (), description="reports of the base release and, behind it, of those that served before it"
    )
    requests: int = Field(160, ge=151, le=100_000)
    concurrency: int = Field(16, ge=1, le=1024)
    time_limit: float = Field(120.0, gt=0)
    request_timeout: float = Field(60.0, gt=0, description="seconds of one request; bounds a hanging server")
    prompts: str | None = None
    max_new_tokens: int = Field(
        65, ge=65, le=4096, description="tokens of a compared output: 64 judged positions"
    )
    load_tokens: int = Field(16, ge=2, le=4096, description="tokens of each request under load")
    required: tuple[str, ...] = ()


def load_settings(path: Path) -> Settings:
    """Read settings from a JSON file.

    Raises:
        ConfigError: the file cannot be read or is no such JSON; every bad key is named.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}", source=str(path))]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(f"is not JSON: {error}", source=str(path))]) from None
    return settings_from_data(data, source=str(path))


def settings_from_data(data: Any, *, source: str = "") -> Settings:
    """Check settings that are already parsed.

    Raises:
        ConfigError: every key that is wrong, with what is allowed.
    """
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        problems = [
            Problem(item["msg"], key=".".join(map(str, item["loc"])), source=source)
            for item in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(problems) from None


def settings_for(
    profile: Profile,
    url: str | None = None,
    *,
    base_reports: Sequence[Path] = (),
    mode: Literal["acceptance", "experiment"] = "acceptance",
    level: Literal["quick", "full"] | None = None,
    keys_from_environment: bool = False,
) -> Settings:
    """Settings for a release of `profile`.

    Args:
        profile: the release's resolved profile.
        url: where it serves; None takes the profile's bind address and port.
        base_reports: report of the base release, which the new one must not fall behind, then of those that
            served before it; a figure that one lacks is taken from the next.
        mode: "experiment" gates on correctness only.
        level: None takes the profile's.
        keys_from_environment: keys that the profile sets are read from `DDTOOLKIT_API_KEY` and
            `DDTOOLKIT_ADMIN_API_KEY`, as a transaction on the host passes them; else from where the profile
            says, as on the controller.
    """
    accept, tree = profile.acceptance, profile.speculative
    keys = {name: getattr(profile.service, name) for name in KEY_VARIABLES}
    if keys_from_environment:
        keys = {name: SecretRef(env=KEY_VARIABLES[name]) if key else None for name, key in keys.items()}
    speculative = tree.algorithm != "NONE"
    required = ["real_tokens", "many_requests"]
    if speculative and mode == "acceptance":
        required += ["lossless", "lossless_control"]
    return Settings(
        url=url or _url(profile.service.bind, profile.service.port),
        level=level or accept.level,
        mode=mode,
        api_key=keys["api_key"],
        admin_api_key=keys["admin_api_key"],
        algorithm=tree.algorithm,
        block_size=tree.block_size if speculative else None,
        budget=tree.budget if tree.algorithm == "DDTREE" else None,
        topk_cap=tree.topk_cap if tree.algorithm == "DDTREE" else None,
        dtype=profile.engine.dtype,
        min_acceptance_length=accept.min_acceptance_length if speculative else None,
        min_tokens_per_second=accept.min_tokens_per_second,
        tolerance=accept.tolerance,
        speed_tolerance=accept.speed_tolerance,
        base_reports=tuple(map(str, base_reports)),
        requests=accept.requests,
        concurrency=accept.concurrency,
        time_limit=accept.time_limit,
        request_timeout=accept.time_limit / 2,
        prompts=accept.prompts,
        required=tuple(required),
    )


def _url(bind: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)  # noqa: S104 - reached over loopback
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
