"""Files that a deploy wrote: release, environment, secrets; and the cache that the service writes."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from toolkit.build.bootstrap import tree_digest
from toolkit.build.builder import checkpoint_marks
from toolkit.build.environment import damage
from toolkit.drift.repair import give_below, give_to_root, set_mode
from toolkit.layout import Layout
from toolkit.plan.finding import Drift, Mend
from toolkit.profile.schema import Profile
from toolkit.provision.requirements import free_bytes
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.store import ACCEPTANCE_FILE, Release, content_digest
from toolkit.service.command import release_unit
from toolkit.service.unit import SecretSource, Unit

_PRIVATE = 0o600
_MANY = 2000  # entries of the cache that are looked at


def drifts(host: ServiceHost, current: Release, profile: Profile, again: str) -> Iterator[Drift]:
    """What is not as the deploy left it.

    Args:
        host: the service.
        current: its current release.
        profile: the release's profile.
        again: the command that deploys anew.
    """
    yield from _release(host, current, profile, again)
    yield from _environment(current, again)
    marks = current.manifest.get("checkpoints", {})
    now = checkpoint_marks(profile, host.layout)
    for role in sorted({*marks, *now}):
        if marks.get(role) != now.get(role):
            subject, said = f"{role} checkpoint", "its files are not those that were deployed"
            expected, seen = _marks(marks.get(role)), _marks(now.get(role))
            yield Drift("files", subject, said, again, expected, seen, "planned")
    if current.unit.secrets_file is not None:
        yield from _secrets(Path(current.unit.secrets_file), current.unit, again)
    if profile.system_user is not None:
        yield from _cache(host.paths.cache, profile.system_user)


def free(layout: Layout) -> int:
    """Bytes that are free where services lie."""
    return free_bytes(layout.services)


def _release(host: ServiceHost, current: Release, profile: Profile, again: str) -> Iterator[Drift]:
    if content_digest(current.built_profile, current.manifest) != current.digest:
        said = "profile.json or manifest.json is not the one that was deployed"
        seen = content_digest(current.built_profile, current.manifest)
        yield Drift("files", str(current.path), said, again, current.digest, seen, "release")
    rendered = release_unit(profile, current.manifest, current.path, host.layout)
    rendered = replace(rendered, secrets=current.unit.secrets)  # on a host they are kept, not read again
    if rendered.to_json() != current.unit.to_json():
        path, said = str(current.path / "unit.json"), "is not what the profile gives"
        expected = "the unit that the release's profile gives"
        yield Drift("files", path, said, again, expected, "another one", "release")
    yield from _writable(current.path)
    if (why := current.report_damage()) is not None:
        path = str(current.path / ACCEPTANCE_FILE)
        said = f"{why.removeprefix(f'{path}: ')}: no change is held against it"
        yield Drift("files", path, said, again, "the report of its acceptance", "another one", "release")
    elif current.acceptance is None and read_experiment(host.paths) is None:
        path = str(current.path / ACCEPTANCE_FILE)
        said = "its acceptance report is missing: a change could not be held against it"
        yield Drift("files", path, said, again, "the report of its acceptance", "no such file", "release")


def _writable(folder: Path) -> Iterator[Drift]:
    """What others than root could change below a folder whose files are executed or trusted."""
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            continue
        if mode & 0o022:
            yield _mode(path, mode, mode & ~0o022, "others than its owner may write it", f"chmod go-w {path}")
        elif os.geteuid() == 0 and status.st_uid != 0:
            yield _not_roots(path)


def _mode(path: Path, seen: int, expected: int, why: str, fix: str) -> Drift:
    said = f"mode {seen:04o}, not {expected:04o}{why and ': '}{why}"
    words = f"mode {expected:04o}", f"mode {seen:04o}"
    return Drift("files", str(path), said, fix, *words, "repair", partial(set_mode, path, expected))


def _not_roots(path: Path) -> Drift:
    seen, give = owner(path), partial(give_to_root, path)
    said, fix = f"belongs to {seen}, not to root", f"chown -h root:root {path}"
    return Drift("files", str(path), said, fix, "root", seen, "repair", give)


def _environment(current: Release, again: str) -> Iterator[Drift]:
    built = current.manifest.get("environment", {})
    folder = Path(str(built.get("path", "")))
    if (why := damage(folder)) is not None:
        yield Drift("files", str(folder), why, again, "a whole environment", why, "planned")
    elif (seen := tree_digest(folder / "toolkit")) != (expected := str(built.get("source"))):
        said, digests = "its files are not those that were built", (f"sha256 {expected}", f"sha256 {seen}")
        yield Drift("files", str(folder), said, again, *digests, "build")
    else:
        yield from _writable(folder)


def _secrets(path: Path, unit: Unit, again: str) -> Iterator[Drift]:
    # What was brought to the host by a deploy can be read nowhere else: only another one brings it again.
    kept = SecretSource() in unit.secrets.values()
    fix, mend = (again, "release") if kept else (f"ddtoolkit restart {unit.name}", "restart")
    try:
        status = path.lstat()
    except OSError:
        said, expected = "the secrets file is missing", "a private file"
        yield Drift("files", str(path), said, fix, expected, "no such file", cast("Mend", mend))
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        said, seen = "the secrets file is no file", stat.filemode(status.st_mode)
        yield Drift("files", str(path), said, f"rm {path}; {fix}", "a private file", seen)
    elif mode != _PRIVATE:
        yield _mode(path, mode, _PRIVATE, "", f"chmod {_PRIVATE:04o} {path}")
    elif os.geteuid() == 0 and status.st_uid != 0:
        yield _not_roots(path)


def _cache(folder: Path, user: str) -> Iterator[Drift]:
    """What the service's user cannot write in its own cache: its compilers would fail there."""
    count = 0
    for root, folders, names in os.walk(folder):  # does not follow links
        for name in (*folders, *names):
            count += 1
            path = Path(root) / name
            if count <= _MANY and owner(path) != user:
                seen = owner(path)
                said, fix = f"belongs to {seen}, not to {user}", f"chown -h {user}: {path}"
                give = partial(give_below, folder, user)
                yield Drift("files", str(path), said, fix, user, seen, "repair", give)
                return


def _marks(marks: Any) -> str:
    """Size and time of a checkpoint's files, as one line."""
    if not marks:
        return "no files"
    return ", ".join(f"{name} {size} bytes of {when}" for name, (size, when, _) in sorted(marks.items()))


def owner(path: Path) -> str:
    """Name of the user that a path belongs to, its number where it has none."""
    uid = path.lstat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
