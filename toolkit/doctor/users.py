"""Who is on a GPU."""

from __future__ import annotations

from toolkit.doctor.facts import Facts
from toolkit.doctor.parse.smi import Gpu, GpuProcess

HELD_MIB = 1024  # what an idle GPU never uses


def named(process: GpuProcess, facts: Facts) -> str:
    """A process with its program and user, as far as they are known."""
    about = facts.raw["processes"].get(str(process.pid)) or {}
    by = f" of {about['user']}" if about.get("user") else ""
    return f"process {process.pid} ({process.name}){by}"


def users_of(gpu: Gpu, facts: Facts) -> str:
    """Why a GPU is not free for others, "" where it is. A desktop counts as nobody."""
    if gpu.mig:
        return "MIG, which splits it"
    computing = [process for process in gpu.processes if "C" in process.kind]
    strangers = [process for process in computing if process.pid not in facts.own]
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        return f"{named(strangers[0], facts)}{more}"
    if computing:
        return f"the service itself, process {computing[0].pid}"
    if (gpu.used_mib or 0) > HELD_MIB and not gpu.processes:
        return f"a process that is not seen from here, with {gpu.used_mib} MiB"
    return ""
