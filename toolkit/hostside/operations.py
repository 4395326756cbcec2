"""What a control machine can ask of a host; each is the local flow, with JSON in and out."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import toolkit
from toolkit.build.bootstrap import MARKER, REMEMBERED
from toolkit.build.for_profile import lacking
from toolkit.deploy import flow, testing
from toolkit.deploy import rollback as rollbacks
from toolkit.deploy import swap as swaps
from toolkit.deploy import upgrade as upgrades
from toolkit.deploy.judging import Judging
from toolkit.deploy.prepare import Prepared, prepare
from toolkit.deploy.watch import observed
from toolkit.deploy.watcher import Watcher
from toolkit.doctor.catalogue import require_known
from toolkit.doctor.examine import examine
from toolkit.doctor.preflight import mended_by
from toolkit.doctor.preflight import preflight as before_deploy
from toolkit.doctor.request import examination
from toolkit.drift.find import find
from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import read_json, replace_file
from toolkit.layout import Layout
from toolkit.life import command, unused
from toolkit.life import uninstall as life
from toolkit.plan.steps import describe
from toolkit.profile.given import Given
from toolkit.profile.loading import ResolvedProfile, differences, profile_from_data
from toolkit.profile.recorded import restarts
from toolkit.release import control, controller, history, lock, view
from toolkit.release.claims import first_deploys
from toolkit.release.controller import is_reserved
from toolkit.release.host import ServiceHost
from toolkit.release.journal import Event, read_journal
from toolkit.release.locate import (
    Deployed,
    current_release,
    deployed_services,
    find_removable,
    find_service,
    layout_of,
    recorded_services,
)
from toolkit.release.lock import LockInfo
from toolkit.release.request import Outcome, read_request
from toolkit.release.store import Release
from toolkit.release.trial import longer

RESERVED = contextlib.ExitStack()  # locks that are kept until the agent ends
# Set once something was begun of which a half is of no use: it is brought to its end, whoever listens.
UNATTENDED = threading.Event()
# The last plan, and what it is of. It is used again only under a lock that was kept since.
_last_plan: dict[str, Prepared] = {}

_POLL = 0.2

Send = Callable[[dict[str, Any]], None]
Args = Mapping[str, Any]


def _nobody(_: dict[str, Any]) -> None:
    """For callers on this machine that watch nothing."""


def plan(args: Args, _: Send) -> dict[str, Any]:
    """What a deploy of `profile` would do."""
    prepared = _prepared(args)
    _last_plan.clear()
    if is_reserved(prepared.service.layout, prepared.service.name) and not _changed_from_outside(prepared):
        _last_plan[_content(args)] = prepared
    return {
        "plan": prepared.plan.to_json(),
        "needed": prepared.needed.settings(),
        "current": prepared.current_id,
        "weights": list(prepared.weights),
        "undone": prepared.plan.undone,
    }


def render(args: Args, _: Send) -> dict[str, Any]:
    """The unit as a deploy of `profile` would write it here."""
    from toolkit.deploy.rendering import render_here

    return render_here(profile_from_data(args["profile"]), dict(args["profile"]), args["form"]).to_json()


def build(args: Args, send: Send) -> dict[str, Any]:
    """Build what a deploy of `profile` will serve; touches nothing that serves."""
    return {"built": flow.build_ahead(_planned(args), _watcher(send))}


def deploy(args: Args, send: Send) -> dict[str, Any]:
    """Deploy `profile`; provisioning was done from outside."""
    _identify(args)
    _remember_interpreter()
    prepared = _planned(args)
    _last_plan.clear()
    outcome = flow.deploy(
        prepared,
        _watcher(send),
        lock_wait=args["lock_wait"],
        judging=_judging(args),
        given=args["secrets"],
        built=args.get("built"),
        ignored=args.get("ignored", ()),
    )
    _remember_interpreter(prepared.service)
    return _ended(prepared.service, outcome)


def swap_preview(args: Args, _: Send) -> dict[str, Any]:
    """What a swap would change; `hint` tells of an experiment that tries the same already.

    `loses` is whether it would be undone, by what is known already.
    """
    service = find_service(args["service"])
    host = ServiceHost(service.layout, service.name)
    current, judging = current_release(service), _judging(args)
    changes = swaps.swap_changes(host, current, args["sets"], judging)[1]
    shown: dict[str, Any] = {"service": service.name, "changes": describe(changes)}
    shown |= {"restarts": restarts(changes), "notices": swaps.notices(host, current, changes, judging)}
    shown["loses"] = swaps.loses(host, current, changes, judging)
    seconds = judging.experiment_seconds
    if changes or seconds is None:
        return shown
    found = longer(host, current, args["sets"], seconds if args.get("prolong") else None)
    if found is None:
        return shown
    return {**shown, "changes": [found.line] if found.line else [], "hint": found.advice}


def swap(args: Args, send: Send) -> dict[str, Any]:
    """Change keys of the deployed profile."""
    _identify(args)
    service, judging = find_service(args["service"]), _judging(args)
    notices = []
    if is_reserved(service.layout, service.name):  # else an interrupted change may have to be ended first
        host, current = ServiceHost(service.layout, service.name), current_release(service)
        changes = swaps.swap_changes(host, current, args["sets"], judging)[1]
        notices = swaps.notices(host, current, changes, judging)
    outcome = swaps.swap(
        service,
        args["sets"],
        _watcher(send),
        lock_wait=args["lock_wait"],
        judging=judging,
        given={},
        prolong=bool(args.get("prolong")),
    )
    return _ended(service, outcome) | ({"notices": notices} if notices else {})


def upgrade_preview(args: Args, _: Send) -> dict[str, Any]:
    """What an upgrade would change, of which profile, and the libraries that it would install, in words."""
    service = find_service(args["service"])
    current = current_release(service)
    return {
        "service": service.name,
        "changes": upgrades.upgrade_changes(service, current),
        "profile": current.profile,
        "libraries": lacking(profile_from_data(current.profile), service.layout),
    }


def upgrade(args: Args, send: Send) -> dict[str, Any]:
    """Serve the deployed profile from a new environment."""
    _identify(args)
    service = find_service(args["service"])
    judging, wait = _judging(args), args["lock_wait"]
    outcome = upgrades.upgrade(service, _watcher(send), lock_wait=wait, judging=judging, given={})
    _remember_interpreter(service)
    return _ended(service, outcome)


def rollback_preview(args: Args, _: Send) -> dict[str, Any]:
    """Where a rollback would go, and what it would change."""
    service = find_service(args["service"])
    host = ServiceHost(service.layout, service.name)
    current = current_release(service)
    target = rollbacks.rollback_target(host, current, args["release"], refused=bool(args.get("refused")))
    changes = differences(current.profile, target.profile)
    return {
        "service": service.name,
        "from": current.id,
        "to": target.id,
        "changes": describe(changes),
    }


def rollback(args: Args, send: Send) -> dict[str, Any]:
    """Go back to an earlier release."""
    _identify(args)
    service = find_service(args["service"])
    outcome = rollbacks.rollback(
        service,
        args["release"],
        _watcher(send),
        lock_wait=args["lock_wait"],
        new_baseline=bool(args.get("new_baseline")),
        refused=bool(args.get("refused")),
    )
    return _ended(service, outcome)


def change(args: Args, send: Send) -> dict[str, Any]:
    """`start`, `stop` or `restart`."""
    _identify(args)
    service = find_service(args["service"])
    verb = {"start": control.start, "stop": control.stop, "restart": control.restart}[args["verb"]]
    watcher = _watcher(send)
    outcome = verb(
        service.layout,
        service.name,
        wait=args["lock_wait"],
        on_event=watcher.event,
        on_wait=watcher.waiting,
    )
    return _ended(service, outcome)


def full_test(args: Args, send: Send) -> dict[str, Any]:
    """Judge the current release at level `full`."""
    _identify(args)
    service = find_service(args["service"])
    outcome = testing.full_test(service, _watcher(send), lock_wait=args["lock_wait"])
    return _ended(service, outcome)


def test(args: Args, send: Send) -> dict[str, Any]:
    """Judge what serves, from here; restarts nothing."""
    from toolkit.deploy.testing import run_test

    service = find_service(args["service"])
    url = current_release(service).unit.url
    send({"step": ["test", f"the acceptance checks against {url}"]})

    def tell(event: dict[str, Any]) -> None:
        if event.get("event") == "result":
            status = str(event.get("status")).replace("_", " ")
            send({"line": f"{event.get('name')}: {status} {event.get('detail') or ''}".rstrip()})

    return run_test(service, tell).to_json()


def uninstall(args: Args, send: Send) -> dict[str, Any]:
    """Remove a service; with `purge` also what no other one needs."""
    _identify(args)
    removal = life.uninstall(
        find_removable(args["service"]),
        purge=bool(args.get("purge")),
        wait=args["lock_wait"],
        watcher=_watcher(send),
        on_begun=UNATTENDED.set,
    )
    return removal.to_json()


def prune(args: Args, _: Send = _nobody) -> dict[str, Any]:
    """What no release needs; removed unless `dry`."""
    layouts = {service.layout.root: service.layout for service in recorded_services()}
    found = [item for layout in ({None: Layout()} | layouts).values() for item in unused.unused(layout)]
    if not args.get("dry"):
        for item in found:
            unused.remove(item)
    return {"unused": [item.to_json() for item in found]}


def status(args: Args, _: Send) -> list[dict[str, Any]]:
    """What serves: one service, or all of this host."""
    return observed(args.get("service"))


def past(args: Args, _: Send = _nobody) -> dict[str, Any]:
    """The newest entries of the history, or those of one release or transaction, and what is current.

    Raises:
        ConfigError: there is no such entry.
    """
    service = find_service(args["service"])
    host = ServiceHost(service.layout, service.name)
    current = host.store.current()
    every = history.read(host.paths)
    entries, earlier = every[-args["count"] :], max(len(every) - args["count"], 0)
    if (wanted := args.get("entry")) is not None:
        entries, earlier = [entry for entry in every if wanted in (entry.id, entry.release)], 0
        if not entries:
            hint = f"ddtoolkit history {service.name} lists them"
            raise ConfigError(f"{service.name}: the history has no entry {wanted}", hint=hint)
    return {
        "service": service.name,
        "current": None if current is None else current.id,
        "kept": [release.id for release in host.store.all()],
        "entries": [entry.to_json() for entry in entries],
        "earlier": earlier,
    }


def logs(args: Args, send: Send) -> None:
    """The server's output, a `{"line": ...}` each."""
    service = find_service(args["service"])
    lines = control.logs(service.layout, service.name, lines=args["lines"], follow=args["follow"])
    for line in lines:
        send({"line": line})


def drift(args: Args, _: Send = _nobody) -> list[dict[str, Any]]:
    """Where the host has drifted from its release, and the release from a profile."""
    service = find_service(args["service"])
    asked = None if args.get("given") is None else Given.from_json(args["given"])
    return [item.to_json() for item in find(service, args.get("profile"), asked)]


def given(args: Args, _: Send = _nobody) -> dict[str, Any]:
    """What the deploy of the current release was asked for."""
    return current_release(find_service(args["service"])).given.to_json()


def preflight(args: Args, send: Send) -> dict[str, Any]:
    """Let the doctor look at this host before a deploy of `profile`; fails where something would."""
    profile = profile_from_data(args["profile"])
    ignored = [*args.get("ignored", ()), *mended_by(args["actions"])]
    require_known(args.get("ignored", ()))
    report = examine(examination(profile, weights=False, ignored=ignored))
    before_deploy(report, _watcher(send).step, args.get("host") or "")
    return report.to_json()


def reserve(args: Args, send: Send) -> dict[str, Any]:
    """Take a service's lock and keep it until the agent ends, so that many hosts are locked all or none.

    With `profile`, which is to be deployed, also where nothing of it is there yet.
    """
    _identify(args)
    name, profile = args["service"], args.get("profile")
    layout = next((service.layout for service in deployed_services() if service.name == name), None)
    if layout is None:
        if profile is None:
            return {"service": name, "transaction": None}
        layout = layout_of(profile_from_data(profile))
    held = _watcher(send).reserve(
        Deployed(name, layout), args["command"], wait=args["lock_wait"], deploys=profile is not None,
        stopping=bool(args.get("stopping")),
    )  # fmt: skip
    RESERVED.enter_context(held)
    if not Path(toolkit.__file__).is_file():
        raise ToolkitError(
            "the toolkit was removed on this host, with its last service, just when this began",
            hint="run the same command again",
        )
    return {"service": name, "transaction": _last(ServiceHost(layout, name))}


def follow(args: Args, send: Send) -> dict[str, Any]:
    """Watch the service's transaction to its end, after the connection that began it broke.

    With `after`, the id of the transaction before (None: there was none), it must be another one: what works
    for the lost connection may not have begun it yet, or never will. `last` is the last event that was heard:
    those after it are told, by their order, since the clock may have been set meanwhile.
    """
    try:
        service = find_service(args["service"])
    except ConfigError:  # a first deploy puts it on record before anything else
        if "after" in args:
            raise _not_begun() from None
        raise
    host = ServiceHost(service.layout, service.name)
    folder = host.paths.transaction
    if "after" in args:
        _await_another(host, args["after"])
    before = [event.to_json() for event in read_journal(folder)]
    heard = before.index(args["last"]) + 1 if args["last"] in before else 0
    for number, event in enumerate(controller.follow(folder)):
        if number >= heard:
            send({"event": event.to_json()})
    return _ended(service, controller.result(folder))


def lock_show(args: Args, _: Send = _nobody) -> dict[str, Any]:
    """Who holds the lock, and the transaction that runs; of a first deploy, who has claimed the service."""
    there = {service.name for service in deployed_services()}
    begun = {name: holder for name, holder in first_deploys().items() if name not in there}
    name = args["service"]
    if name is None and not there and len(begun) == 1:
        (name,) = begun
    if name in begun:
        return {"service": name, "holder": _claimant(begun[name]), "transaction": None}
    service = find_service(name)
    lock = ServiceHost(service.layout, service.name).lock
    holder = lock.holder()
    transaction = view.status(service.layout, service.name).transaction
    running = transaction if transaction is not None and transaction["state"] == "running" else None
    return {
        "service": service.name,
        "holder": None if holder is None else {**holder.to_json(), "gone": lock.stale(holder)},
        "transaction": running,
    }


def _claimant(holder: LockInfo | None) -> dict[str, Any]:
    """Whose a claim is; it ends with its holder, so that no token releases it."""
    if holder is None:
        return {"who": "someone who has just begun", "gone": False}
    return {key: value for key, value in holder.to_json().items() if key != "token"} | {"gone": False}


def lock_release(args: Args, _: Send = _nobody) -> dict[str, Any]:
    """Release the lock of a holder that is gone."""
    service = find_service(args["service"])
    freed = ServiceHost(service.layout, service.name).lock.release(args["token"])
    return {"service": service.name, "freed": freed.to_json()}


OPERATIONS: dict[str, Callable[[Args, Send], Any]] = {
    "plan": plan,
    "render": render,
    "build": build,
    "deploy": deploy,
    "swap_preview": swap_preview,
    "swap": swap,
    "upgrade_preview": upgrade_preview,
    "upgrade": upgrade,
    "rollback_preview": rollback_preview,
    "rollback": rollback,
    "change": change,
    "full_test": full_test,
    "test": test,
    "uninstall": uninstall,
    "prune": prune,
    "status": status,
    "history": past,
    "logs": logs,
    "drift": drift,
    "given": given,
    "preflight": preflight,
    "reserve": reserve,
    "follow": follow,
    "lock_show": lock_show,
    "lock_release": lock_release,
}


def _await_another(host: ServiceHost, before: str | None) -> None:
    while _last(host) in (None, before):
        holder = host.lock.holder()
        if holder is None or host.lock.stale(holder):
            raise _not_begun()
        time.sleep(_POLL)


def _not_begun() -> ToolkitError:
    return ToolkitError(
        "the connection broke before the change was begun; what serves was not touched",
        hint="run the same command again",
    )


def _last(host: ServiceHost) -> str | None:
    """Id of the service's last transaction."""
    with contextlib.suppress(ToolkitError):
        return read_request(host.paths.transaction).id
    return None


def _prepared(args: Args) -> Prepared:
    profile = profile_from_data(args["profile"])
    sources = {name: base64.b64decode(text) for name, text in args.get("sources", {}).items()}
    resolved = ResolvedProfile(
        profile, dict(args["profile"]), {}, (), (), given=Given.from_json(args.get("given"))
    )
    return prepare(resolved, sources=sources, given=args["secrets"])


def _content(args: Args) -> str:
    """What tells one request for a deploy from another."""
    return json.dumps(
        [args["profile"], args.get("sources"), args["secrets"], args.get("given")], sort_keys=True
    )


def _changed_from_outside(prepared: Prepared) -> bool:
    """Whether something changes the host between plan and deploy: it has to be observed anew then."""
    return prepared.plan.has("provision") or prepared.plan.has("libraries")


def _planned(args: Args) -> Prepared:
    """The deploy that was planned before.

    Raises:
        ToolkitError: another release is current now than then.
    """
    prepared = _last_plan.get(_content(args)) or _prepared(args)
    if prepared.current_id != args["current"]:
        raise ToolkitError(
            f"{prepared.host.name} was changed while this deploy was planned",
            hint="run the same command again to see the new plan",
        )
    return prepared


def _remember_interpreter(service: Deployed | None = None) -> None:
    """Let later commands, and the host's own, run this code under the service's interpreter."""
    home = Path(toolkit.__file__).parents[1]
    if not (home / MARKER).is_file():
        return
    python = sys.executable
    if service is not None:
        with contextlib.suppress(ToolkitError, KeyError, TypeError):  # a damaged release tells none
            python = current_release(service).manifest["environment"]["python"]
    with contextlib.suppress(OSError, ToolkitError):  # a full disk: the deploy itself will say so
        replace_file(home.parent / REMEMBERED, python.encode())
        command.install(home, Path(python))


def _judging(args: Args) -> Judging:
    return Judging(
        new_baseline=bool(args.get("new_baseline")), experiment_seconds=args.get("experiment_seconds")
    )


def _identify(args: Args) -> None:
    """Who asks, for lock and history: as the control machine says, and as sudo knows it here."""
    who = str(args["who"])
    if user := os.environ.get("SUDO_USER"):
        who = f"{who} as {user}"
    lock.identify_as(who)


def _watcher(send: Send) -> Watcher:
    def event(found: Event) -> None:
        send({"event": found.to_json()})

    return Watcher(
        step=lambda name, message: send({"step": [name, message]}),
        line=lambda message: send({"line": message}),
        event=event,
    )


def _ended(service: Deployed, outcome: Outcome | None) -> dict[str, Any]:
    host = ServiceHost(service.layout, service.name)
    current = host.store.current()
    return {
        "service": service.name,
        "outcome": None if outcome is None else outcome.to_json(),
        "release": None if current is None else current.id,
        "url": None if current is None else current.url,
        "report": None if current is None else _report(current, outcome),
    }


def _report(current: Release, outcome: Outcome | None) -> Any:
    """The newest judgement of what serves; a test has its own, which is not kept with the release."""
    if outcome is not None and outcome.status == "committed" and outcome.report is not None:
        return read_json(Path(outcome.report))
    return current.judged_again or current.acceptance
