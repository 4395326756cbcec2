"""The transaction: stop, switch, start, wait for real tokens, acceptance, then commit or roll back.

It runs detached on the host. Whatever ends its process, another one sees from the journal how far it came and
finishes or reverses it (`recover`). The old release is always stopped before the new one starts, since it
holds all GPUs.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.release import ending
from toolkit.release.experiment import (
    drop_aside,
    forget_experiment,
    read_experiment,
    set_aside,
    take_back,
)
from toolkit.release.history import stopped_on_request
from toolkit.release.host import ServiceHost
from toolkit.release.judge import judge
from toolkit.release.launches import compare_launches
from toolkit.release.ready import wait_for_token
from toolkit.release.request import RELEASING, Acceptance, Outcome, Request, Status
from toolkit.release.space import require_space
from toolkit.release.spawn import spawn_timer
from toolkit.release.steps import NotBegunError, StepFailedError, Steps, failing
from toolkit.release.store import PENDING_FILE, Release
from toolkit.service.manager import ProcessStatus
from toolkit.service.secrets import write_secrets
from toolkit.service.unit import Unit

SETTINGS_FILE = "acceptance-settings.json"
BASE_SETTINGS_FILE = "base-settings.json"
BASE_REPORT_FILE = "base-acceptance.json"
_STOPPED_WORDS = {"start": "started", "stop": "stopped, and stays stopped", "restart": "restarted"}


class Transaction:
    """One request on one service, driven to an outcome. The caller holds the transaction's flock.

    Args:
        host: the service's.
        request: what is asked for.
        folder: of its journal.
        stopping: a recovery comes before a stop: it starts nothing.
    """

    def __init__(self, host: ServiceHost, request: Request, folder: Path, *, stopping: bool = False) -> None:
        self._host = host
        self._store = host.store
        self._request = request
        self._folder = folder
        self._stopping = stopping
        self._steps = Steps(folder, self._log_tail)

    def run(self) -> Outcome:
        """Do what the request says."""
        if self._request.kind not in RELEASING:
            return self._run_simple()
        try:
            self._preflight()
        except StepFailedError as failure:
            return self._not_started(failure)
        try:
            with failing():
                self._go(self._target())
        except NotBegunError as failure:
            return self._not_started(failure)
        except StepFailedError as failure:
            return self._undo(failure.reason, failure.hint)
        return self._commit()

    def recover(self) -> Outcome:
        """Finish or reverse what an earlier process began; decided by its journal alone."""
        begun = self._steps.begun()
        self._steps.note("recover", "the transaction's process had died; going on from its journal")
        if self._request.kind not in RELEASING:
            if self._stopping and self._request.kind != "stop":
                reason = f"the {self._request.kind} was interrupted, and the service is to be stopped"
                return self._end("failed", reason, reason=reason)
            return self._run_simple()
        if "stop_old" not in begun:
            reason = f"{self._steps.reason()}it was interrupted"
            return self._end("not_started", f"{reason} before anything was changed", reason=reason)
        onward = self._request.kind == "return" and "stop_new" not in begun
        if not onward and ("commit" not in begun or "stop_new" in begun):
            return self._undo(f"{self._steps.reason()}it was interrupted at step {begun[-1]}")
        try:
            if onward and "commit" not in begun:
                with failing():  # else the experiment would stay for good
                    self._go(self._target())
            elif not self._stopping:
                with failing():
                    self._ensure_serving(self._target())
        except StepFailedError as failure:
            return self._undo(failure.reason, failure.hint)
        return self._commit()

    def _preflight(self) -> None:
        """Everything that can be known before the old release is touched."""
        with self._steps.step("preflight", "checking the release") as data:
            self._target().require_environment()
            unit = self._target().unit
            if self._request.kind != "return":  # its time is over, whatever the disk has to say
                require_space(self._host.paths, self._target().path, unit)
                self._target().require_unaltered(self._host.name)
            self._host.manager(unit).check(self._target().path)
            write_secrets(unit)
            status = self._host.process_status()
            data["base_should_run"] = not stopped_on_request(self._host.paths)
            if status.active and data["base_should_run"]:
                self._require_way_back()
            old = self._serving_unit() if status.active else None
            if old is None or old.port != unit.port:
                ending.require_free(unit)
            for release in (self._request.base, self._request.release):
                self._store.prepare_switch(release)

    def _require_way_back(self) -> None:
        """What serves is stopped only where the base could be started again; an experiment ends anyway."""
        base = self._request.base
        if base is None or self._request.kind == "return":
            return
        if (why := self._store.get(base).environment_damage()) is not None:
            name = self._host.name
            raise ToolkitError(
                f"there would be no way back to {base}: {why}",
                hint=f"ddtoolkit stop {name}, then the same command again, goes on without a way back",
            )

    def _go(self, release: Release) -> None:
        step = self._steps.step
        runs = self._host.process_status().active
        words = "stopping the old release" if runs else "seeing that nothing serves"
        with step("stop_old", words, announced=True) as data:
            set_aside(self._host.paths)
            # What is not accepted yet must not be started by a reboot.
            self._host.manager(self._serving_unit()).disable()
            self._stop(data)
        with step("switch", f"switching to {release.id}"):
            self._store.switch(release.id)
        if self._request.kind == "return" and not self._base_should_run():
            self._install(release.id)
            return
        began = time.monotonic()
        with step("start_new", f"starting {release.id}"):
            self._host.manager(release.unit).start(release.path)
        with step("ready", "waiting for a real token") as data:
            self._wait_ready(release.unit, patient=False)
            # From the start on: an engine loads while its manager still reports that it started.
            data["load_seconds"] = round(time.monotonic() - began, 3)
        if self._request.acceptance is not None:
            with step("acceptance", "judging the release"):
                self._judge(release, self._request.acceptance)
        self._compare(release)

    def _compare(self, release: Release) -> None:
        if self._request.comparison is not None:
            compare_launches(
                self._request.comparison,
                release,
                folder=self._folder,
                report=release.path / PENDING_FILE,
                steps=self._steps,
                relaunch=self._relaunch,
            )

    def _relaunch(self, name: str, folder: Path, unit: Unit) -> None:
        with self._steps.step(f"stop_for_{name}", "stopping"):
            self._stop({})
        with self._steps.step(f"start_{name}", f"starting it as {name}"):
            self._host.manager(unit).start(folder)
        with self._steps.step(f"ready_{name}", "waiting for a real token"):
            self._wait_ready(unit, patient=False)

    def _judge(self, release: Release, acceptance: Acceptance) -> None:
        manager = self._host.manager(release.unit)
        restarts = manager.status().restarts
        verdict = judge(
            acceptance,
            release.unit,
            settings=self._folder / SETTINGS_FILE,
            out=release.path / PENDING_FILE,
            on_progress=lambda value: self._steps.progress("acceptance", value),
        )
        if not verdict.accepted:
            raise ToolkitError(verdict.message, hint=verdict.hint)
        status = manager.status()
        if status.state != "running" or status.restarts != restarts:
            raise ToolkitError(f"{status.exit_words()} while it was judged")

    def _commit(self) -> Outcome:
        release = self._request.release
        try:
            with self._steps.step("commit", f"{release} is accepted"):
                ending.commit(self._host, self._request, self._target())
                drop_aside(self._host.paths)
        except StepFailedError as failure:
            return self._undo(failure.reason, failure.hint)
        runs = self._host.process_status().active
        if runs:
            self._enable(self._target())
        ending.prune(self._host, self._request)
        experiment = read_experiment(self._host.paths)
        if self._request.kind == "experiment" and experiment is not None:
            name = self._host.name
            return self._end(
                "committed",
                f"{release} {'serves' if runs else 'is current'}, an experiment that {experiment.ends}",
                hint=f"ddtoolkit rollback {name} ends it now; ddtoolkit swap {name} with the same --set, "
                "without --experiment, judges it in full and keeps it",
            )
        state = "is current, and is to be stopped" if self._stopping else "is current, and stopped as before"
        return self._end("committed", f"{release} {'serves' if runs else state}")

    def _undo(self, reason: str, hint: str | None = None) -> Outcome:
        """Return to the base, or leave a first deploy stopped."""
        base = self._request.base
        experiment = read_experiment(self._host.paths)
        if experiment is None or experiment.release != base:  # else it is on trial again already
            forget_experiment(self._host.paths)
        if base is None:
            return self._undo_first(reason, hint)
        try:
            if not self._base_runs(base):
                self._return_to(base)
            trial = self._try_again(base)
            if not self._base_should_run():
                state = "is to be stopped" if self._stopping else "stopped, as it was before"
                message = f"{reason}; {base} is current again and {state}{trial}"
                return self._end("rolled_back", message, reason=reason, hint=hint)
            self._enable(self._store.get(base))
            with self._steps.step("ready_old", f"waiting for a real token of {base}"):
                self._wait_ready(self._store.get(base).unit, patient=True)
        except StepFailedError as failure:
            reason = f"{reason}; returning to {base} failed too: {failure.reason}"
            name = self._host.name
            hint = failure.hint or f"ddtoolkit logs {name}; then ddtoolkit start {name}"
            return self._end("rollback_failed", reason, reason=reason, hint=hint)
        self._report_base(base)
        return self._end("rolled_back", f"{reason}; {base} serves again{trial}", reason=reason, hint=hint)

    def _undo_first(self, reason: str, hint: str | None) -> Outcome:
        message, stopped = f"{reason}; there is no earlier release, the service is stopped", True
        try:
            with self._steps.step("stop_new", "stopping the new release") as data:
                self._stop(data)
        except StepFailedError as failure:
            message, stopped = f"{reason}; there is no earlier release, and {failure.reason}", False
            hint = failure.hint
        with self._steps.attempt("switch_back", "no release is current"):
            self._store.switch(None)
            if stopped:  # else systemd goes on knowing what still runs
                self._host.manager(self._serving_unit()).uninstall()
        return self._end("first_failed", message, reason=reason, hint=hint)

    def _return_to(self, base: str) -> None:
        # What cannot be stopped, and a link that cannot be set, must not keep the base from serving.
        with self._steps.attempt("stop_new", "stopping the new release") as data:
            self._stop(data)
        with self._steps.attempt("switch_back", f"switching back to {base}"):
            self._store.switch(base)
            if not self._base_should_run():
                self._install(base)
        if self._base_should_run():
            with self._steps.step("start_old", f"starting {base} again"):
                release = self._store.get(base)
                if (why := release.environment_damage()) is not None:
                    raise ToolkitError(why)
                self._host.manager(release.unit).start(release.path)

    def _try_again(self, base: str) -> str:
        """Let the experiment go on that this change was to end, where it returned to it; in words."""
        experiment = None
        with contextlib.suppress(OSError):
            if self._request.kind != "return":  # whose time is over
                experiment = take_back(self._host.paths, base)
            drop_aside(self._host.paths)
        if experiment is None:
            return ""
        with self._steps.attempt("experiment", f"{base} is on trial again"):
            spawn_timer(self._host)
        return f", an experiment that {experiment.ends}"

    def _install(self, release_id: str) -> None:
        """Of what stays stopped: else `systemctl start` would start the release that it returned from."""
        release = self._store.get(release_id)
        self._host.manager(release.unit).install(release.path)

    def _report_base(self, base: str) -> None:
        acceptance = self._request.base_acceptance
        if acceptance is None:
            return
        with self._steps.attempt("acceptance_old", f"judging {base}"):
            verdict = judge(
                acceptance,
                self._store.get(base).unit,
                settings=self._folder / BASE_SETTINGS_FILE,
                out=self._folder / BASE_REPORT_FILE,
                on_progress=lambda value: self._steps.progress("acceptance_old", value),
            )
            if not verdict.accepted:
                raise ToolkitError(f"{base} serves, but {verdict.message}")

    def _run_simple(self) -> Outcome:
        """Start, stop or restart the current release; there is nothing to return to."""
        kind = self._request.kind
        if kind == "test":
            return self._run_test()
        try:
            if kind != "stop":
                with self._steps.step("preflight", "checking the release"):
                    self._target().require_environment()
                    unit = self._target().unit
                    self._require_unaltered()
                    self._host.manager(unit).check(self._target().path)
                    if kind == "restart":  # a start may find it serving, with the secrets it has
                        write_secrets(unit)
            if kind != "start":
                with self._steps.step("stop_old", "stopping") as data:
                    if kind == "stop":
                        self._host.manager(self._serving_unit()).disable()
                    self._stop(data)
            if kind != "stop":
                with failing():
                    self._ensure_serving(self._target())
                    self._enable(self._target())
        except StepFailedError as failure:
            left = kind == "restart" and "stop_old" not in self._steps.begun(also_now=True)
            untouched = "; what serves was not touched" if left and self._host.process_status().active else ""
            reason = f"{failure.reason}{untouched}"
            return self._end("failed", reason, reason=reason, hint=failure.hint)
        if kind == "start" and "start_new" not in self._steps.begun(also_now=True):
            return self._end_served_already()
        if not self._request.recorded:  # a stop of what had been stopped
            return self._end("committed", "it was stopped already, and stays stopped")
        return self._end("committed", _STOPPED_WORDS[kind])

    def _require_unaltered(self) -> None:
        """Refuse what hands have changed, while that still costs nobody a server."""
        serving = self._request.kind == "start" and self._host.process_status().active
        if not serving and "stop_old" not in self._steps.begun():
            self._target().require_unaltered(self._host.name)

    def _end_served_already(self) -> Outcome:
        """A start that found it serving; nothing can take the place of a supervisor while its server runs."""
        if self._status(self._target().unit).supervised:
            return self._end("committed", "it serves already: nothing was started")
        return self._end(
            "committed",
            "it serves already, and nothing was started: its supervisor is gone, so that nothing would start "
            "it again after a crash",
            hint=f"ddtoolkit restart {self._host.name} gives it one; it does not serve while it loads",
        )

    def _run_test(self) -> Outcome:
        """Judge the release that serves, with its further launches; afterwards it serves again."""
        reason = hint = None
        try:
            if self._steps.before:
                raise StepFailedError("the test was interrupted")
            with failing():
                release = self._target()
                self._host.manager(release.unit)
                if self._request.comparison is not None:
                    require_space(self._host.paths, release.path, release.unit)
                if self._request.acceptance is not None:
                    with self._steps.step("acceptance", "judging the release"):
                        self._judge(release, self._request.acceptance)
                self._compare(release)
        except StepFailedError as failure:
            reason, hint = failure.reason, failure.hint
        try:
            stopped = any(step.startswith("stop_for_") for step in self._steps.begun(also_now=True))
            if reason is not None and stopped:
                with failing():
                    release = self._target()
                    self._relaunch("release", release.path, release.unit)
        except StepFailedError as failure:
            reason = f"{reason}; then: {failure.reason}"
            return self._end("rollback_failed", reason, reason=reason, hint=failure.hint)
        if reason is not None:
            return self._end("failed", reason, reason=reason, hint=hint)
        return self._end("committed", f"{self._request.release} passed and serves")

    def _enable(self, release: Release) -> None:
        """Have it started at boot; where that fails it serves all the same, and `status` warns."""
        try:
            self._host.manager(release.unit).enable()
        except ToolkitError as error:
            self._steps.note("enable", error.message)

    def _ensure_serving(self, release: Release) -> None:
        status = self._status(release.unit)
        if not (status.active and status.release == release.id):
            with self._steps.step("start_new", f"starting {release.id}"):
                self._host.manager(release.unit).start(release.path)
        with self._steps.step("ready", "waiting for a real token"):
            self._wait_ready(release.unit, patient=False)

    def _wait_ready(self, unit: Unit, *, patient: bool) -> None:
        wait_for_token(self._host.manager(unit), unit, patient=patient)
        self._steps.came_up()

    def _stop(self, data: dict[str, Any]) -> None:
        """Stop whatever serves now, whichever release that is."""
        stopped_before = bool(self._steps.before) and self._base_should_run()  # by a process that died
        if stopped_before or self._host.process_status().active:
            self._steps.went_down()
        report = self._host.manager(self._serving_unit()).stop()
        data["report"] = report.describe()
        if not report.clean:
            raise ToolkitError(
                f"what serves cannot be stopped: {report.describe()}",
                hint="end those processes by hand (a hung GPU driver needs a reboot) and try again",
            )

    def _target(self) -> Release:
        if self._request.release is None:
            raise ToolkitError("the request names no release")
        return self._store.get(self._request.release)

    def _serving_unit(self) -> Unit | None:
        """The unit of what was started last."""
        for candidate in (self._host.process_status().release, self._request.base, self._request.release):
            if candidate is not None:
                with contextlib.suppress(ToolkitError):
                    unit = self._store.get(candidate).unit
                    self._host.manager(unit)
                    return unit
        return None

    def _status(self, unit: Unit) -> ProcessStatus:
        return self._host.manager(unit).status()

    def _base_runs(self, base: str) -> bool:
        """Whether the base is up already, by an earlier attempt to return to it."""
        current = self._store.current()
        status = self._host.process_status()
        return status.active and status.release == base and current is not None and current.id == base

    def _base_should_run(self) -> bool:
        """False only where the base had been stopped on request before this transaction, or is to be now."""
        return not self._stopping and self._steps.said("preflight", "base_should_run", default=True)

    def _log_tail(self, since: float | None) -> list[str]:
        return self._host.manager(self._serving_unit()).log_tail(since=since)

    def _not_started(self, failure: StepFailedError) -> Outcome:
        message = f"{failure.reason}; nothing was changed"
        return self._end("not_started", message, reason=failure.reason, hint=failure.hint)

    def _end(self, status: Status, message: str, *, reason: str = "", hint: str | None = None) -> Outcome:
        words = ending.Words(message, reason, hint)
        return ending.end(self._host, self._request, self._steps, status, words)
