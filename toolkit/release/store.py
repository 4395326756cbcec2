"""Releases of one service: folders in which nothing served ever changes, and the link to the one to serve.

A release is written into a hidden folder, made durable, then renamed, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from toolkit.acceptance.report import is_changed
from toolkit.build.environment import damage
from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import fsync_dir, json_bytes, make_private, read_bytes, read_json, replace_file, write_new
from toolkit.layout import ServicePaths
from toolkit.profile.changes import Change
from toolkit.profile.given import Given
from toolkit.service.unit import UNIT_FILE, Unit, read_unit, write_unit

ACCEPTANCE_FILE = "acceptance.json"
LATEST_FILE = "acceptance.latest.json"  # of a judgement after the one that it was accepted with
PENDING_FILE = "acceptance.pending.json"
REFUSED_FILE = "acceptance.refused.json"
_PROFILE_FILE = "profile.json"
_RECORDED_FILE = "recorded.json"
_MANIFEST_FILE = "manifest.json"
_META_FILE = "release.json"
_SOURCES = "sources"
_DEPLOY_AGAIN = "deploy the profile again: that builds a new release"
_ID = re.compile(r"^\d{8}T\d{6}Z-[0-9a-f]{8}$")
STAGING = ".staging-"
_DIGITS = 8
_STAMP = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class Release:
    """One release on disk.

    Attributes:
        id: UTC time and a short hash of what it holds, `20261130T004200Z-1a2b3c4d`.
        path: its folder.
    """

    id: str
    path: Path

    @property
    def meta(self) -> dict[str, Any]:
        """`id`, `digest`, `created`, `changes`, `swapped`, `deployed`, `given`, `files`.

        `files` has the SHA-256 of each file's canonical JSON.
        """
        return self._read(_META_FILE)

    @property
    def digest(self) -> str:
        """Hash of resolved profile and manifest, equal for releases that would serve the same."""
        return str(self.meta.get("digest", ""))

    @property
    def built_profile(self) -> dict[str, Any]:
        """The resolved profile that it was made from."""
        return self._read(_PROFILE_FILE)

    @property
    def profile(self) -> dict[str, Any]:
        """The resolved profile, with what was put on record since."""
        recorded = self._recorded.get("profile")
        return recorded if isinstance(recorded, dict) else self.built_profile

    @property
    def manifest(self) -> dict[str, Any]:
        """Versions and hashes of what was built."""
        return self._read(_MANIFEST_FILE)

    @property
    def unit(self) -> Unit:
        """The unit.

        Raises:
            ToolkitError: it is absent or damaged.
        """
        return read_unit(self.path)

    @property
    def url(self) -> str | None:
        """Where it serves; None where its unit is damaged, which is no reason not to tell the rest."""
        try:
            return self.unit.url
        except ToolkitError:
            return None

    @property
    def swapped(self) -> tuple[str, ...]:
        """Keys whose values came from a swap since the last deploy."""
        keys = self._recorded.get("swapped", self.meta.get("swapped"))
        return tuple(key for key in keys if isinstance(key, str)) if isinstance(keys, list) else ()

    @property
    def deployed(self) -> dict[str, Any]:
        """What the deploy gave the swapped keys, as far as that is known."""
        values = self._recorded.get("deployed", self._meta_or_none.get("deployed"))
        return values if isinstance(values, dict) else {}

    @property
    def given(self) -> Given:
        """What its deploy was asked for, or that of the release whose keys a swap changed."""
        return Given.from_json(self._recorded.get("given", self._meta_or_none.get("given")))

    @property
    def _meta_or_none(self) -> dict[str, Any]:
        value = read_json(self.path / _META_FILE)
        return value if isinstance(value, dict) else {}

    @property
    def acceptance(self) -> dict[str, Any] | None:
        """The report it was accepted with, its baseline; None for a release that was never accepted."""
        return self._report(ACCEPTANCE_FILE)

    def report_damage(self) -> str | None:
        """What is wrong with its baseline, in words; None where nothing is, or there is none."""
        path = self.path / ACCEPTANCE_FILE
        if not path.exists():
            return None
        report = self.acceptance
        if report is None or "verdict" not in report:
            return f"{path}: is damaged"
        return f"{path}: is not the report that its acceptance wrote" if is_changed(report) else None

    @property
    def judged_again(self) -> dict[str, Any] | None:
        """The report of the last judgement since, that of a rollback to it; None where there was none."""
        return self._report(LATEST_FILE)

    @property
    def refused(self) -> dict[str, Any] | None:
        """The report by which it was refused the last time, empty if damaged; None where it never was."""
        report = self._report(REFUSED_FILE)
        return {} if report is None and (self.path / REFUSED_FILE).exists() else report

    def record(
        self,
        profile: Mapping[str, Any],
        *,
        swapped: Collection[str],
        sources: Mapping[str, bytes],
        given: Given | None = None,
        deployed: Mapping[str, Any] | None = None,
    ) -> None:
        """Let its profile be this one, which would be served alike; what it was made from stays as it is.

        Args:
            profile: resolved profile as a JSON object.
            swapped: keys whose values came from a swap since the last deploy.
            sources: profile files as the user wrote them, by file name; none leaves those of before.
            given: what the deploy was asked for; None leaves that of before.
            deployed: what the last deploy gave the swapped keys.

        Raises:
            ToolkitError: it cannot be written; the profile is as before.
        """
        asked = self.given if given is None else given
        value = {"profile": dict(profile), "swapped": sorted(swapped), "given": asked.to_json()}
        value["deployed"] = dict(deployed or {})
        try:
            for name, data in sources.items():
                replace_file(self.path / _SOURCES / Path(name).name, data, 0o444)
            replace_file(self.path / _RECORDED_FILE, json_bytes(value), 0o444)
        except OSError as error:
            said = f"{self.path / _RECORDED_FILE}: cannot be written: {error.strerror}"
            raise ToolkitError(said, hint="free some space; nothing was changed") from error

    @property
    def recorded(self) -> bytes | None:
        """What was put on record, as it lies there; None where nothing was."""
        try:
            return (self.path / _RECORDED_FILE).read_bytes()
        except OSError:
            return None

    def restore_record(self, before: bytes | None, sources: Mapping[str, bytes]) -> None:
        """Let what is on record be this again, as `recorded` and `sources` gave it, as the disk allows."""
        files = {f"{_SOURCES}/{name}": data for name, data in sources.items()}
        files |= {} if before is None else {_RECORDED_FILE: before}
        if before is None:
            with contextlib.suppress(OSError):
                (self.path / _RECORDED_FILE).unlink(missing_ok=True)
        for name, data in files.items():
            with contextlib.suppress(OSError):
                if (self.path / name).read_bytes() != data:
                    replace_file(self.path / name, data, 0o444)

    def require_recordable(self) -> None:
        """Make sure that something could be put on record.

        Raises:
            ToolkitError: its folder cannot be written, or something else is in the record's place.
        """
        for place in (self.path, self.path / _SOURCES):
            if place.exists() and not os.access(place, os.W_OK | os.X_OK):
                raise ToolkitError(f"{place}: cannot be written", hint="run it as the user who deployed it")
        file = self.path / _RECORDED_FILE
        if (file.exists() or file.is_symlink()) and (file.is_symlink() or not file.is_file()):
            raise ToolkitError(f"{file}: is no file", hint="remove it; nothing was changed")

    @property
    def _recorded(self) -> dict[str, Any]:
        value = read_json(self.path / _RECORDED_FILE)
        return value if isinstance(value, dict) else {}

    def keep_report(self, *, new_baseline: bool) -> None:
        """Keep the pending report: as the baseline if it is the first, else beside it; may be repeated.

        Later releases are held against the baseline: would every judgement move it, a release that comes out
        slower each time would drag the bar down. A trial that was judged by correctness alone sets none.

        Args:
            new_baseline: put it in the baseline's place.

        Raises:
            OSError: the disk is failing; renaming takes no space.
        """
        pending = self.path / PENDING_FILE
        if not pending.is_file():
            return
        baseline = self.acceptance
        if baseline is None or baseline.get("mode") == "experiment" or new_baseline:
            (self.path / LATEST_FILE).unlink(missing_ok=True)
            pending.replace(self.path / ACCEPTANCE_FILE)
        else:
            pending.replace(self.path / LATEST_FILE)

    @property
    def report_file(self) -> Path:
        """File of the newest accepted report, existing or not."""
        latest = self.path / LATEST_FILE
        return latest if latest.is_file() else self.path / ACCEPTANCE_FILE

    def sources(self) -> dict[str, bytes]:
        """The files that its profile was read from, by name."""
        folder = self.path / _SOURCES
        return {path.name: read_bytes(path) for path in sorted(folder.glob("*")) if path.is_file()}

    def altered(self) -> str | None:
        """Which of its files is not the one that it was made with, in words; None when none is.

        Releases of versions that kept no hash of each file are told by the digest of profile and manifest.

        Raises:
            ToolkitError: release.json, which has the hashes, is absent or damaged.
        """
        hashes = self.meta.get("files")
        if not isinstance(hashes, dict):
            values = [read_json(self.path / name) for name in (_PROFILE_FILE, _MANIFEST_FILE)]
            if _sha256(values) == self.digest:
                return None
            return f"{self.path}: profile.json or manifest.json is not the one that the release was made with"
        for name, expected in sorted(hashes.items()):
            if _sha256(read_json(self.path / name)) != expected:
                return f"{self.path / name}: is not the one that the release was made with"
        return None

    def require_unaltered(self, service: str) -> None:
        """Make sure that what is going to be served is what was made, and judged.

        Args:
            service: name of the service, for the next step.

        Raises:
            ToolkitError: a file was changed since; names it.
        """
        if (why := self.altered()) is not None:
            raise ToolkitError(why, hint=self.sound_again(service))

    def sound_again(self, service: str) -> str:
        """The next step where its files were changed."""
        return (
            f"{self.given.deploy(service)} makes a sound release; "
            f"ddtoolkit rollback {service} --to RELEASE goes to another of ddtoolkit history {service}"
        )

    def require_environment(self) -> None:
        """Make sure that the code it was built with is still there; else another version might be run.

        Raises:
            ToolkitError: its folder is missing or damaged, or the manifest that names it is.
        """
        folder = self._environment()
        if folder is not None and (why := damage(folder)) is not None:
            hint = self.given.deploy(self.unit.name)
            raise ToolkitError(why, hint=hint)

    def environment_damage(self) -> str | None:
        """What is wrong with the code it was built with; None also where the manifest cannot tell."""
        try:
            folder = self._environment()
        except ToolkitError:
            return None
        return None if folder is None else damage(folder)

    def _environment(self) -> Path | None:
        built = self.manifest.get("environment")
        if built is None:
            return None  # not every engine is built by this toolkit
        folder = built.get("path") if isinstance(built, dict) else None
        if not isinstance(folder, str):
            raise ToolkitError(
                f"{self.path / _MANIFEST_FILE}: damaged: it names no environment",
                hint=_DEPLOY_AGAIN,
            )
        return Path(folder)

    def _report(self, name: str) -> dict[str, Any] | None:
        value = read_json(self.path / name)
        return value if isinstance(value, dict) else None

    def _read(self, name: str) -> dict[str, Any]:
        value = read_json(self.path / name)
        if not isinstance(value, dict):
            raise ToolkitError(f"{self.path / name}: absent or damaged", hint=_DEPLOY_AGAIN)
        return value


def content_digest(profile: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of both, in hexadecimal."""
    return _sha256([profile, manifest])


def _sha256(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class Store:
    """The releases of one service."""

    def __init__(self, paths: ServicePaths) -> None:
        self._paths = paths

    def new_id(self, digest: str, now: datetime | None = None) -> str:
        """An id after those of all releases, so that their order is that of their making."""
        moment = now or datetime.now(UTC)
        releases = self.all()
        if releases:
            newest = datetime.strptime(releases[-1].id.partition("-")[0], _STAMP).replace(tzinfo=UTC)
            moment = max(moment, newest + timedelta(seconds=1))
        return f"{moment.strftime(_STAMP)}-{digest[:_DIGITS]}"

    def path(self, release_id: str) -> Path:
        """Folder of the release, existing or not.

        Raises:
            ConfigError: the text is no release id.
        """
        if not _ID.match(release_id):
            raise ConfigError(
                f"{release_id!r} is no release id",
                hint=f"ddtoolkit history {self._paths.base.name} lists them",
            )
        return self._paths.releases / release_id

    def stage(
        self,
        release_id: str,
        *,
        profile: Mapping[str, Any],
        unit: Unit,
        manifest: Mapping[str, Any],
        sources: Mapping[str, bytes] | None = None,
        changes: Sequence[Change] = (),
        swapped: Collection[str] = (),
        given: Given | None = None,
        deployed: Mapping[str, Any] | None = None,
    ) -> Release:
        """Write a new release; nothing serves it yet.

        Args:
            release_id: from `new_id`; the unit must carry it.
            profile: resolved profile as a JSON object.
            unit: what is to run.
            manifest: versions and hashes of the build.
            sources: profile files as the user wrote them, by file name.
            changes: keys that differ from the release before.
            swapped: keys whose values came from a swap since the last deploy.
            given: what its deploy was asked for.
            deployed: what the last deploy gave the swapped keys.

        Raises:
            ToolkitError: the disk is full or the folder cannot be written; nothing is left behind.
        """
        path = self.path(release_id)
        if unit.release != release_id:
            raise ToolkitError(f"the unit is for release {unit.release}, not {release_id}")
        made = {
            _PROFILE_FILE: json_bytes(profile),
            UNIT_FILE: write_unit(unit),
            _MANIFEST_FILE: json_bytes(manifest),
        }
        meta = {
            "id": release_id,
            "digest": content_digest(profile, manifest),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "changes": [asdict(change) for change in changes],
            "swapped": sorted(swapped),
            "deployed": dict(deployed or {}),
            "given": (given or Given()).to_json(),
            "files": {name: _sha256(json.loads(data)) for name, data in made.items()},
        }
        files = {
            **made,
            _META_FILE: json_bytes(meta),
            **{f"{_SOURCES}/{Path(name).name}": data for name, data in (sources or {}).items()},
        }
        staging = self._paths.releases / f"{STAGING}{release_id}"
        try:
            self._paths.releases.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(staging, ignore_errors=True)
            _write_tree(staging, files)
            staging.rename(path)
            fsync_dir(self._paths.releases)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            said = f"{path}: cannot write the release: {error.strerror}"
            raise ToolkitError(said, hint="free some space; nothing was changed") from error
        return Release(release_id, path)

    def get(self, release_id: str) -> Release:
        """The release with this id.

        Raises:
            ConfigError: there is none.
        """
        path = self.path(release_id)
        if not _is_release(path):
            raise ConfigError(
                f"no release {release_id} in {self._paths.releases}",
                hint=f"ddtoolkit history {self._paths.base.name}",
            )
        return Release(release_id, path)

    def all(self) -> list[Release]:
        """Every release, oldest first."""
        try:
            names = sorted(entry.name for entry in self._paths.releases.iterdir())
        except OSError:
            return []
        found = [Release(name, self._paths.releases / name) for name in names if _ID.match(name)]
        return [release for release in found if _is_release(release.path)]

    def current(self) -> Release | None:
        """The release that `current` names; None before the first deploy."""
        try:
            name = self._paths.current.readlink().name
        except OSError:
            return None
        with contextlib.suppress(ConfigError):
            return self.get(name)
        return None

    def prepare_switch(self, release_id: str | None) -> None:
        """Make the link that `switch` will rename, so that switching needs no space on the disk."""
        if release_id is not None and not self._link(release_id).is_symlink():
            self._link(release_id).symlink_to(Path("releases") / release_id)

    def switch(self, release_id: str | None) -> None:
        """Let `current` name this release, in one step; None removes it.

        Raises:
            OSError: the folder cannot be written.
        """
        if release_id is None:
            self._paths.current.unlink(missing_ok=True)
        else:
            self.prepare_switch(release_id)
            self._link(release_id).replace(self._paths.current)
        fsync_dir(self._paths.base)

    def forget_switches(self) -> None:
        """Remove links that were prepared and not used."""
        for link in self._paths.base.glob(".current-*"):
            link.unlink(missing_ok=True)

    def prune(self, keep: int, protect: Collection[str]) -> list[str]:
        """Remove releases beyond `keep`, the oldest first, never a protected one; return the ids removed.

        Those that were never accepted go first: refused ones push out none that could serve again.
        """
        releases = sorted(self.all(), key=lambda release: release.acceptance is not None)
        old = releases[: max(len(releases) - keep, 0)]
        removed = []
        for release in old:
            if release.id in protect:
                continue
            hidden = release.path.with_name(f"{STAGING}{release.id}")
            with contextlib.suppress(OSError):
                release.path.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)
                removed.append(release.id)
        return removed

    def _link(self, release_id: str) -> Path:
        return self._paths.base / f".current-{release_id}"


def _is_release(path: Path) -> bool:
    """Whether one was staged there; one that lost files since is damaged, and not none."""
    return any((path / name).is_file() for name in (_META_FILE, _PROFILE_FILE, _MANIFEST_FILE, UNIT_FILE))


def _write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    for new in (folder, folder / _SOURCES):
        new.mkdir()
        new.chmod(0o755)  # whatever the umask: the service's user reads its release
    for name, data in files.items():
        write_new(folder / name, data, 0o444)
    fsync_dir(folder / _SOURCES)
    fsync_dir(folder)


def prepare_layout(root: Path | None, paths: ServicePaths) -> None:
    """Create the service's folders, state for its owner alone; so is a root for local use that is new.

    Raises:
        ToolkitError: one cannot be created.
    """
    try:
        if root is not None:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)  # one that exists is the user's to set
        paths.releases.mkdir(parents=True, exist_ok=True, mode=0o755)
        make_private(paths.state)
    except OSError as error:
        raise ToolkitError(f"{error.filename}: cannot be created: {error.strerror}") from error
