"""Files that a deploy wrote: release, environment, secrets; and the cache that the service writes."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.build.builder import checkpoint_marks
from toolkit.build.environment import damage
from toolkit.deploy.judging import release_unit
from toolkit.drift.finding import Drift
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.provision.requirements import free_bytes
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.store import ACCEPTANCE_FILE, Release, content_digest
from toolkit.remote.bootstrap import tree_digest

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
    now = checkpoint_marks(profile)
    for role in sorted({*marks, *now}):
        if marks.get(role) != now.get(role):
            yield Drift("files", f"{role} checkpoint", "its files are not those that were deployed", again)
    if current.unit.secrets_file is not None:
        yield from _secrets(Path(current.unit.secrets_file), host.name)
    if profile.system_user is not None:
        yield from _cache(host.paths.cache, profile.system_user)


def free(layout: Layout) -> int:
    """Bytes that are free where services lie."""
    return free_bytes(layout.services)


def unheld(packages: Sequence[str]) -> list[str]:
    """Packages pinned to a version that are another one, or that an upgrade could replace."""
    pinned = dict(item.split("=", 1) for item in packages if "=" in item)
    if not pinned:
        return []
    form = "--showformat=${Package} ${Version} ${db:Status-Want}\n"
    command = ["dpkg-query", "--show", form, *pinned]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ["dpkg-query does not answer"]
    faults = []
    for line in said.splitlines():
        name, version, want = line.split()
        if version != pinned[name]:
            faults.append(f"package {name} is {version}, pinned is {pinned[name]}")
        if want != "hold":
            faults.append(f"package {name} is pinned, but not held: an upgrade would replace it")
    return faults


def _release(host: ServiceHost, current: Release, profile: Profile, again: str) -> Iterator[Drift]:
    if content_digest(current.profile, current.manifest) != current.digest:
        said = "profile.json or manifest.json is not the one that was deployed"
        yield Drift("files", str(current.path), said, again)
    rendered = release_unit(profile, current.manifest, current.path, host.layout)
    rendered = replace(rendered, secrets=current.unit.secrets)  # on a host they are kept, not read again
    if rendered.to_json() != current.unit.to_json():
        yield Drift("files", str(current.path / "unit.json"), "is not what the profile gives", again)
    yield from _writable(current.path)
    if current.acceptance is None and read_experiment(host.paths) is None:
        said = "its acceptance report is missing: a change could not be held against it"
        yield Drift("files", str(current.path / ACCEPTANCE_FILE), said, again)


def _writable(folder: Path) -> Iterator[Drift]:
    """What others than root could change below a folder whose files are executed or trusted."""
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            continue
        if mode & 0o022:
            said = f"mode {mode:04o}: others than its owner may write it"
            yield Drift("files", str(path), said, f"chmod go-w {path}")
        elif os.geteuid() == 0 and status.st_uid != 0:
            yield Drift("files", str(path), f"belongs to {owner(path)}, not to root", f"chown root {path}")


def _environment(current: Release, again: str) -> Iterator[Drift]:
    built = current.manifest.get("environment", {})
    folder = Path(str(built.get("path", "")))
    if (why := damage(folder)) is not None:
        yield Drift("files", str(folder), why, again)
    elif tree_digest(folder / "toolkit") != built.get("source"):
        yield Drift("files", str(folder), "its files are not those that were built", again)
    else:
        yield from _writable(folder)


def _secrets(path: Path, name: str) -> Iterator[Drift]:
    restart = f"ddtoolkit restart {name}"
    try:
        status = path.lstat()
    except OSError:
        yield Drift("files", str(path), "the secrets file is missing", restart)
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        yield Drift("files", str(path), "the secrets file is no file", restart)
    elif mode != _PRIVATE:
        yield Drift("files", str(path), f"mode {mode:04o}, not 0600", f"chmod 0600 {path}")
    elif os.geteuid() == 0 and status.st_uid != 0:
        yield Drift("files", str(path), f"belongs to {owner(path)}, not to root", f"chown root {path}")


def _cache(folder: Path, user: str) -> Iterator[Drift]:
    """What the service's user cannot write in its own cache: its compilers would fail there."""
    seen = 0
    for root, folders, names in os.walk(folder):  # does not follow links
        for name in (*folders, *names):
            seen += 1
            path = Path(root) / name
            if seen <= _MANY and owner(path) != user:
                said = f"belongs to {owner(path)}, not to {user}"
                yield Drift("files", str(path), said, f"chown -h {user} {path}")
                return


def owner(path: Path) -> str:
    """Name of the user that a path belongs to, its number where it has none."""
    uid = path.lstat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
