"""YAML text as a tree of nodes that know their place in the file (YAML 1.2.2, by way of PyYAML's parser).

Only the parser's events are used: nothing is constructed, so no tag can run anything, and the depth and
the size of the tree are bounded while it grows. Which type a plain scalar has is left to the schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from toolkit.errors import Problem

MAX_BYTES = 128 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_EXPLANATIONS = (
    (
        "mapping values are not allowed",
        "a ': ' where no key can stand",
        "quote the value, correct the indentation, or put a ': ' after the key above",
    ),
    ("could not find expected ':'", "a key without ': ' after it", "write `key: value`"),
    ("expected <block end>", "an indentation or a line that does not fit the lines above it", None),
    ("expected ',' or", "a list or map in brackets is not closed", "close it with ] or }"),
    ("expected the node content", "a value is missing or its brackets are not closed", None),
    ("unexpected end of stream", "a quote that is not closed", None),
    ("expected a single document", "a second document", "keep one profile in a file"),
    ("unknown escape character", "an escape that YAML does not know", "use single quotes, or double the \\"),
)


KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written.

    Attributes:
        source: file name, or `--set`.
        line: line counted from 1; None where there is no file.
        column: column counted from 1.
    """

    source: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: str, *, key: str = "", hint: str | None = None) -> Problem:
        """A problem at this place."""
        return Problem(message, key=key, source=self.source, line=self.line, column=self.column, hint=hint)


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its place.

    Attributes:
        value: text of a scalar, a list of nodes, a dict of nodes, or a number, boolean or None that was
            never text.
        place: where the value begins.
        plain: a scalar written without quotes, whose type the schema decides.
        key_place: where its key begins, if it is a map's value.
        size: nodes in the tree, itself included.
        height: levels of nodes below it.
    """

    value: Any
    place: Place
    plain: bool = False
    key_place: Place | None = None
    size: int = 1
    height: int = 0


def format_path(path: KeyPath) -> str:
    """`service.environment.FOO` or `engine.extra_args[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class SyntaxProblem(Exception):  # noqa: N818 - a stop on the way to a ConfigError
    """Text that cannot be read further; carries the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class _Frame:
    place: Place
    anchor: str | None
    is_map: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    key: Node | None = None

    def close(self) -> Node:
        children = list(self.entries.values()) if self.is_map else self.items
        return Node(
            self.entries if self.is_map else self.items,
            self.place,
            size=1 + sum(child.size for child in children),
            height=1 + max((child.height for child in children), default=0),
        )


class _Builder:
    """Grows the tree event by event; `problems` holds what is wrong but does not stop the reading."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.root: Node | None = None
        self._frames: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}
        self._size = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        place = _place(self.source, event.start_mark)
        self._refuse_tag(getattr(event, "tag", None), place)
        if isinstance(event, yaml.DocumentStartEvent):
            self._start_document(place)
        elif isinstance(event, yaml.ScalarEvent):
            self._finish(Node(event.value, place, plain=event.style is None), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._resolve(str(event.anchor), place), place)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open(event, place)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            frame = self._frames.pop()
            self._finish(frame.close(), frame.anchor)

    def _start_document(self, place: Place) -> None:
        self._documents += 1
        if self._documents > 1:
            raise SyntaxProblem(place.problem("a second document begins here", hint="one profile a file"))

    def _refuse_tag(self, tag: str | None, place: Place) -> None:
        if tag is not None:
            name = tag.replace("tag:yaml.org,2002:", "!!")
            self._report(place, f"the tag {name} is not allowed: types follow the schema", hint="take it out")

    def _open(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent, place: Place) -> None:
        if len(self._frames) >= MAX_DEPTH:
            raise SyntaxProblem(place.problem(f"nested deeper than {MAX_DEPTH} levels"))
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._frames.append(_Frame(place, event.anchor, isinstance(event, yaml.MappingStartEvent)))

    def _resolve(self, anchor: str, place: Place) -> Node:
        node = self._anchors.get(anchor)
        if node is None:
            reason = "stands inside what it names" if anchor in self._anchors else "names no anchor above it"
            self._report(place, f"the alias *{anchor} {reason}")
            return Node(None, place)
        self._size += node.size - 1
        if len(self._frames) + node.height > MAX_DEPTH:
            raise SyntaxProblem(place.problem(f"nested deeper than {MAX_DEPTH} levels by an alias"))
        return node

    def _finish(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        self._add(node, node.place)

    def _add(self, node: Node, place: Place) -> None:
        self._size += 1
        if self._size > MAX_NODES:
            raise SyntaxProblem(place.problem(f"holds more than {MAX_NODES} values, aliases written out"))
        if not self._frames:
            self.root = node
        elif self._frames[-1].is_map:
            self._add_entry(self._frames[-1], node, place)
        else:
            self._frames[-1].items.append(node)

    def _add_entry(self, frame: _Frame, node: Node, place: Place) -> None:
        if frame.key is None:
            frame.key = replace(node, place=place)
            return
        key = frame.key
        if not isinstance(key.value, str):
            self._report(key.place, "a key must be text, not a list or a map")
        elif key.value == "<<" and key.plain:
            self._report(key.place, "merge keys are not supported", hint="write the keys out")
        elif key.value in frame.entries:
            first = frame.entries[key.value].key_place
            self._report(
                key.place, f"the key is written twice (first on line {first.line if first else '?'})"
            )
        else:
            frame.entries[key.value] = replace(node, key_place=key.place)
        frame.key = None

    def _report(self, place: Place, message: str, *, hint: str | None = None) -> None:
        self.problems.append(place.problem(message, key=format_path(self._path()), hint=hint))

    def _path(self) -> KeyPath:
        """The key path of what is read now."""
        path: list[str | int] = []
        for frame in self._frames:
            if not frame.is_map:
                path.append(len(frame.items))
            elif frame.key is not None and isinstance(frame.key.value, str):
                path.append(frame.key.value)
        return tuple(path)


def decode(raw: bytes, source: str) -> str:
    """The text of a profile's bytes: UTF-8, with or without a byte order mark.

    Raises:
        SyntaxProblem: too long, or not UTF-8.
    """
    if len(raw) > MAX_BYTES:
        raise SyntaxProblem(Place(source).problem(f"is larger than {MAX_BYTES // 1024} KiB"))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        head = raw[: error.start].decode("utf-8", "replace")
        hint = "save the file as UTF-8"
        raise SyntaxProblem(_end_of(head, source).problem("is not UTF-8 text", hint=hint)) from None


def compose(text: str, source: str) -> tuple[Node | None, list[Problem]]:
    """The tree of a YAML text with one document, and what is wrong in it without stopping the reading.

    Args:
        text: YAML text; see `decode`.
        source: file name, or `--set`, for the places.

    Returns:
        The root, None for an empty document, and the problems in the order of the text.

    Raises:
        SyntaxProblem: no YAML, characters that YAML forbids (1.2.2, production 1), or beyond the limits of
            depth and size.
    """
    _refuse_unprintable(text, source)
    builder = _Builder(source)
    loader: Any = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            builder.take(loader.get_event())
    except yaml.MarkedYAMLError as error:
        raise SyntaxProblem(_explain(error, text, source)) from None
    except (yaml.YAMLError, ValueError, OverflowError):
        place = Place(source, loader.line + 1, loader.column + 1)
        raise SyntaxProblem(place.problem("is no YAML: an unknown escape or directive")) from None
    finally:
        loader.dispose()
    return builder.root, builder.problems


def _refuse_unprintable(text: str, source: str) -> None:
    match = _UNPRINTABLE.search(text)
    if match is not None:
        name = "a NUL" if match[0] == "\0" else "a control character"
        message = f"holds {name} (U+{ord(match[0]):04X})"
        raise SyntaxProblem(_end_of(text[: match.start()], source).problem(message, hint="take it out"))


def _place(source: str, mark: Any) -> Place:
    return Place(source) if mark is None else Place(source, mark.line + 1, mark.column + 1)


def _end_of(text: str, source: str) -> Place:
    lines = text.replace("\r\n", "\n").split("\n")
    return Place(source, len(lines), len(lines[-1]) + 1)


def _explain(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    problem = error.problem or "no structure that YAML knows"
    unfinished = "end of stream" in problem or "<stream end>" in problem
    mark = error.context_mark if unfinished and error.context_mark is not None else error.problem_mark
    place = _place(source, mark)
    character = _character(text, mark)
    if character == "\t":
        return place.problem("is no YAML: a tab where only spaces may stand", hint="indent with spaces")
    if "cannot start any token" in problem:
        return place.problem(f"is no YAML: {character!r} cannot begin a value", hint="put it in quotes")
    for start, meaning, hint in _EXPLANATIONS:
        if start in problem:
            return place.problem(f"is no YAML: {meaning}", hint=hint)
    return place.problem(f"is no YAML: {problem}")


def _character(text: str, mark: yaml.Mark | None) -> str:
    return text[mark.index] if mark is not None and mark.index < len(text) else ""
