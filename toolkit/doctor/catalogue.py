"""Every check: its name, what it looks at, and which profiles it concerns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.doctor.checks import collective, driver, gpus, inside, joined, load, machine, pcie
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result
from toolkit.doctor.wanted import Wanted
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: for `--ignore-check`.
        run: what it finds; a pure function.
        needs: what makes it concern a profile: `gpu`, `gpus` (several), `nvlink`, `systemd`, `sglang`.
        about: what it has nothing to say without: an answer of the `driver`, any of the `gpus` used, or a
            `load` on them.
    """

    name: str
    run: Callable[[Facts, Wanted], Iterator[Result]]
    needs: tuple[str, ...] = ()
    about: Literal["host", "driver", "gpus", "load"] = "host"

    def unconcerned(self, profile: Wanted) -> str | None:
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
    Check("cuda", driver.cuda, ("gpu",), about="driver"),
    Check("driver-packages", driver.packages, ("gpu",)),
    Check("gpu-count", gpus.count, ("gpu",), about="driver"),
    Check("gpu-model", gpus.model, ("gpu",), about="gpus"),
    Check("gpu-memory", gpus.memory, ("gpu",), about="gpus"),
    Check("ecc", gpus.ecc, ("gpu",), about="gpus"),
    Check("mig", gpus.mig, ("gpu",), about="gpus"),
    Check("persistence", gpus.persistence, ("gpu",), about="gpus"),
    Check("gpu-processes", gpus.processes, ("gpu",), about="gpus"),
    Check("pcie-link", pcie.link, ("gpu",), about="gpus"),
    Check("acs", pcie.acs, ("gpu", "gpus"), about="gpus"),
    Check("iommu", pcie.iommu, ("gpu", "gpus"), about="gpus"),
    Check("topology", joined.topology_of, ("gpu", "gpus"), about="gpus"),
    Check("p2p", joined.p2p, ("gpu", "gpus"), about="gpus"),
    Check("numa", joined.numa, ("gpu", "gpus"), about="gpus"),
    Check("nvlink", joined.nvlink, ("gpu", "gpus", "nvlink"), about="gpus"),
    Check("fabric", joined.fabric, ("gpu", "nvlink"), about="gpus"),
    Check("fabric-manager", joined.fabric_manager, ("gpu", "nvlink")),
    Check("pcie-bandwidth", load.bandwidth, ("gpu",), about="load"),
    Check("p2p-bandwidth", load.p2p_bandwidth, ("gpu", "gpus"), about="load"),
    Check("all-reduce", collective.all_reduce, ("gpu", "gpus"), about="load"),
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


def silent(check: Check, facts: Facts, profile: Wanted) -> str | None:
    """Why a check has nothing to say on a host; None where it has."""
    if check.about != "host" and facts.smi is None:
        return "the driver does not answer"
    if check.about in ("gpus", "load") and not facts.used(profile):
        return "no GPU is seen"
    if check.about == "load" and facts.load is None:
        return "it is measured with --load alone"
    return None


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
