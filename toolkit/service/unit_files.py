"""Unit files in /etc/systemd/system: written only when they differ, and then read by systemd."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files import replace_file
from toolkit.service.systemctl import properties, require, systemctl

FOLDER = Path("/etc/systemd/system")
_FOLDERS = (FOLDER, *(Path(f"{root}/systemd/system") for root in ("/run", "/usr/local/lib", "/usr/lib")))
_MODE = 0o644
_FULL = (errno.ENOSPC, errno.EDQUOT)


def path_of(unit: str) -> Path:
    """Where the file of `unit` lies."""
    return FOLDER / unit


def installed(unit: str) -> str | None:
    """The text of the unit file on disk; None without one."""
    try:
        return path_of(unit).read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def drop_ins(unit: str) -> list[str]:
    """Paths of the drop-ins of `unit` on disk, whether systemd has read them or not (systemd.unit(5))."""
    return [str(path) for folder in _FOLDERS for path in (folder / f"{unit}.d").glob("*.conf")]


def digest(text: str) -> str:
    """What tells one text from another: sha256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def install(unit: str, text: str, *, at_boot: bool = False) -> None:
    """Make `text` the unit file, and have systemd read it; both only where needed.

    Args:
        unit: name of the unit.
        text: its file.
        at_boot: have it started at boot, too.

    Raises:
        ToolkitError: it cannot be written (not root, a read-only file system), or systemd refuses.
    """
    path = path_of(unit)
    if installed(unit) != text:
        try:
            _write(path, text.encode())
        except OSError as error:
            hint = "deploy as root" if error.errno == errno.EACCES else None
            raise ToolkitError(f"{path}: cannot write the unit: {error.strerror}", hint=hint) from error
        require("daemon-reload")
    facts = properties(unit, ["NeedDaemonReload", "UnitFileState"])
    if facts["NeedDaemonReload"] == "yes":
        require("daemon-reload")
    if at_boot and facts["UnitFileState"] != "enabled":
        enable(unit)


def uninstall(unit: str) -> bool:
    """Remove the file of `unit`, and have systemd forget it; whether there was one. Drop-ins stay.

    Raises:
        ToolkitError: it cannot be removed, or systemd refuses.
    """
    path = path_of(unit)
    if not os.path.lexists(path):
        return False
    disable(unit)
    try:
        path.unlink()
    except OSError as error:
        raise ToolkitError(f"{path}: cannot remove the unit: {error.strerror}") from error
    require("daemon-reload")
    systemctl("reset-failed", unit)  # it fails where there is nothing to reset
    return True


def enabled(unit: str) -> bool:
    """Whether `unit` is started at boot; False also where systemd does not answer."""
    with contextlib.suppress(ToolkitError):
        return systemctl("is-enabled", unit).stdout.strip() == "enabled"
    return False


def enable(unit: str) -> None:
    """Have `unit` started at boot.

    Raises:
        ToolkitError: systemd refuses.
    """
    if not enabled(unit):
        # What is started at boot is read at boot: nothing that runs needs to hear of it.
        require("enable", "--no-reload", unit)


def disable(unit: str) -> None:
    """Have `unit` not started at boot.

    Raises:
        ToolkitError: systemd refuses.
    """
    if enabled(unit):
        require("disable", "--no-reload", unit)


def _write(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data, _MODE)
    except OSError as error:
        if error.errno not in _FULL or not path.is_file():
            raise
        _overwrite(path, data)


def _overwrite(path: Path, data: bytes) -> None:
    """Return to an earlier release on a full disk: a text within the file's own block takes no more space."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
