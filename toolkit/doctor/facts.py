"""A host's facts, parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toolkit.doctor.load_result import Load
from toolkit.doctor.parse.pci import Device, parse_lspci
from toolkit.doctor.parse.smi import Gpu, Smi, parse_smi
from toolkit.doctor.parse.topology import Matrix, parse_matrix
from toolkit.doctor.wanted import Wanted

_NOTHING: dict[str, Any] = {"out": "", "err": "", "status": None, "why": "missing"}


@dataclass(frozen=True)
class Facts:
    """What `collect` gathered; parsed where it is first asked for.

    Attributes:
        raw: its answer.
    """

    raw: Mapping[str, Any]

    def command(self, name: str) -> dict[str, Any]:
        """The answer of a program; one that was not asked counts as missing."""
        return dict(self.raw["commands"].get(name, _NOTHING))

    def file(self, path: str) -> str | None:
        """Text of a file; None where it is absent."""
        text: str | None = self.raw["files"].get(path)
        return text

    @property
    def systemd(self) -> bool:
        """Whether systemd runs the host (sd_booted(3)), so that its units can be asked and started."""
        return bool(self.raw.get("systemd", True))

    @cached_property
    def smi(self) -> Smi | None:
        """The driver's account of its GPUs; None where it gives none."""
        answer = self.command("smi")
        return parse_smi(answer["out"]) if answer["status"] == 0 else None

    @cached_property
    def topology(self) -> Matrix:
        """How the GPUs are joined."""
        return parse_matrix(self.command("topology")["out"])

    @cached_property
    def p2p(self) -> Matrix:
        """Whether each GPU reads another's memory."""
        return parse_matrix(self.command("p2p")["out"])

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """What lspci tells."""
        return parse_lspci(self.command("lspci")["out"])

    @cached_property
    def modules(self) -> frozenset[str]:
        """Loaded kernel modules."""
        return frozenset(self.raw.get("modules", ()))

    @property
    def load(self) -> Load | None:
        """What was measured under load; None where that was not asked for."""
        found: Load | None = self.raw.get("load")
        return found

    @property
    def own(self) -> Sequence[int]:
        """Processes of the service."""
        return list(self.raw["own"])

    @property
    def container(self) -> bool:
        """Whether the host is itself a container, which cannot grant every limit."""
        return self.command("container")["out"].strip() not in ("", "none")

    def used(self, profile: Wanted) -> list[Gpu]:
        """The GPUs that the service uses, in its order: those of CUDA_VISIBLE_DEVICES, else the first ones.

        As CUDA reads it (programming guide, environment variables): the beginning of a UUID stands for it,
        and what names no GPU ends the list.
        """
        gpus = () if self.smi is None else self.smi.gpus
        visible = profile.service.environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return list(gpus[: profile.hardware.count])
        found: list[Gpu] = []
        for name in (part.strip() for part in visible.split(",")):
            named = [gpu for gpu in gpus if name and (str(gpu.index) == name or _begins(gpu.uuid, name))]
            if len(named) != 1 or named[0] in found:
                break
            found += named
        return found


def _begins(uuid: str, name: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)
