"""Changes to a profile's nodes: overlays merged onto it, and `key.path=value`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.errors import Problem
from toolkit.profile.nodes import KeyPath, Node, Place, SyntaxProblem, compose, format_path
from toolkit.profile.reading import unknown_key
from toolkit.profile.shape import Shape, is_secret, profile_shape

SET = Place("--set")

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")
_NULLS = ("", "~", "null", "Null", "NULL")
_FIXED = {("name",): "names the service", ("schema",): "belongs to the file"}


def merge(base: Node, overlay: Node) -> Node:
    """`base` with `overlay` on it: maps are merged key by key, anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(overlay.value, dict):
        return overlay
    merged = dict(base.value)
    for key, node in overlay.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return replace(base, value=merged)


def conflicts(overlays: Sequence[Node]) -> Iterator[tuple[KeyPath, Node, Node]]:
    """Keys that a later overlay sets to another value than an earlier one, with both nodes.

    A key whose whole map the later one replaces counts, too. Of several earlier ones the last is given, which
    is the one that would count without the later.
    """
    said: dict[KeyPath, Node] = {}
    for overlay in overlays:
        own = dict(_leaf_nodes(overlay))
        for key, node in own.items():
            for other in [path for path in said if path[: len(key)] == key or key[: len(path)] == path]:
                earlier = said.pop(other)
                if plain(earlier) != plain(node):
                    yield (other if len(other) > len(key) else key), earlier, node
        said |= own


def plain(node: Node) -> Any:
    """The value of a node as JSON-safe data, as it is written."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return None if node.plain and node.value in _NULLS else node.value


def _leaf_nodes(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    if isinstance(node.value, dict) and node.value:
        for key, child in node.value.items():
            yield from _leaf_nodes(child, (*path, key))
    elif path:
        yield path, node


def node_of(data: Any, place: Place) -> Node:
    """Nodes of JSON-safe data, all at one place."""
    if isinstance(data, Mapping):
        return Node({str(key): node_of(value, place) for key, value in data.items()}, place)
    if isinstance(data, (list, tuple)):
        return Node([node_of(value, place) for value in data], place)
    return Node(data, place)


def apply_sets(root: Node, sets: Sequence[str]) -> tuple[Node, list[Problem]]:
    """`root` with every `key.path=value` applied in order, and what is wrong with them.

    A value for a text key is taken byte for byte; anything else is read as YAML and replaces the whole
    value of the key. `null` unsets a key that may be unset.
    """
    problems: list[Problem] = []
    seen: set[KeyPath] = set()
    for text in sets:
        path, raw, problem = _split(text)
        if problem is None and path in seen:
            problem = SET.problem("is set twice", key=format_path(path), hint="keep one of the two")
        if problem is None:
            seen.add(path)
            node, problem = _value(path, raw)
            root = root if node is None else _put(root, path, node)
        if problem is not None:
            problems.append(problem)
    return root, problems


def _split(text: str) -> tuple[KeyPath, str, Problem | None]:
    key, equals, raw = text.partition("=")
    path: KeyPath = tuple(key.split("."))
    if not equals or not _KEY.fullmatch(key):
        problem = SET.problem(f"{key[:60]!r} is no assignment", hint="write key.path=value")
        return path, raw, problem
    if path in _FIXED:
        return path, raw, SET.problem(f"cannot be set: it {_FIXED[path]}", key=key, hint="change the file")
    return path, raw, None


def _value(path: KeyPath, raw: str) -> tuple[Node | None, Problem | None]:
    shape, problem = _find(path)
    if shape is None:
        return None, problem
    if shape.kind == "text" and not (shape.nullable and raw == "null"):
        return Node(raw, SET, key_place=SET), None
    try:
        node, problems = compose(raw, SET.source)
    except SyntaxProblem as stop:
        return None, replace(stop.problem, key=format_path(path), line=None, column=None)
    if problems:
        return None, replace(problems[0], key=format_path(path), line=None, column=None)
    if node is not None and (key := _told_command(node, shape, path, secret=is_secret(path))):
        # Whoever is on this machine sees arguments in proc(5), and whoever reads it, in the history.
        said = "is a command with arguments, which are no secret on a command line nor in the history"
        return None, SET.problem(said, key=format_path(key), hint="write it into the profile or an overlay")
    return _at_set(node) if node is not None else Node("", SET, plain=True, key_place=SET), None


def _told_command(node: Node, shape: Shape, path: KeyPath, *, secret: bool) -> KeyPath | None:
    """Where, at `path` or below, a command with arguments says how a secret is had."""
    secret = secret or shape.secret
    if isinstance(node.value, list):
        return path if secret and len(node.value) > 1 else None
    for name, child in node.value.items() if isinstance(node.value, dict) else ():
        below = shape.child(name)
        if below is not None and (found := _told_command(child, below, (*path, name), secret=secret)):
            return found
    return None


def _find(path: KeyPath) -> tuple[Shape | None, Problem | None]:
    shape = profile_shape()
    for depth, part in enumerate(path):
        below = shape.child(part)
        if below is None and shape.kind != "map":
            key = format_path(path[:depth])
            return None, SET.problem(f"has no keys: it takes {shape.allowed()}", key=key)
        if below is None:
            return None, unknown_key(path[: depth + 1], shape, SET)[0]
        shape = below
    return shape, None


def _at_set(node: Node) -> Node:
    """The same tree with every place at `--set`: a column within a value would tell nothing."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _at_set(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_at_set(child) for child in value]
    return replace(node, value=value, place=SET, key_place=SET)


def _put(root: Node, path: KeyPath, node: Node) -> Node:
    """`root` with `node` at `path`; what is no map on the way becomes one."""
    if not path:
        return node
    entries = dict(root.value) if isinstance(root.value, dict) else {}
    below = entries.get(str(path[0]), Node({}, SET, key_place=SET))
    entries[str(path[0])] = _put(below, path[1:], node)
    return replace(root, value=entries, plain=False)
