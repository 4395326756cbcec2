"""What a profile wants of a host, as far as the doctor judges it.

Plain values with the profile's own names, so that a host judges itself where nothing is installed but Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from toolkit.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Hardware:
    """Of the profile's section `hardware`."""

    device: Literal["cpu", "cuda"]
    gpu: str | None
    count: int
    memory_gib: float | None
    interconnect: Literal["none", "pcie", "nvlink"]
    min_driver: str | None
    cuda: str | None


@dataclass(frozen=True, slots=True)
class Host:
    """Of the section `host`; `min_free_disk` is in bytes."""

    os: str | None
    python_version: str | None
    packages: tuple[str, ...]
    min_free_disk: int


@dataclass(frozen=True, slots=True)
class Engine:
    """Of the section `engine`."""

    kind: Literal["embedded", "sglang"]


@dataclass(frozen=True, slots=True)
class Service:
    """Of the section `service`."""

    manager: Literal["process", "systemd"]
    bind: str
    port: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a profile wants of a host.

    Attributes:
        name: of the profile.
        hardware, host, engine, service: of its sections.
        installs_libraries: whether the engine's libraries are installed for it.
        system_user: whom the service runs as; None under the process manager.
    """

    name: str
    hardware: Hardware
    host: Host
    engine: Engine
    service: Service
    installs_libraries: bool
    system_user: str | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Wanted:
        """What `to_json` gave."""
        host = {**value["host"], "packages": tuple(value["host"]["packages"])}
        parts: dict[str, Any] = {
            "hardware": Hardware(**value["hardware"]),
            "host": Host(**host),
            "engine": Engine(**value["engine"]),
            "service": Service(**value["service"]),
        }
        return Wanted(**{**value, **parts})


def wanted_of(profile: Profile) -> Wanted:
    """What a profile wants."""
    hardware, host, service = profile.hardware, profile.host, profile.service
    return Wanted(
        profile.name,
        Hardware(
            hardware.device,
            hardware.gpu,
            hardware.count,
            hardware.memory_gib,
            hardware.interconnect,
            hardware.min_driver,
            hardware.cuda,
        ),
        Host(host.os, host.python_version, tuple(host.packages), host.min_free_disk),
        Engine(profile.engine.kind),
        Service(service.manager, service.bind, service.port, dict(service.environment)),
        profile.installs_libraries,
        profile.system_user,
    )
