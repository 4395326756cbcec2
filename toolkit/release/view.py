"""What `status` shows of a service; nothing here takes a lock or changes anything."""

from __future__ import annotations

import http.client
import ipaddress
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.deadline import Deadline
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.release.claims import first_deploys
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.judge import uncounted
from toolkit.release.lock import LockInfo
from toolkit.release.store import Release
from toolkit.release.under_way import DEPLOYING, first_deploy_since, transaction_of
from toolkit.service.manager import ProcessStatus
from toolkit.service.unit import Unit

_HEALTH_LIMIT = 3.0  # SGLang generates a token for it, and looks for it once a second
_FAILED_LINES = 10


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Everything that `status` shows of one service; every field is JSON-safe.

    Attributes:
        name: name of the service.
        state: `running`, `starting` (it loads, or waits for a restart), `failed`,
            `stopped`, `deploying` (a first deploy is under way, nothing is current yet), or `absent` where
            nothing was ever deployed.
        healthy: whether /health answers 200 now.
        release: id of the current release.
        started_release: id of the release that was started last; differs from `release` only inside a
            transaction or after a failed one.
        since: when the state was entered, seconds since the epoch.
        pid: main process.
        restarts: restarts by the manager since the last start.
        exit_status: of the last main process that ended.
        exit_signal: name of the signal that ended it.
        message: the manager's own line.
        url: base URL on this host.
        manager: kind of service manager.
        survives_reboot: whether it starts again after a reboot.
        config: the profile's main values.
        accepted: verdict and key figures of the report that it was accepted with, None without one; later
            changes are held against it.
        judged_again: those of the last judgement since, by a rollback to it; None without one.
        lock: holder of the lock, None when free.
        transaction: the running, interrupted or last transaction.
        experiment: the running experiment and the seconds it has left.
        warnings: what an operator has to know.
        log: last lines of output, when it failed.
    """

    name: str
    state: str
    healthy: bool = False
    release: str | None = None
    started_release: str | None = None
    since: float | None = None
    pid: int | None = None
    restarts: int = 0
    exit_status: int | None = None
    exit_signal: str | None = None
    message: str = ""
    url: str | None = None
    manager: str | None = None
    survives_reboot: bool | None = None
    config: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, Any] | None = None
    judged_again: dict[str, Any] | None = None
    lock: dict[str, Any] | None = None
    transaction: dict[str, Any] | None = None
    experiment: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    log: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def status(layout: Layout, name: str) -> ServiceStatus:
    """Look at a service; takes no lock and changes nothing.

    A release with a damaged file is shown as far as it can be, with a warning that names the file.
    """
    host = ServiceHost(layout, name)
    current = host.store.current()
    common: dict[str, Any] = {
        "lock": _lock(host),
        "transaction": transaction_of(host),
        "experiment": _experiment(host),
    }
    if current is None:
        process = host.process_status()
        return _without_current(name, process, common)
    try:
        unit, config = current.unit, _config(current)
        host.manager(unit)
    except ToolkitError as error:
        return _damaged(host, current, error, common)
    manager = host.manager(unit)
    process = manager.status()
    healthy = process.pid is not None and _healthy(unit)
    state: str = process.state
    if state == "running" and not healthy and time.time() - (process.since or 0) < unit.load_timeout:
        state = "starting"
    return ServiceStatus(
        name=name,
        state=state,
        healthy=healthy,
        release=current.id,
        started_release=process.release,
        since=process.since,
        pid=process.pid,
        restarts=process.restarts,
        exit_status=process.exit_status,
        exit_signal=process.exit_signal,
        message=process.message,
        url=unit.url,
        manager=manager.kind,
        survives_reboot=manager.survives_reboot,
        config=config,
        accepted=_judgement(current.acceptance),
        judged_again=_judgement(current.judged_again),
        warnings=tuple(
            _warnings(
                current,
                unit,
                process,
                survives_reboot=manager.survives_reboot,
                mute=state == "running" and not healthy,
                stays=_stays(current, common),
            )
        ),
        log=tuple(manager.log_tail(_FAILED_LINES)) if process.state == "failed" else (),
        **common,
    )


def only_begun(name: str) -> ServiceStatus | None:
    """A first deploy of which there is no more than its claim yet; None where there is none."""
    begun = first_deploys()
    if name not in begun:
        return None
    holder = begun[name]
    lock = None if holder is None else _held_by(holder, stale=False)
    return ServiceStatus(name, DEPLOYING, since=None if holder is None else holder.since, lock=lock)


def _without_current(name: str, process: ProcessStatus, common: dict[str, Any]) -> ServiceStatus:
    """Nothing is current; something may serve all the same, where files were removed by hand."""
    if common["lock"] is None and (holder := first_deploys().get(name)) is not None:
        common = {**common, "lock": _held_by(holder, stale=False)}
    warnings = []
    if process.active:
        stop = f"ddtoolkit stop {name} ends it"
        warnings.append(f"a process serves release {process.release}, while none is current ({stop})")
    state: str = process.state if process.since is not None else "absent"
    since = process.since
    begun = first_deploy_since(common["transaction"], common["lock"])
    if begun is not None and not process.active:
        state, since = DEPLOYING, begun
    return ServiceStatus(
        name,
        state,
        started_release=process.release,
        since=since,
        pid=process.pid,
        message=process.message,
        warnings=tuple(warnings),
        **common,
    )


def _damaged(
    host: ServiceHost, current: Release, error: ToolkitError, common: dict[str, Any]
) -> ServiceStatus:
    """What can be told without the release's files."""
    process = host.process_status()
    advice = f" ({error.hint})" if error.hint else ""
    return ServiceStatus(
        name=host.name,
        state=process.state,
        release=current.id,
        started_release=process.release,
        since=process.since,
        pid=process.pid,
        restarts=process.restarts,
        exit_status=process.exit_status,
        exit_signal=process.exit_signal,
        message=process.message,
        warnings=(f"{error.message}{advice}",),
        **common,
    )


def _healthy(unit: Unit) -> bool:
    host = unit.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, unit.port, timeout=_HEALTH_LIMIT)
    try:
        with Deadline(_HEALTH_LIMIT) as deadline:
            connection.connect()
            deadline.watch(connection.sock)
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _config(release: Release) -> dict[str, Any]:
    """The values by which people tell one release from another."""
    profile = release.profile
    model = profile.get("model") or {}
    return {
        "engine": (profile.get("engine") or {}).get("kind"),
        "model": model.get("served_name"),
        "speculative": profile.get("speculative"),
        "changes": release.meta.get("changes", []),
        "swapped": list(release.swapped),
        "given": release.given.to_json(),
    }


def _judgement(report: dict[str, Any] | None) -> dict[str, Any] | None:
    if report is None:
        return None
    shown: dict[str, Any] = {key: report[key] for key in ("verdict", "started") if key in report}
    lengths = report.get("acceptance_length")
    if isinstance(lengths, dict):
        shown["acceptance_length"] = {
            name: item
            for name, item in lengths.items()
            if isinstance(item, dict) and _is_number(item.get("value"))
        }
    if _is_number(report.get("tokens_per_second")):
        shown["tokens_per_second"] = report["tokens_per_second"]
    checks = report.get("checks")
    listed = [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    if unjudged := [str(check.get("name")) for check in listed if check.get("status") == "not_judged"]:
        shown["not_judged"] = unjudged
    if report.get("mode") == "experiment":
        shown |= {"mode": "experiment", "not_counted": list(uncounted(report))}
    return shown


def _is_number(value: Any) -> bool:
    """Whether a figure of a report is one; the file may be damaged."""
    return isinstance(value, int | float)


def _lock(host: ServiceHost) -> dict[str, Any] | None:
    info = host.lock.holder()
    if info is None:
        return None
    return _held_by(info, stale=host.lock.stale(info))


def _held_by(info: LockInfo, *, stale: bool) -> dict[str, Any]:
    return {"who": info.who, "command": info.command, "since": info.since, "stale": stale}


def _experiment(host: ServiceHost) -> dict[str, Any] | None:
    experiment = read_experiment(host.paths)
    if experiment is None:
        return None
    return {
        "release": experiment.release,
        "base": experiment.base,
        "who": experiment.who,
        "started": experiment.started,
        "until": experiment.end,
        "remaining": experiment.remaining,
        "timed": experiment.timed,
    }


def _stays(release: Release, common: Mapping[str, Any]) -> bool:
    """Whether what an experiment tried stays, though nothing but its correctness was judged."""
    transaction = common["transaction"]
    if common["experiment"] is not None or (transaction is not None and transaction["state"] == "running"):
        return False
    return (release.acceptance or {}).get("mode") == "experiment"


def _warnings(
    release: Release,
    unit: Unit,
    process: ProcessStatus,
    *,
    survives_reboot: bool,
    mute: bool,
    stays: bool,
) -> Iterator[str]:
    if stays:
        yield (
            "the experiment did not return to its base, and what it tried stays, judged by its correctness "
            f"alone: ddtoolkit history {unit.name} says why, ddtoolkit rollback {unit.name} returns"
        )
    if (why := release.altered()) is not None:
        yield f"{why} ({release.sound_again(unit.name)})"
    if (why := release.report_damage()) is not None:
        yield f"{why}, so that no change is held against it"
    if not _loopback(unit.host) and "api-key" not in unit.secrets:
        yield f"{unit.host}:{unit.port} is open to everyone who reaches it: no API key is set"
    if not survives_reboot and (process.active or unit.manager == "process"):
        why = "service.manager: process" if unit.manager == "process" else "its unit is not enabled"
        yield f"it does not start again after a reboot ({why})"
    if mute:
        yield "it runs but does not answer /health"
    if process.active and not process.supervised:
        yield process.message
    if process.active and process.release != release.id:
        yield f"release {process.release} serves, while {release.id} is current"
    yield from process.differences
    for left in process.leftovers:
        yield f"process {left} outlived a stop and could not be killed"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
