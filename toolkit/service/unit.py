"""One model of a long-running service, which every service manager runs or renders.

A unit is complete in itself: it is stored as `unit.json` in a release and read back without the profile.
Secrets are references; what they point to is written to `secrets_file` when the service starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.files import json_bytes, read_json

SCHEMA = 1
UNIT_FILE = "unit.json"
_DELETE = 0x7F


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where a secret is read: an environment variable, a file, or a command's output, one of them.

    With none, it is read nowhere again: the value came from the control machine and is kept with the release.
    """

    env: str | None = None
    file: str | None = None
    command: tuple[str, ...] | None = None

    def describe(self) -> str:
        """The reference in words, without the secret."""
        if self.env is not None:
            return f"environment variable {self.env}"
        if self.file is not None:
            return f"file {self.file}"
        if self.command is not None:
            return f"command {(self.command or ('?',))[0]}"
        return "kept with the release"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a server that ended by itself is started again.

    Attributes:
        delay: seconds between the end and the next start.
        burst: starts within `interval`, the first included, before it is left failed; 0 and 1: no restart.
        interval: seconds.
    """

    delay: float = 1.0
    burst: int = 5
    interval: float = 300.0


@dataclass(frozen=True, slots=True)
class Unit:
    """A long-running service.

    Attributes:
        name: service name, a DNS label.
        release: id of the release that the unit belongs to.
        description: one line for people.
        argv: program and arguments, passed on byte for byte.
        environment: the whole environment of the process apart from PATH and LANG.
        working_directory: absolute path.
        host: address that the server binds.
        port: TCP port that the server binds.
        manager: which service manager runs it, `process` or `systemd`.
        user: system user (systemd manager), None: the administrator's own.
        secrets: configuration key (`api-key`) to its reference.
        secrets_file: YAML file for `--config` with the secrets' values, mode 0600; None without secrets.
        cache: folder that the service may write.
        load_timeout: seconds from start to the first real token.
        stop_timeout: seconds from SIGTERM to SIGKILL.
        restart: restart policy.
        limits: resource limits by name of setrlimit(2) in lower case without `rlimit_`; None is infinity.
        log: file for the output (process manager).
        log_max_size: bytes at which the log is rotated.
        gpus: GPUs that the service uses; 0 on a CPU.
        nvlink: whether the GPUs are joined by NVLink, which needs the fabric manager.
    """

    name: str
    release: str
    description: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: str
    host: str
    port: int
    manager: str = "process"
    user: str | None = None
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    secrets_file: str | None = None
    cache: str = ""
    load_timeout: float = 90.0
    stop_timeout: float = 30.0
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    limits: Mapping[str, int | None] = field(default_factory=dict)
    log: str = ""
    log_max_size: int = 16 << 20
    gpus: int = 0
    nvlink: bool = False

    def __post_init__(self) -> None:
        problems = [
            _text_problem(self.description, "description", "a description"),
            *(_text_problem(value, "engine.extra_args", "an argument") for value in self.argv),
            *(
                _text_problem(value, f"service.environment.{name}", "a value")
                for name, value in self.environment.items()
            ),
            *(_name_problem(name) for name in self.environment),
        ]
        found = [problem for problem in problems if problem is not None]
        if not self.argv:
            found.append(Problem("a unit needs a program to run", key="argv"))
        if found:
            raise ConfigError(found)

    @property
    def url(self) -> str:
        """Base URL under which this host reaches the server; a wildcard address becomes the loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def kill_wait(self) -> float:
        """Seconds from SIGKILL until a process counts as not to be killed; a GPU's memory takes a while."""
        return min(max(self.stop_timeout, 1.0), 10.0)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `from_json` gives an equal unit back."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(value: Any, source: str = UNIT_FILE) -> Unit:
        """The unit of `to_json`'s object.

        Raises:
            ToolkitError: the object is no unit of this schema; names `source` and the key.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise ToolkitError(f"{source}: no unit of schema {SCHEMA}", hint="deploy the profile again")
        known = {item.name for item in fields(Unit)}
        given = {key: item for key, item in value.items() if key != "schema"}
        if unknown := sorted(given.keys() - known):
            raise ToolkitError(f"{source}: unknown key {unknown[0]}", hint="deploy the profile again")
        try:
            given["argv"] = tuple(given["argv"])
            given["restart"] = RestartPolicy(**given["restart"])
            given["secrets"] = {key: _secret(item) for key, item in given["secrets"].items()}
            return Unit(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise ToolkitError(f"{source}: damaged unit: {error}", hint="deploy the profile again") from error


def write_unit(unit: Unit) -> bytes:
    """The bytes of `unit.json`."""
    return json_bytes(unit.to_json())


def read_unit(release: Path) -> Unit:
    """The unit of the release in folder `release`.

    Raises:
        ToolkitError: the file is absent or damaged.
    """
    path = release / UNIT_FILE
    value = read_json(path)
    if value is None:
        raise ToolkitError(f"{path}: absent or no JSON", hint="deploy the profile again")
    return Unit.from_json(value, str(path))


def seconds(value: float) -> str:
    """A duration for people: `90 s`, `1.5 s`."""
    return f"{value:.0f} s" if math.isclose(value, round(value)) else f"{value:.1f} s"


def _secret(value: Mapping[str, Any]) -> SecretSource:
    command = value.get("command")
    return SecretSource(value.get("env"), value.get("file"), None if command is None else tuple(command))


def _text_problem(value: str, key: str, what: str) -> Problem | None:
    for character in value:
        code = ord(character)
        if (code < ord(" ") and character != "\t") or code == _DELETE:
            said = f"{what} holds the control character {character!r}; only a tab is allowed"
            return Problem(said, key=key)
        if 0xD800 <= code <= 0xDFFF:
            return Problem(f"{what} is no valid Unicode text", key=key)
    return None


def _name_problem(name: str) -> Problem | None:
    # systemd.exec(5), Environment=: the names that every manager passes on.
    if name.isascii() and name.isidentifier():
        return None
    return Problem(f"{name!r} is no variable name: letters, digits and _ only", key="service.environment")
