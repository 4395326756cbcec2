"""What a machine lacks of what a profile needs: the facts that the provision playbook would change."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.provision import timekeeping
from toolkit.provision.requirements import Requirements

_QUERY_LIMIT = 30.0
_FORMAT = "--showformat=${Package} ${db:Status-Status} ${db:Status-Want} ${Version}\n"


@dataclass(frozen=True, slots=True)
class Lack:
    """One thing that a machine lacks.

    Attributes:
        subject: the folder, user or package.
        found: what is wrong, in words that name it.
        expected: what should be there.
        seen: what is there.
    """

    subject: str
    found: str
    expected: str
    seen: str


def lacks(needed: Requirements) -> list[Lack]:
    """What this machine lacks; empty when it is ready."""
    return [*_user(needed), *_folders(needed), *_packages(needed), *_time(needed), *_journal(needed)]


def missing(needed: Requirements) -> list[str]:
    """What this machine lacks, a line each."""
    return [lack.found for lack in lacks(needed)]


def _user(needed: Requirements) -> Iterator[Lack]:
    if needed.user is None:
        return
    try:
        pwd.getpwnam(needed.user)
    except KeyError:
        said = f"system user {needed.user} is missing"
        yield Lack(needed.user, said, "a system user", "no such user")


def _folders(needed: Requirements) -> Iterator[Lack]:
    for path, mode in needed.directories:
        try:
            status = path.lstat()
        except OSError:
            yield Lack(str(path), f"folder {path} is missing", "a folder", "nothing")
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield Lack(str(path), f"{path} is not a folder", "a folder", stat.filemode(status.st_mode))
        elif (actual := stat.S_IMODE(status.st_mode)) != mode:
            said = f"folder {path} has mode {actual:04o}, not {mode:04o}"
            yield Lack(str(path), said, f"mode {mode:04o}", f"mode {actual:04o}")
        elif (owner := needed.owner(path)) is not None and (actual_owner := _name_of(status.st_uid)) != owner:
            said = f"folder {path} belongs to {actual_owner}, not to {owner}"
            yield Lack(str(path), said, owner, actual_owner)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _packages(needed: Requirements) -> Iterator[Lack]:
    # Only root installs packages; for anybody else the engine's own checks say what is missing.
    if not needed.packages or os.geteuid() != 0:
        return
    wanted = dict(item.partition("=")[::2] for item in needed.packages)
    query = ["dpkg-query", "--show", _FORMAT, *wanted]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_LIMIT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        yield Lack("dpkg", "dpkg-query does not answer", "an answer", "none")
        return
    facts = {}
    for line in said.splitlines():
        name, status, want, actual = line.split(" ")
        if status == "installed":
            facts[name] = (want, actual)
    for name, version in wanted.items():
        if name not in facts:
            yield Lack(name, f"package {name} is missing", version or "installed", "not installed")
        elif version:
            yield from _pinned(name, version, *facts[name])


def _time(needed: Requirements) -> Iterator[Lack]:
    if not needed.time_sync or os.geteuid() != 0 or timekeeping.in_container():
        return
    if (seen := timekeeping.trouble()) is not None:
        yield Lack("time", f"no NTP client runs: {seen}", "an NTP client that is active", seen)


def _journal(needed: Requirements) -> Iterator[Lack]:
    if needed.journal is None:
        return
    try:
        seen = needed.journal.read_text(encoding="utf-8")
    except FileNotFoundError:
        seen = None
    except (OSError, UnicodeDecodeError):
        seen = ""
    if seen != needed.journal_text:
        limit = needed.journal_max
        expected = "no limit by ddtoolkit" if limit is None else f"SystemMaxUse={limit}"
        said = f"the journal's limit in {needed.journal} is not the profile's"
        yield Lack(str(needed.journal), said, expected, "no such file" if seen is None else "another one")


def _pinned(name: str, version: str, want: str, actual: str) -> Iterator[Lack]:
    """How a package that is pinned to a version is another one, or could become one."""
    if actual != version:
        yield Lack(name, f"package {name} is {actual}, pinned is {version}", version, actual)
    if want != "hold":
        said = f"package {name} is pinned, but not held: an upgrade would replace it"
        yield Lack(name, said, "hold", want)
