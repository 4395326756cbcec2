"""Loading profiles: a file, overlays on it, and `--set` values, resolved to one profile.

Overlays are merged key by key; lists and plain values are replaced. `--set` comes last. Every value keeps
the place that it came from.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Problem
from toolkit.profile.assignments import SET, apply_sets, conflicts, merge, node_of, plain
from toolkit.profile.changes import Change
from toolkit.profile.given import Given
from toolkit.profile.lookup import find_overlay, find_profile, is_path, profile_files
from toolkit.profile.nodes import MAX_BYTES, KeyPath, Node, Place, SyntaxProblem, compose, decode, format_path
from toolkit.profile.reading import Reading, read, validate
from toolkit.profile.schema import Profile
from toolkit.profile.shape import is_secret

STORED = "the stored profile"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a resolved value came from.

    Attributes:
        source: file name, `--set`, or `default`.
        line: line in the file, counted from 1; None where there is no file.
        column: column in the file, counted from 1.
    """

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


@dataclass(frozen=True, slots=True)
class Source:
    """A file that a profile was read from, with the SHA-256 of its bytes in hexadecimal."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Override:
    """A key that two overlays set to different values; the later one counts.

    Attributes:
        key: key path.
        value: what the later one says, JSON-safe, as it is written.
        origin: where it says so.
        former: what the earlier one says; None also where that is no plain value.
        former_origin: where it says so.
    """

    key: str
    value: Any
    origin: Origin
    former: Any
    former_origin: Origin

    def __str__(self) -> str:
        was = f"{self.former_origin} had {_written(self.former)}"
        return f"{self.key}: {_written(self.value)} of {self.origin} counts; {was}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; origins as text."""
        places = {"origin": str(self.origin), "former_origin": str(self.former_origin)}
        return {"key": self.key, "value": self.value, "former": self.former, **places}


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile with everything that it was made from.

    Attributes:
        profile: the checked profile.
        data: its JSON form with all defaults; itself a valid profile.
        origins: origin of each value by key path; a list is one value.
        sources: the files read, the base first.
        warnings: what is allowed but doubtful, with its place.
        overrides: what one overlay says otherwise than one before it.
        given: what it was resolved from, as it was typed.
    """

    profile: Profile
    data: dict[str, Any]
    origins: dict[str, Origin]
    sources: tuple[Source, ...]
    warnings: tuple[Problem, ...]
    overrides: tuple[Override, ...] = ()
    given: Given = field(default_factory=Given)


def load_profile(
    name_or_path: str, *, overlays: Sequence[Path] = (), sets: Sequence[str] = ()
) -> ResolvedProfile:
    """Load, merge and check a profile.

    Args:
        name_or_path: a path, or the name of a profile in one of `profile_folders()`.
        overlays: files, or names of overlays, merged onto it in order; they may leave out what the base has.
        sets: `key.path=value`, applied last; the schema decides the value's type.

    Raises:
        ConfigError: every problem found, each with file, line, column, key path and what is allowed.
    """
    path = find_profile(name_or_path)
    loaded = [_load_file(path), *(_load_file(find_overlay(file), overlay=True) for file in overlays)]
    problems = [problem for _, _, found in loaded for problem in found]
    roots = [root for root, _, _ in loaded if root is not None]
    if len(roots) < len(loaded):
        raise ConfigError(problems)
    root = roots[0]
    if not is_path(name_or_path):
        problems += _other_name(root, path)
    for overlay in roots[1:]:
        problems += _names(overlay)
        root = merge(root, overlay)
    root, refused = apply_sets(root, sets)
    reading = read(root)
    profile, wrong, doubts = validate(reading)
    problems += refused + wrong
    if profile is None or problems:
        raise ConfigError(_in_order(problems))
    data = profile.model_dump(mode="json", by_alias=True)
    sources = tuple(source for _, source, _ in loaded if source is not None)
    origins, overridden = dict(_origins(data, reading)), tuple(overrides(roots[1:]))
    given = Given.of(name_or_path, overlays, sets)
    return ResolvedProfile(profile, data, origins, sources, tuple(doubts), overridden, given)


def load_overlay(path: Path) -> Node:
    """The nodes of one overlay, before it is merged onto anything.

    Raises:
        ConfigError: it cannot be read, or is no overlay.
    """
    root, _, problems = _load_file(path, overlay=True)
    problems += [] if root is None else _names(root)
    if root is None or problems:
        raise ConfigError(problems)
    return root


def overrides(overlays: Sequence[Node]) -> Iterator[Override]:
    """What overlays say of the same keys, where it differs, in the order in which they are merged."""
    for key, earlier, later in conflicts(overlays):
        places = [Origin(node.place.source, node.place.line, node.place.column) for node in (later, earlier)]
        yield Override(format_path(key), plain(later), places[0], plain(earlier), places[1])


def _written(value: Any) -> str:
    return "null" if value is None else str(value)


def change_profile(data: Mapping[str, Any], sets: Sequence[str]) -> tuple[Profile, list[Change]]:
    """A stored resolved profile with `--set` values applied, and what that changes.

    Args:
        data: the JSON form of a profile (`ResolvedProfile.data`).
        sets: `key.path=value`.

    Raises:
        ConfigError: a value is wrong, or the changed profile breaks a rule.
    """
    before = profile_from_data(data)
    root, problems = apply_sets(node_of(data, Place(STORED)), sets)
    profile, wrong, _ = validate(read(root))
    if profile is None or problems:
        raise ConfigError(_in_order(problems + _blame_sets(wrong, data, sets)))
    return profile, differences(before, profile)


def _blame_sets(problems: list[Problem], data: Mapping[str, Any], sets: Sequence[str]) -> list[Problem]:
    """A rule across keys that only the sets break is told of them, whichever key it is about.

    Only their keys are named: a value may be what nobody should see.
    """
    before = validate(read(node_of(data, Place(STORED))))[1]
    source = " ".join(f"{SET.source} {text.partition('=')[0]}" for text in sets)
    return [
        replace(problem, source=source) if problem.source == STORED and problem not in before else problem
        for problem in problems
    ]


def profile_from_data(data: Mapping[str, Any]) -> Profile:
    """The profile of a stored JSON form. Rules across keys are not applied: it has been deployed before.

    Raises:
        ConfigError: it was written by a newer schema, or is damaged.
    """
    profile, problems, _ = validate(read(node_of(data, Place(STORED))), across_keys=False)
    if profile is None:
        raise ConfigError(problems)
    return profile


def differences(old: Profile | Mapping[str, Any], new: Profile | Mapping[str, Any]) -> list[Change]:
    """Keys whose values differ between two profiles (or their JSON forms), in order of key path.

    Changes are shown and stay in the history: of a secret's command they have no arguments, which may hold
    more than they should.
    """
    before, after = dict(_leaves(_data(old))), dict(_leaves(_data(new)))
    keys = sorted(before.keys() | after.keys(), key=format_path)
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    return [
        Change(format_path(key), _told(key, one), _told(key, other))
        for key, one, other in pairs
        if one != other and one != {} != other
    ]


def _told(key: KeyPath, value: Any) -> Any:
    """A value as a change has it."""
    if not isinstance(value, list) or len(value) < 2 or not is_secret(key):
        return value
    return [value[0], "..."]


@dataclass(frozen=True, slots=True)
class Listing:
    """A profile that a name finds; `problem` says why it cannot be used, None if it can."""

    name: str
    description: str
    path: Path
    problem: str | None = None


def list_profiles() -> list[Listing]:
    """Every profile that a name finds, broken ones included, in order of name."""
    listings = []
    for name, path in profile_files():
        try:
            profile = load_profile(str(path)).profile
            listings.append(Listing(name, profile.description, path))
        except ConfigError as error:
            listings.append(Listing(name, "", path, str(error)))
    return listings


def _data(profile: Profile | Mapping[str, Any]) -> Mapping[str, Any]:
    return profile.model_dump(mode="json", by_alias=True) if isinstance(profile, Profile) else profile


def _leaves(data: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _origins(data: Mapping[str, Any], reading: Reading) -> Iterator[tuple[str, Origin]]:
    for path, _ in _leaves(data):
        node = reading.nodes.get(path)
        place = Place("default") if node is None else node.place
        yield format_path(path), Origin(place.source, place.line, place.column)


def _other_name(root: Node, path: Path) -> list[Problem]:
    name = root.value.get("name")
    if name is None or not isinstance(name.value, str) or name.value == path.stem:
        return []
    message = f"is {name.value!r} in a file called {path.name}"
    return [name.place.problem(message, key="name", hint=f"write `name: {path.stem}`")]


def _names(overlay: Node) -> list[Problem]:
    name = overlay.value.get("name")
    if name is None:
        return []
    place = name.key_place or name.place
    return [place.problem("an overlay cannot change the name", key="name", hint="take it out")]


def _load_file(path: Path, *, overlay: bool = False) -> tuple[Node | None, Source | None, list[Problem]]:
    try:
        raw = _read_bytes(path)
        root, problems = compose(decode(raw, str(path)), str(path))
    except SyntaxProblem as stop:
        return None, None, [stop.problem]
    source = Source(path, hashlib.sha256(raw).hexdigest())
    if root is None or (root.plain and not root.value):
        words, hint = "is empty", "begin with `schema: 1` and `name: ...`"
        if overlay:
            words = "is an empty overlay: it would change nothing"
            hint = "write the keys that are to differ, such as `service: {port: 30001}`, or leave it out"
        return None, source, [*problems, Place(str(path)).problem(words, hint=hint)]
    if not isinstance(root.value, dict):
        example = "service: {port: 30001}" if overlay else "name: ..."
        return None, source, [*problems, root.place.problem(f"must be a map of keys: `{example}`")]
    return root, source, problems


def _read_bytes(path: Path) -> bytes:
    place = Place(str(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SyntaxProblem(place.problem("is no file", hint="name a YAML file"))
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise SyntaxProblem(place.problem(f"cannot be read: {reason}")) from None
    except ValueError:
        raise SyntaxProblem(place.problem("is no file name")) from None


def _in_order(problems: list[Problem]) -> list[Problem]:
    sources = list(dict.fromkeys(problem.source for problem in problems))
    return sorted(problems, key=lambda p: (sources.index(p.source), p.line or 0, p.column or 0))
