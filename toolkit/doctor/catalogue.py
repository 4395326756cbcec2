"""Every check: its name, what it looks at, and which profiles it concerns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from toolkit.doctor.checks import driver, gpus, inside, joined, machine, pcie
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result
from toolkit.errors import ConfigError
from toolkit.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: for `--ignore-check`.
        run: what it finds; a pure function.
        needs: what makes it concern a profile: `gpu`, `gpus` (several), `nvlink`, `systemd`, `sglang`.
        asks_driver: whether it has nothing to say where the driver does not answer.
    """

    name: str
    run: Callable[[Facts, Profile], Iterator[Result]]
    needs: tuple[str, ...] = ()
    asks_driver: bool = False

    def unconcerned(self, profile: Profile) -> str | None:
        """Why it does not concern a profile; None where it does."""
        hardware, service = profile.hardware, profile.service
        lacks = {
            "gpu": None if hardware.device == "cuda" else "the profile uses no GPU",
            "gpus": None if hardware.count > 1 else "the profile uses one GPU",
            "nvlink": None if hardware.interconnect == "nvlink" else "the profile uses no NVLink",
            "systemd": None if service.manager == "systemd" else "the process manager has no sandbox",
            "sglang": None if profile.engine.kind == "sglang" else "this engine compiles nothing on the host",
        }
        return next((lacks[need] for need in self.needs if lacks[need] is not None), None)


CHECKS = (
    Check("driver", driver.driver, ("gpu",)),
    Check("nouveau", driver.nouveau, ("gpu",)),
    Check("cuda", driver.cuda, ("gpu",), asks_driver=True),
    Check("driver-packages", driver.packages, ("gpu",)),
    Check("gpu-count", gpus.count, ("gpu",), asks_driver=True),
    Check("gpu-model", gpus.model, ("gpu",), asks_driver=True),
    Check("gpu-memory", gpus.memory, ("gpu",), asks_driver=True),
    Check("ecc", gpus.ecc, ("gpu",), asks_driver=True),
    Check("mig", gpus.mig, ("gpu",), asks_driver=True),
    Check("persistence", gpus.persistence, ("gpu",), asks_driver=True),
    Check("gpu-processes", gpus.processes, ("gpu",), asks_driver=True),
    Check("pcie-link", pcie.link, ("gpu",), asks_driver=True),
    Check("acs", pcie.acs, ("gpu", "gpus"), asks_driver=True),
    Check("iommu", pcie.iommu, ("gpu", "gpus"), asks_driver=True),
    Check("topology", joined.topology_of, ("gpu", "gpus"), asks_driver=True),
    Check("p2p", joined.p2p, ("gpu", "gpus"), asks_driver=True),
    Check("numa", joined.numa, ("gpu", "gpus"), asks_driver=True),
    Check("nvlink", joined.nvlink, ("gpu", "nvlink"), asks_driver=True),
    Check("fabric", joined.fabric, ("gpu", "nvlink"), asks_driver=True),
    Check("fabric-manager", joined.fabric_manager, ("gpu", "nvlink")),
    Check("sandbox", inside.visible, ("systemd",)),
    Check("limits", inside.limits, ("systemd",)),
    Check("cache", inside.cache, ("systemd",)),
    Check("compilers", inside.compilers, ("gpu", "systemd", "sglang")),
    Check("os", machine.system),
    Check("python", machine.python),
    Check("disk", machine.disk),
    Check("ram", machine.ram),
    Check("shared-memory", machine.shared_memory, ("gpu", "gpus")),
    Check("port", machine.port),
    Check("time", machine.time),
)


def require_known(names: Sequence[str]) -> None:
    """Refuse names of no check.

    Raises:
        ConfigError: one is none; names the nearest.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
            raise ConfigError(f"--ignore-check: there is no check {name!r}", hint=hint)
