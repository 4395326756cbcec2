"""Nodes to a profile: the schema decides what each scalar is, and every problem gets its place.

A plain scalar is text where the schema wants text, so `0.10`, `on`, `1e3` and `1:30` arrive as written;
where it wants a number or a boolean, only the forms of the YAML 1.2 core schema count (`true`, `12`,
`1e3`), and what YAML 1.1 would have read otherwise (`on`, `010`, `0x1f`, `1_000`, `1:30`) is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from toolkit.errors import Problem
from toolkit.profile import rules
from toolkit.profile.nodes import KeyPath, Node, Place, format_path
from toolkit.profile.schema import SCHEMA_VERSION, Profile
from toolkit.profile.shape import Shape, nearest_choice, nearest_key, profile_shape

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE_FALSE = re.compile(r"true|True|TRUE|false|False|FALSE")
_YES_NO = re.compile(r"(?i:y|yes|on|n|no|off)")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,29})")
_NUMBER = re.compile(r"[-+]?(\.[0-9]{1,30}|(0|[1-9][0-9]{0,29})(\.[0-9]{0,30})?)([eE][-+]?[0-9]{1,3})?")
_LOOKALIKES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[-+]?0[0-7_]+|0o[0-7]+"), "an octal form: write it without the leading 0"),
    (re.compile(r"[-+]?0[0-9]+"), "write it without the leading 0"),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]+"), "write it as a decimal number"),
    (re.compile(r"[-+]?[0-9]+[_,][0-9_,]*(\.[0-9_]*)?"), "write it with digits only"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?"), "a base-60 form: write it as a decimal number"),
    (re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+"), "write it without an exponent"),
    (re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE), "write a finite number"),
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 40


@dataclass(slots=True)
class Reading:
    """What the nodes said.

    Attributes:
        data: values for the schema, without the keys it does not know.
        nodes: the node of each key path.
        hints: how to write the value of a key path, where its form was not right.
        misspelt: key paths that someone most likely meant by an unknown key.
        problems: unknown keys.
    """

    data: dict[str, Any] = field(default_factory=dict)
    nodes: dict[KeyPath, Node] = field(default_factory=dict)
    hints: dict[KeyPath, str] = field(default_factory=dict)
    misspelt: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath, *, key: bool = False) -> Place:
        """Where the value (or the key) at `path` was written, or what encloses it if it was not."""
        for length in range(len(path), -1, -1):
            node = self.nodes.get(path[:length])
            if node is not None:
                return node.key_place if key and node.key_place is not None else node.place
        return Place("")


def read(root: Node) -> Reading:
    """Values and places of a profile's nodes; `root` is a map."""
    reading = Reading()
    reading.data = _read(reading, root, profile_shape(), ())
    return reading


def validate(
    reading: Reading, *, across_keys: bool = True
) -> tuple[Profile | None, list[Problem], list[Problem]]:
    """The profile, everything wrong with it, and what is only doubtful; no profile if anything is wrong.

    Rules across keys are judged on what is right by itself, so that one wrong key hides no other problem.
    They are left out if `across_keys` is false.
    """
    problems = list(reading.problems)
    newer = _newer_schema(reading)
    if newer is not None:
        return None, [newer], []
    profile, errors = strict(reading.data)
    wrong = {_known_path(error["loc"]) for error in errors}
    problems += [_translate(error, reading) for error in errors]
    sound = profile or strict(_without(reading.data, wrong))[0]
    if sound is None or not across_keys:
        return (None if problems else profile), problems, []
    uncertain = wrong | reading.misspelt
    findings = [finding for finding in rules.check(sound) if not _touches(finding.paths, uncertain)]
    problems += [_locate(finding, reading) for finding in findings if finding.fatal]
    doubts = [_locate(finding, reading) for finding in findings if not finding.fatal]
    return (None if problems else profile), problems, doubts


def problems_of_what_is_written(reading: Reading) -> list[Problem]:
    """What is wrong in an overlay by itself: keys and values that no profile could take."""
    _, errors = strict(reading.data)
    return [*reading.problems, *(_translate(item, reading) for item in errors if item["type"] != "missing")]


def strict(data: Mapping[str, Any]) -> tuple[Profile | None, list[ErrorDetails]]:
    """The profile of JSON-safe data, without any coercion between types, or what is wrong."""
    try:
        return Profile.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _read(reading: Reading, node: Node, shape: Shape, path: KeyPath) -> Any:
    reading.nodes[path] = node
    if isinstance(node.value, dict):
        return _read_map(reading, node, shape, path)
    if isinstance(node.value, list):
        if shape.kind != "list" or shape.item is None:
            return []
        return [_read(reading, item, shape.item, (*path, index)) for index, item in enumerate(node.value)]
    if not isinstance(node.value, str):
        return node.value
    text = _unicode(reading, node.value, node.place, path)
    return _read_plain(reading, text, shape, path) if node.plain else text


def _read_map(reading: Reading, node: Node, shape: Shape, path: KeyPath) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if shape.kind != "map":
        return data
    for key, child in node.value.items():
        below = shape.child(key)
        if below is None:
            _unknown_key(reading, (*path, key), shape, child.key_place or child.place)
        else:
            name = _unicode(reading, key, child.key_place or child.place, path)
            data[name] = _read(reading, child, below, (*path, name))
    return data


def _unicode(reading: Reading, text: str, place: Place, path: KeyPath) -> str:
    """`text`, or a problem where it holds halves of surrogate pairs, which are no characters."""
    match = _SURROGATE.search(text)
    if match is None:
        return text
    message = f"holds U+{ord(match[0]):04X}, which is no character, at character {match.start() + 1}"
    reading.problems.append(place.problem(message, key=format_path(path), hint="write it as UTF-8"))
    return _SURROGATE.sub("?", text)


def _read_plain(reading: Reading, text: str, shape: Shape, path: KeyPath) -> Any:
    if _NULL.fullmatch(text):
        return None
    if shape.kind == "boolean":
        if _TRUE_FALSE.fullmatch(text):
            return text.lower() == "true"
        if _YES_NO.fullmatch(text):
            meant = "true" if text.lower() in ("y", "yes", "on") else "false"
            reading.hints[path] = f"write {meant}"
    elif shape.kind in ("integer", "number"):
        if _INTEGER.fullmatch(text):
            return int(text)
        if shape.kind == "number" and _NUMBER.fullmatch(text):
            return float(text)
        lookalike = next((hint for pattern, hint in _LOOKALIKES if pattern.fullmatch(text)), None)
        if lookalike is not None:
            reading.hints[path] = lookalike
    return text


def unknown_key(path: KeyPath, shape: Shape, place: Place) -> tuple[Problem, KeyPath | None]:
    """The problem of a key that `shape` does not have, and the key that was most likely meant."""
    meant = nearest_key(path, shape.keys)
    hint: str | None
    if meant is not None:
        hint = f"did you mean {meant[-1] if meant[:-1] == path[:-1] else format_path(meant)}?"
    else:
        hint = f"allowed here: {', '.join(shape.keys)}" if shape.keys else None
    return place.problem("no such key", key=format_path(path), hint=hint), meant


def _unknown_key(reading: Reading, path: KeyPath, shape: Shape, place: Place) -> None:
    problem, meant = unknown_key(path, shape, place)
    reading.problems.append(problem)
    if meant is not None:
        reading.misspelt.add(meant)


def _newer_schema(reading: Reading) -> Problem | None:
    written = reading.data.get("schema")
    if not isinstance(written, int) or isinstance(written, bool) or written <= SCHEMA_VERSION:
        return None
    return reading.place(("schema",)).problem(
        f"is schema {written}; this ddtoolkit reads up to schema {SCHEMA_VERSION}",
        key="schema",
        hint="upgrade ddtoolkit",
    )


def _known_path(location: Iterable[str | int]) -> KeyPath:
    path: list[str | int] = []
    shape: Shape | None = profile_shape()
    for part in location:
        shape = shape.child(part) if shape is not None else None
        if shape is None:
            break
        path.append(part)
    return tuple(path)


def _shape_at(path: KeyPath) -> Shape:
    shape = profile_shape()
    for part in path:
        shape = shape.child(part) or shape
    return shape


def _translate(error: ErrorDetails, reading: Reading) -> Problem:
    path = _known_path(error["loc"])
    place, key = reading.place(path), format_path(path)
    if error["type"] == "missing":
        allowed = _shape_at(path).allowed()
        return place.problem(f"is missing; it must be {allowed}", key=key, hint=f"add `{path[-1]}: ...`")
    shape = _shape_at(path)
    hint: str | None = reading.hints.get(path)
    if error["type"] == "value_error":
        return place.problem(str(error.get("ctx", {}).get("error", error["msg"])), key=key, hint=hint)
    node = reading.nodes.get(path)
    written = _written(node, hidden=any(_shape_at(path[:n]).secret for n in range(len(path) + 1)))
    if hint is None and shape.choices and node is not None and isinstance(node.value, str):
        near = nearest_choice(node.value, shape.choices)
        hint = f"did you mean {near}?" if near else None
    hint = hint or _quotes(node, shape)
    if not written:
        return place.problem(f"is empty; it must be {shape.allowed()}", key=key, hint=hint)
    return place.problem(f"must be {_limit(error, shape)}, not {written}", key=key, hint=hint)


def _limit(error: ErrorDetails, shape: Shape) -> str:
    context = error.get("ctx", {})
    if error["type"] == "too_long" and "max_length" in context:
        return f"at most {context['max_length']} items"
    if error["type"] == "too_short" and "min_length" in context:
        return f"at least {context['min_length']} items"
    return shape.allowed()


def _quotes(node: Node | None, shape: Shape) -> str | None:
    if node is None or node.plain or not isinstance(node.value, str):
        return None
    return "write it without quotes" if shape.kind in ("integer", "number", "boolean") else None


def _written(node: Node | None, *, hidden: bool) -> str:
    value = None if node is None else node.value
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if node is None or value is None or (node.plain and _NULL.fullmatch(str(value))):
        return "null" if value or value is None else ""
    if hidden:
        return "the text that stands there (not shown: it may be a secret)"
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(short)


def _locate(finding: rules.Finding, reading: Reading) -> Problem:
    path = finding.paths[0]
    return reading.place(path, key=True).problem(finding.message, key=format_path(path), hint=finding.hint)


def _touches(paths: Iterable[KeyPath], others: set[KeyPath]) -> bool:
    return any(
        path[: len(other)] == other or other[: len(path)] == path for path in paths for other in others
    )


def _without(data: Mapping[str, Any], wrong: set[KeyPath]) -> dict[str, Any]:
    """`data` without the wrong keys (a list goes whole), so that defaults stand in for them."""
    copy: dict[str, Any] = json.loads(json.dumps(data))
    for path in wrong:
        parent: Any = copy
        names = [part for part in path if isinstance(part, str)]
        for name in names[:-1]:
            parent = parent.get(name) if isinstance(parent, dict) else None
        if isinstance(parent, dict) and names:
            parent.pop(names[-1], None)
    copy.setdefault("name", "unnamed")
    return copy
