"""NTP clients of a host: which are there, and whether one runs."""

from __future__ import annotations

import subprocess

# Units of the clients that Debian and Ubuntu have, those first that replace systemd's own.
CLIENTS = (
    "chrony.service", "ntpsec.service", "ntp.service", "openntpd.service", "systemd-timesyncd.service",
)  # fmt: skip
_LIMIT = 30.0


def in_container() -> bool:
    """Whether this machine is a container, whose clock is another's business (systemd-detect-virt(1))."""
    return _run("systemd-detect-virt", "--container", "--quiet") is not None


def trouble() -> str | None:
    """Why the time is not kept; None where a client is active, or where systemd cannot be asked."""
    said = _run("systemctl", "show", "--property=Id,LoadState,ActiveState", *CLIENTS)
    if said is None:
        return None
    units = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in said.split("\n\n")]
    if any(unit.get("ActiveState") == "active" for unit in units):
        return None
    known = [f"{unit['Id']} is inactive" for unit in units if unit.get("LoadState") == "loaded"]
    masked = [f"{unit['Id']} is masked" for unit in units if unit.get("LoadState") == "masked"]
    return ", ".join(known or masked) or "none is installed"


def _run(*command: str) -> str | None:
    """What it prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
