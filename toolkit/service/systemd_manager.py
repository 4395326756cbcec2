"""Service manager `systemd`: a system unit. It needs root, and survives a reboot once it is enabled."""

from __future__ import annotations

import contextlib
import pwd
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.layout import ServicePaths
from toolkit.service import gpus, journald, ports, unit_files
from toolkit.service.cgroups import members
from toolkit.service.manager import Leftover, ProcessStatus, StopReport
from toolkit.service.processes import boot_id
from toolkit.service.secrets import write_secrets
from toolkit.service.started import Started, read_started, write_started
from toolkit.service.systemctl import properties, said, systemctl, systemd_version
from toolkit.service.systemd import render_unit, unit_name, verify_unit
from toolkit.service.systemd_status import PROPERTIES, status_of
from toolkit.service.unit import Unit, read_unit

# Type=exec answers once the program is executed; what it waits for are units that are ordered before it.
_START_MARGIN = 1.0  # seconds; what systemd says before it
_START_LIMIT = 180.0
_STOP_MARGIN = 5.0
_STOP_LIMIT = 90.0
_PORT_WAIT = 1.0
_POLL = 0.02
_SEARCHED = 1000
_KILLED = re.compile(r"Killing process (\d+) \((.*)\) with signal SIGKILL")


class SystemdManager:
    """Runs one service as the system unit `ddtoolkit-NAME.service`.

    Attributes:
        kind: `systemd`.
        survives_reboot: whether it is started at boot.
    """

    kind = "systemd"

    def __init__(self, paths: ServicePaths) -> None:
        self._paths = paths
        self._name = paths.base.name
        self._unit = unit_name(self._name)

    @property
    def survives_reboot(self) -> bool:
        """Whether the unit is enabled."""
        return unit_files.enabled(self._unit)

    def check(self, release: Path) -> None:
        """Find what would keep the release in folder `release` from starting, while another one serves.

        Raises:
            ToolkitError: its user or interpreter is missing, or systemd would warn about its unit.
        """
        unit = read_unit(release)
        self._text(unit)
        _check_program(unit)

    def install(self, release: Path) -> None:
        """Write the unit of the release in folder `release`, and have systemd read it.

        Raises:
            ToolkitError: systemd warns about it, or it cannot be written.
        """
        unit_files.install(self._unit, self._text(read_unit(release)))

    def uninstall(self) -> None:
        """Remove the unit, and have systemd forget it.

        Raises:
            ToolkitError: it cannot be removed, or systemd refuses.
        """
        unit_files.uninstall(self._unit)

    def start(self, release: Path) -> None:
        """Start the unit of the release in folder `release`; returns once its program is executed.

        Raises:
            ToolkitError: it runs already, its port is in use, a secret is missing, systemd warns about the
                unit, or it cannot be executed.
        """
        unit = read_unit(release)
        if self.status().active:
            raise ToolkitError(f"{unit.name} runs already", hint=f"ddtoolkit restart {unit.name}")
        if why := ports.busy(unit.host, unit.port):
            raise ToolkitError(why, hint="stop what holds it, or set another service.port")
        write_secrets(unit)
        text = self._text(unit)
        unit_files.install(self._unit, text)
        started = Started(
            release=unit.release,
            time=time.time(),
            digest=unit_files.digest(text),
            boot=boot_id(),
            host=unit.host,
            port=unit.port,
            gpus=unit.gpus,
            stop_timeout=unit.stop_timeout,
            kill_wait=unit.kill_wait,
        )
        write_started(self._paths, started)
        systemctl("reset-failed", self._unit)  # it fails where there is nothing to reset
        done = systemctl("start", self._unit, limit=_START_LIMIT)
        if done.returncode != 0:
            state = self.status()
            self._ask_stop(_STOP_LIMIT)  # it would be tried again by its restart policy
            raise ToolkitError(f"{unit.name}: {state.message}: {said(done)}")
        write_started(self._paths, replace(started, invocation=self._invocation()))

    def stop(self) -> StopReport:
        """Stop the service for good; ends within its stop timeout and some seconds, whatever it meets."""
        begin, wall = time.monotonic(), time.time()
        started = read_started(self._paths)
        group, main = self._group()
        seen = {stat.pid: Leftover(stat.pid, stat.name, stat.start) for stat in members(group)}
        limit = started.stop_timeout + started.kill_wait + _STOP_MARGIN if started else _STOP_LIMIT
        self._ask_stop(limit)
        left = tuple(Leftover(stat.pid, stat.name, stat.start) for stat in members(group))
        kill_wait = started.kill_wait if started else _STOP_MARGIN
        report = StopReport(
            seconds=time.monotonic() - begin,
            # The clock may have been set back meanwhile.
            killed=self._killed(min(wall, time.time() - (time.monotonic() - begin)), seen, main),
            leftovers=left,
            port_busy=_wait_port(started) if started else "",
            gpu_busy=gpus.wait_released(seen, kill_wait) if started and started.gpus else "",
        )
        if started is not None:
            ended = replace(
                started, asked_to_stop=True, stopped=report.describe(), ended=time.time(), leftovers=left
            )
            with contextlib.suppress(OSError):
                write_started(self._paths, ended)
        return report

    def status(self) -> ProcessStatus:
        """The state by systemd, and by what is on record of the last start."""
        started = read_started(self._paths)
        try:
            facts = properties(self._unit, PROPERTIES)
        except ToolkitError as error:
            return ProcessStatus(
                "failed", release=started.release if started else None, message=error.message
            )
        return status_of(self._unit, facts, started)

    def note_start(self) -> None:
        """Put the start that systemd made by other means on record as the last one."""
        started = read_started(self._paths)
        if started is not None:
            write_started(self._paths, replace(started, invocation=self._invocation()))

    def enable(self) -> None:
        """Have it started at boot.

        Raises:
            ToolkitError: systemd refuses.
        """
        unit_files.enable(self._unit)

    def disable(self) -> None:
        """Have it not started at boot.

        Raises:
            ToolkitError: systemd refuses.
        """
        unit_files.disable(self._unit)

    def log_tail(self, lines: int = 20, *, since: float | None = None) -> list[str]:
        """The last lines of output since the last start, or `since`, with systemd's own about the unit."""
        started = read_started(self._paths)
        times = [moment for moment in (since, started.time if started else None) if moment is not None]
        # Lines bear the clock as it was set when they came: one that was set back since must not hide them.
        begun = min([max(times), *self._start_now()]) if times else None
        return journald.tail(self._unit, lines, since=begun)

    def _start_now(self) -> list[float]:
        """When the process of the last start began, by the clock as it is set now; none of a later one."""
        with contextlib.suppress(ToolkitError):
            facts = properties(self._unit, ["ExecMainStartTimestampMonotonic", "NRestarts"])
            if facts["NRestarts"] == "0" and (began := int(facts["ExecMainStartTimestampMonotonic"])):
                return [time.time() - time.monotonic() + began / 1e6 - _START_MARGIN]
        return []

    def logs(self, lines: int, *, follow: bool, ended: Callable[[], bool]) -> Iterator[str]:
        """The last lines of output; with `follow` also each further one until `ended` says so."""
        if follow:
            return journald.follow(self._unit, lines, ended=ended)
        return iter(journald.tail(self._unit, lines))

    def _text(self, unit: Unit) -> str:
        """The unit file for this host, which systemd has no word to say against."""
        if unit.user is not None:
            _require_user(unit.user)
        text = render_unit(unit, systemd_version())
        if unit_files.installed(self._unit) != text and (warnings := verify_unit(text, unit.name)):
            raise ToolkitError(f"{self._unit}: systemd says: {'; '.join(warnings)}")
        return text

    def _ask_stop(self, limit: float) -> None:
        # What still runs when this gives up is found in the unit's control group.
        with contextlib.suppress(ToolkitError):
            systemctl("stop", self._unit, limit=limit)

    def _invocation(self) -> str:
        return properties(self._unit, ["InvocationID"])["InvocationID"]

    def _group(self) -> tuple[str, int]:
        """The unit's control group and main process; where systemd does not answer, the group it uses."""
        group, main = f"/system.slice/{self._unit}", "0"
        with contextlib.suppress(ToolkitError):
            facts = properties(self._unit, ["ControlGroup", "MainPID"])
            group, main = facts["ControlGroup"] or group, facts["MainPID"] or main
        return group, int(main)

    def _killed(self, since: float, seen: dict[int, Leftover], main: int) -> tuple[Leftover, ...]:
        """What systemd had to kill besides the main process, by its own account."""
        found = {}
        for line in journald.tail(self._unit, _SEARCHED, since=since):
            match = _KILLED.search(line)
            if match is not None and int(match[1]) != main:
                pid = int(match[1])
                found[pid] = seen.get(pid, Leftover(pid, match[2], 0))
        return tuple(found.values())


def _wait_port(started: Started) -> str:
    """Why the port is not free; the kernel may free a killed process's port a moment after its end."""
    end = time.monotonic() + _PORT_WAIT
    while (busy := ports.busy(started.host, started.port)) and time.monotonic() < end:
        time.sleep(_POLL)
    return busy


def _require_user(user: str) -> None:
    try:
        pwd.getpwnam(user)
    except KeyError:
        hint = "host.user is created when provisioning as root: ddtoolkit deploy does that"
        raise ToolkitError(f"there is no system user {user!r} on this host", hint=hint) from None


def _check_program(unit: Unit) -> None:
    """Make sure that the service's user can run the program, whose folders may be closed to it."""
    if unit.user is None:
        return
    account = pwd.getpwnam(unit.user)
    try:
        subprocess.run(
            [unit.argv[0], "--version"],
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_STOP_LIMIT,
            check=False,
        )
    except OSError as error:
        raise ToolkitError(
            f"user {unit.user!r} cannot run {unit.argv[0]}: {error.strerror}",
            hint="host.python names an interpreter that every user can read, outside of home folders",
        ) from error
    except subprocess.TimeoutExpired:
        raise ToolkitError(f"{unit.argv[0]} does not answer") from None
