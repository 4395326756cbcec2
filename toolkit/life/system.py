"""Taking back what provisioning added to the system: packages, holds, an NTP client that it enabled.

Which packages nobody else needs is apt's own judgement: the ones that provisioning installed are marked as
automatically installed in a copy of apt's records, and those that `autoremove` would remove then are purged
(apt-get(8), apt-mark(8)).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.files import parse_json, read_bytes

LOCK_WAIT = 120  # seconds in which another installation may end
_LIMIT = 1800.0
_ATTEMPTS = 3
_STATES = "/var/lib/apt/extended_states"
_REMOVED = re.compile(r"^(?:Purg|Remv) (\S+)", re.MULTILINE)

# Runs a command: status, standard output, standard error.
Run = Callable[[Sequence[str]], "tuple[int, str, str]"]


def run(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a command on this machine, without questions and in plain words."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    environment["NEEDRESTART_SUSPEND"] = "1"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def give_back(record: Path, run: Run = run) -> tuple[list[str], list[str]]:
    """Take back what `record` lists, and remove it.

    Nothing here fails the uninstall: what cannot be taken back is told with the command that does it.

    Args:
        record: the file that the module `provisioned` wrote.
        run: runs a command.

    Returns:
        What was removed and what was kept and why, a line each.
    """
    try:
        noted = parse_json(read_bytes(record))
        packages, held, enabled = (_names(noted.get(key, [])) for key in ("packages", "held", "enabled"))
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return [], [f"packages that provisioning installed: {record} cannot be read: {error}"]
    removed: list[str] = []
    kept: list[str] = []
    for unit in enabled:
        status, _, said = run(["systemctl", "disable", "--quiet", "--now", unit])
        removed.append(f"start of {unit}") if not status else kept.append(f"{unit}: {said.strip()}")
    states = _states(packages + held, run)
    # First of all: apt removes nothing by itself that is held.
    for name in held:
        if name in states:
            status, _, said = run(["apt-mark", "unhold", name])
            removed.append(f"hold of package {name}") if not status else kept.append(said.strip())
    _purge([name for name in packages if name in states], removed, kept, run)
    with contextlib.suppress(OSError):
        record.unlink()
    return removed, kept


def _names(value: Any) -> list[str]:
    """Names as they were noted.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{value!r} is no list of names")
    return value


def _purge(packages: Sequence[str], removed: list[str], kept: list[str], run: Run) -> None:
    """Purge those of `packages` that nobody else needs; again where dpkg is cut off in the middle."""
    left, told = list(packages), list[str]()
    for _ in range(_ATTEMPTS):
        if not left:
            break
        told = _purge_unneeded(left, run)
        states = _states(packages, run)
        left = [name for name in packages if name in states]
        if not _cut_off(states) and not _removed(states):
            break
    kept.extend(told)
    removed.extend(f"package {name}" for name in packages if name not in left)


def _purge_unneeded(packages: Sequence[str], run: Run) -> list[str]:
    """Why packages stay, a line each; empty where all are gone."""
    states = _states(packages, run)
    broken = _cut_off(states)
    if broken:  # by an earlier removal: apt does nothing before that is settled
        run(["dpkg", "--configure", "-a"])
    unneeded = {*_unneeded(packages, run), *broken, *_removed(states)}
    kept = [f"package {name}: others need it" for name in packages if name not in unneeded]
    if not unneeded:
        return kept
    names = [name for name in packages if name in unneeded]
    # Exactly these: apt may not take anything else with them.
    status, shown, said = run(["apt-get", "--simulate", "--allow-change-held-packages", "purge", *names])
    others = sorted(set(_REMOVED.findall(shown)) - set(names))
    if not status and not others:
        command = ["apt-get", "--yes", "--allow-change-held-packages"]
        command += ["-o", f"DPkg::Lock::Timeout={LOCK_WAIT}", "purge", *names]
        status, _, said = run(command)
    if status or others:
        why = f"{', '.join(others)} would go with them" if others else _last(said)
        kept.append(f"packages {', '.join(names)}: {why}; next: apt-get purge {' '.join(names)}")
    return kept


def _unneeded(packages: Sequence[str], run: Run) -> Collection[str]:
    """Those of `packages` that apt would remove if nobody had asked for them."""
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-") as folder:
        states = Path(folder) / "extended_states"
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(_STATES, states)
        states.touch()
        option = ["-o", f"Dir::State::extended_states={states}"]
        # What recommends or suggests a package does without it, as it did before.
        for kind in ("Recommends", "Suggests"):
            option += ["-o", f"APT::AutoRemove::{kind}Important=false"]
        status, _, _ = run(["apt-mark", *option, "auto", *packages])
        if status:
            return ()
        command = ["apt-get", *option, "--simulate", "--allow-change-held-packages", "autoremove", "--purge"]
        _, shown, _ = run(command)
    return set(_REMOVED.findall(shown)) & set(packages)


def _states(packages: Sequence[str], run: Run) -> dict[str, str]:
    """The state of each package that has left something on the machine (dpkg-query(1))."""
    if not packages:
        return {}
    shape = "--showformat=${db:Status-Status} ${Package}\n"
    _, shown, _ = run(["dpkg-query", "--show", shape, *packages])
    states = {name: state for state, name in (line.split(" ") for line in shown.splitlines())}
    return {name: state for name, state in states.items() if state != "not-installed"}


def _cut_off(states: Mapping[str, str]) -> list[str]:
    """Packages at which dpkg was cut off: neither there nor removed."""
    return [name for name, state in states.items() if state not in ("installed", "config-files")]


def _removed(states: Mapping[str, str]) -> list[str]:
    """Packages of which the configuration is left; nobody needs that."""
    return [name for name, state in states.items() if state == "config-files"]


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "apt-get failed"
