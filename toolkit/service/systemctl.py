"""Asking systemd, and telling it, through `systemctl`."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence

from toolkit.errors import ToolkitError

QUICK = 30.0
_ATTEMPTS = 4
_PAUSE = 1.0
_VERSION = re.compile(r"^systemd (\d+)")


def systemctl(*arguments: str, limit: float = QUICK) -> subprocess.CompletedProcess[str]:
    """Run `systemctl` to its end, whatever its status.

    Raises:
        ToolkitError: it cannot be run, or does not end within `limit` seconds.
    """
    return command("systemctl", "--no-ask-password", *arguments, limit=limit)


def require(*arguments: str, limit: float = QUICK) -> None:
    """Run `systemctl` and insist on its success.

    Raises:
        ToolkitError: it failed; has what it said.
    """
    done = systemctl(*arguments, limit=limit)
    if done.returncode != 0:
        raise ToolkitError(f"systemctl {' '.join(arguments)}: {said(done)}")


def properties(unit: str, names: Sequence[str]) -> dict[str, str]:
    """Properties of a unit, loaded or not; one that this systemd does not have is "".

    Raises:
        ToolkitError: systemd does not answer.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)  # it does not answer while it re-executes itself, as after an upgrade
        done = systemctl("show", unit, f"--property={','.join(names)}")
        if done.returncode == 0:
            break
    else:
        raise ToolkitError(f"systemctl show {unit}: {said(done)}")
    found = dict.fromkeys(names, "")
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        found[name] = value
    return found


def systemd_version() -> int:
    """The version of this machine's systemd.

    Raises:
        ToolkitError: there is none, or it tells no version.
    """
    done = systemctl("--version")
    match = _VERSION.match(done.stdout)
    if match is None:
        raise ToolkitError(f"systemctl --version tells no version: {done.stdout[:80]!r}")
    return int(match[1])


def command(program: str, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's programs in the C locale.

    Raises:
        ToolkitError: it cannot be run, or does not end within `limit` seconds.
    """
    try:
        return subprocess.run(
            [program, *arguments],
            env=os.environ | {"LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except OSError as error:
        raise ToolkitError(f"{program} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{program} {' '.join(arguments)} did not end within {limit:g} s") from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a program that failed said, in one line."""
    return " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
