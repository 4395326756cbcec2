"""The profile's schema as a tree that readers, messages and the reference walk."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from toolkit.profile.nodes import KeyPath, format_path
from toolkit.profile.schema import Profile

Kind = Literal["map", "list", "text", "integer", "number", "boolean"]

_KINDS: Mapping[str, Kind] = {
    "object": "map",
    "array": "list",
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What one key takes.

    Attributes:
        kind: the value's type.
        nullable: whether null is allowed too.
        secret: the value is a reference to a secret; what was written in its place is never shown.
        description: what the key is for.
        default: JSON form of the default, None if there is none or it is null.
        choices: the allowed values, empty if they are not listed.
        rules: the JSON schema's limits (minimum, pattern, allowed, ...).
        keys: keys of a map with fixed keys.
        values: shape of a map's values where keys are free.
        item: shape of a list's items.
    """

    kind: Kind
    nullable: bool = False
    secret: bool = False
    description: str = ""
    default: Any = None
    choices: tuple[Any, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Shape] = field(default_factory=dict)
    values: Shape | None = None
    item: Shape | None = None

    def child(self, key: str | int) -> Shape | None:
        """The shape below `key`; None if there is no such key."""
        return self.item if isinstance(key, int) else self.keys.get(key, self.values)

    def allowed(self) -> str:
        """In words, what the key takes: "an integer from 1 to 1024"."""
        words = self._allowed()
        return f"{words}, or null" if self.nullable else words

    def _allowed(self) -> str:
        if "allowed" in self.rules:
            return str(self.rules["allowed"])
        if self.choices:
            return ("" if len(self.choices) == 1 else "one of ") + ", ".join(map(str, self.choices))
        longest = self.rules.get("maxLength")
        words = {
            "map": f"a map with keys of {', '.join(self.keys)}" if self.keys else "a map of names to text",
            "list": f"a list, each item {self.item.allowed() if self.item else 'anything'}",
            "text": f"text of at most {longest} characters" if longest else "text",
            "integer": f"an integer{self._range()}",
            "number": f"a number{self._range()}",
            "boolean": "true or false",
        }
        return words[self.kind]

    def _range(self) -> str:
        low, above = self.rules.get("minimum"), self.rules.get("exclusiveMinimum")
        high, below = self.rules.get("maximum"), self.rules.get("exclusiveMaximum")
        start = f" above {above:g}" if above is not None else f" from {low}" if low is not None else ""
        end = f" to below {below:g}" if below is not None else f" to {high:.15g}" if high is not None else ""
        return start + (end.replace(" to ", ", at most ") if above is not None else end)


@cache
def profile_shape() -> Shape:
    """The shape of a whole profile."""
    schema = Profile.model_json_schema(mode="serialization")
    return _shape(schema, schema.get("$defs", {}))


def is_secret(path: KeyPath) -> bool:
    """Whether a key is one of a reference to a secret, or the reference itself."""
    shape: Shape | None = profile_shape()
    for part in path:
        shape = shape.child(part) if shape is not None else None
        if shape is not None and shape.secret:
            return True
    return False


# What SGLang and others call it.
_OTHERS_WORDS = {
    "host": "bind",
    "address": "bind",
    "listen": "bind",
    "max_batch_size": "max_running_requests",
}


def nearest_key(path: KeyPath, siblings: Mapping[str, Shape]) -> KeyPath | None:
    """The valid key that someone who wrote `path` most likely meant; None if none is near."""
    written = str(path[-1])
    close = _nearest(written, list(siblings))
    if close is None:
        close = _OTHERS_WORDS.get(written) if _OTHERS_WORDS.get(written) in siblings else None
    if close is not None:
        return (*path[:-1], close)
    known = list(walk(profile_shape()))
    for name in (written, _nearest(written, [str(other[-1]) for other, _ in known])):
        same = [other for other, _ in known if other[-1] == name]
        if len(same) == 1:
            return same[0]
    return None


def nearest_choice(written: str, choices: tuple[Any, ...]) -> str | None:
    """The listed value nearest to what was written; None if none is near."""
    return _nearest(written, [str(choice) for choice in choices])


def walk(shape: Shape, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Shape]]:
    """Every fixed key below `shape` with its path, parents first."""
    for name, child in shape.keys.items():
        yield (*path, name), child
        yield from walk(child, (*path, name))


def profile_keys() -> list[str]:
    """Every fixed key of a profile, dotted, parents first."""
    return [format_path(path) for path, _ in walk(profile_shape())]


def _nearest(written: str, names: list[str]) -> str | None:
    folded = {name.lower().replace("-", "_"): name for name in names}
    close = difflib.get_close_matches(written.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def _shape(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Shape:
    merged = dict(schema)
    nullable = False
    for option in merged.pop("anyOf", ()):
        if option.get("type") == "null":
            nullable = True
        else:
            merged = option | merged
    if "$ref" in merged:
        merged = definitions[merged["$ref"].rsplit("/", 1)[1]] | merged
    kind = _KINDS[merged.get("type", "string")]
    free = merged.get("additionalProperties")
    return Shape(
        kind=kind,
        nullable=nullable,
        secret=bool(merged.get("secret")),
        description=merged.get("description", ""),
        default=merged.get("default"),
        choices=tuple(merged.get("enum", ())) or ((merged["const"],) if "const" in merged else ()),
        rules={key: merged[key] for key in merged if key not in ("properties", "$defs", "items", "$ref")},
        keys={name: _shape(child, definitions) for name, child in merged.get("properties", {}).items()},
        values=_shape(free, definitions) if isinstance(free, dict) else None,
        item=_shape(merged["items"], definitions) if isinstance(merged.get("items"), dict) else None,
    )
