"""Giving a host back: one service removed, and with `purge` everything that no other service needs."""

from __future__ import annotations

import contextlib
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.deploy.watcher import NOBODY, Watcher
from toolkit.errors import ToolkitError
from toolkit.layout import TOOL, Layout
from toolkit.life import command
from toolkit.life.removing import remove_path
from toolkit.life.system import give_back
from toolkit.life.unused import remove, services_in, unused
from toolkit.profile.schema import DEFAULT_USER
from toolkit.provision.requirements import journal_drop_in
from toolkit.release import control
from toolkit.release.claims import claim, claims, removal
from toolkit.release.experiment import forget_experiment
from toolkit.release.history import Entry, append
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, deployed_services, forget
from toolkit.release.lock import whoami
from toolkit.service import unit_files
from toolkit.service.systemctl import systemctl
from toolkit.service.systemd import RECOVER_UNIT, unit_name

_LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class Removal:
    """What an uninstall did.

    Attributes:
        service: name of the service.
        removed: what was removed, a line each.
        kept: what was left and why, a line each.
        hint: the next step; None where nothing is left to be done.
    """

    service: str
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    hint: str | None = None

    @property
    def message(self) -> str:
        """How it ended, in words."""
        left = "" if self.kept else "; nothing of it is left on this machine"
        return f"{self.service} is removed: {len(self.removed)} things{left}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with an outcome as other changes have."""
        outcome: dict[str, Any] = {
            "kind": "uninstall",
            "status": "committed",
            "message": self.message,
            "hint": self.hint,
        }
        outcome |= {"exit_code": 0, "log": [], "serving": None, "seconds": {}}
        return {"service": self.service, "removed": self.removed, "kept": self.kept, "outcome": outcome}


def uninstall(
    service: Deployed,
    *,
    purge: bool,
    wait: float,
    watcher: Watcher = NOBODY,
    on_begun: Callable[[], None] | None = None,
) -> Removal:
    """Stop a service and remove it: unit, releases, state, cache.

    Its history stays, for whoever asks later, unless `purge` says otherwise; checkpoints always stay. A
    removal that was cut off is gone on with.

    Args:
        service: the service.
        purge: also remove its history and, with the last service, the toolkit itself.
        wait: seconds to wait for the lock.
        watcher: told of the stop, and of whom is waited for.
        on_begun: called once nobody is waited for any more.

    Raises:
        LockedError: a change is under way.
        ToolkitError: it cannot be stopped; nothing is removed then.
    """
    host = ServiceHost(service.layout, service.name)
    done = Removal(service.name)
    words = "uninstall --purge" if purge else "uninstall"
    user = _user_of(host)
    end = time.monotonic() + wait

    def left() -> float:
        return max(end - time.monotonic(), 0.0)

    def mine() -> contextlib.AbstractContextManager[None]:
        tell = watcher.waiting
        return claim(service.layout, service.name, words, wait=left(), on_wait=tell, removing=True)

    with removal(service.name, wait), mine():
        made = {str(path) for path in _folders(host) if not path.exists()}  # what the lock below makes
        with watcher.reserve(service, words, wait=left(), stopping=True):
            if on_begun is not None:
                on_begun()
            if host.process_status().active:
                outcome = control.stop(service.layout, service.name, on_event=watcher.event)
                if outcome.status != "committed":
                    raise ToolkitError(
                        f"{service.name} cannot be stopped: {outcome.message}; nothing was removed",
                        hint=outcome.hint,
                    )
            with watcher.hold(service, words):
                _remove_service(host, done, purge=purge)
        _remove_shared(service, done, user, purge=purge)
    done.removed[:] = [item for item in done.removed if item not in made]
    if host.paths.history.is_file():
        # No service is deployed under that name any more, so that it has to be named.
        name = service.name
        shows, removes = (
            f"ddtoolkit history {name} shows it",
            f"ddtoolkit uninstall {name} --purge removes it",
        )
        return replace(done, hint=f"its history is kept: {shows}; {removes}")
    return done


def _remove_shared(service: Deployed, done: Removal, user: str, *, purge: bool) -> None:
    """Remove what no service needs any more.

    The service is forgotten last of what takes long: until then the same command goes on with it.
    """
    layout, system = service.layout, service.layout.root is None
    begun = claims(layout, but=service.name)
    last = not services_in(layout) and not begun
    if system and last:
        _remove_unit(RECOVER_UNIT, done)
    if purge:
        _remove_unused(layout, done, young=0.0 if last else None)
    if purge and begun:
        done.kept.append(f"what services share: {', '.join(begun)} is under way")
    if purge and last:
        if system:
            removed, kept = give_back(layout.provisioned)
            done.removed.extend(removed)
            done.kept.extend(kept)
        _remove_folders(layout, done)
    if not layout.service(service.name).history.is_file():  # else it can be read, and a purge can follow
        forget(service)
    if purge and last and system:
        if others := deployed_services():  # below roots of their own
            done.kept.append(f"{TOOL}: {', '.join(item.name for item in others)} is deployed elsewhere here")
        else:
            _remove_toolkit(done)
        _remove_user(user, layout, done)


def _remove_service(host: ServiceHost, done: Removal, *, purge: bool) -> None:
    paths = host.paths
    forget_experiment(paths)
    if host.layout.root is None:
        _remove_unit(unit_name(host.name), done)
        _remove_journal_limit(host.name, done)
    for path in (paths.base, paths.cache, paths.log):
        remove_path(path, done.removed.append)
    for rotated in paths.log.parent.glob(f"{paths.log.name}.*"):
        remove_path(rotated, done.removed.append)
    # The lock lies in here; whoever asks for it from now on finds nothing deployed.
    trash = paths.state.with_name(f".{paths.state.name}.{secrets.token_hex(4)}")
    paths.state.rename(trash)
    if not purge and (trash / paths.history.name).is_file():
        paths.state.mkdir(mode=0o700)
        (trash / paths.history.name).rename(paths.history)
        entry = Entry(
            id=secrets.token_hex(8),
            kind="uninstall",
            outcome="committed",
            who=whoami(),
            command="uninstall",
            message="removed; its history is kept",
        )
        append(paths, entry)
        done.kept.append(f"{paths.history}: its history (--purge removes it)")
    shutil.rmtree(trash)
    done.removed.append(str(paths.state))


def _remove_unit(unit: str, done: Removal) -> None:
    if not unit_files.uninstall(unit):
        return
    done.removed.append(str(unit_files.path_of(unit)))
    for drop_in in unit_files.drop_ins(unit):
        done.kept.append(f"{drop_in}: not made by ddtoolkit")


def _remove_journal_limit(name: str, done: Removal) -> None:
    path = journal_drop_in(name)
    if not path.is_file():
        return
    remove_path(path, done.removed.append)
    with contextlib.suppress(OSError):  # it holds others' settings
        path.parent.rmdir()
    systemctl("restart", "systemd-journald.service")


def _remove_unused(layout: Layout, done: Removal, young: float | None = None) -> None:
    try:
        found = unused(layout) if young is None else unused(layout, young=young)
    except ToolkitError as error:  # another service's damage
        done.kept.append(f"what no release needs: {error.message}; next: {error.hint}")
        return
    for item in found:
        remove(item)
        done.removed.append(str(item.path))


def _folders(host: ServiceHost) -> tuple[Path, ...]:
    """What holds a service's files."""
    paths = host.paths
    return (paths.base, paths.cache, paths.state, host.layout.models, *_shared_folders(host.layout))


def _shared_folders(layout: Layout) -> tuple[Path, ...]:
    return (layout.services, layout.environments, layout.wheels, layout.logs, layout.caches, layout.state)


def _remove_folders(layout: Layout, done: Removal) -> None:
    """The toolkit's own folders; checkpoints stay where there are any."""
    for path in _shared_folders(layout):
        remove_path(path, done.removed.append)
    if layout.models.is_dir():
        if any(layout.models.iterdir()):
            done.kept.append(f"{layout.models}: checkpoints")
        else:
            layout.models.rmdir()
            done.removed.append(str(layout.models))
    with contextlib.suppress(OSError):
        layout.models.parent.rmdir()


def _remove_toolkit(done: Removal) -> None:
    command.remove()
    remove_path(Path(TOOL), done.removed.append)
    with contextlib.suppress(OSError):  # something else is in it
        Path(TOOL).parent.rmdir()


def _user_of(host: ServiceHost) -> str:
    with contextlib.suppress(ToolkitError):
        current = host.store.current()
        if current is not None:
            return str((current.profile.get("host") or {}).get("user") or DEFAULT_USER)
    return DEFAULT_USER


def _remove_user(name: str, layout: Layout, done: Removal) -> None:
    """Remove the system user that provisioning made, told by its home."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return
    if Path(entry.pw_dir) != layout.caches:
        done.kept.append(f"user {name}: not made by ddtoolkit, its home is {entry.pw_dir}")
        return
    command_line = ["/usr/sbin/userdel", name]
    ended = subprocess.run(command_line, capture_output=True, text=True, timeout=_LIMIT, check=False)
    if ended.returncode:
        done.kept.append(f"user {name}: {ended.stderr.strip()}")
    else:
        done.removed.append(f"user {name}")
