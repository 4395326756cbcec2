"""Keeping swapped values: writing `key.path=value` into an overlay file."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.resolver import Resolver

from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import replace_file
from toolkit.profile.assignments import SET, apply_sets
from toolkit.profile.loading import load_overlay
from toolkit.profile.nodes import KeyPath, Node, Place, format_path
from toolkit.profile.reading import problems_of_what_is_written, read

_TEXT = "tag:yaml.org,2002:str"
_RESOLVER: Any = Resolver()


@dataclass(frozen=True, slots=True)
class Overlay:
    """An overlay file with values to be added, read and checked before anything is changed.

    Attributes:
        path: the file; it need not exist yet.
        sets: `key.path=value` to be added.
        text: what it will hold.
    """

    path: Path
    sets: tuple[str, ...]
    text: str

    def write(self) -> None:
        """Write it whole or not at all, with what others wrote into it meanwhile.

        Raises:
            ToolkitError: the disk is full, the folder cannot be written, or the file has become one that
                cannot be added to.
        """
        hint = "write the values into an overlay by hand"
        try:
            text = overlay_with(self.path, self.sets).text
        except ConfigError as error:
            raise ToolkitError(f"{error.message}; the swap itself is done", hint=hint) from error
        place = self.path.resolve()  # a link stays one
        try:
            mode, owner = 0o644, None
            if place.exists():
                status = place.stat()
                mode, owner = stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid)
            replace_file(place, text.encode(), mode, owner=owner)
        except OSError as error:
            raise ToolkitError(
                f"{self.path}: cannot be written: {error.strerror}; the swap itself is done", hint=hint
            ) from error


def overlay_with(path: Path, sets: Sequence[str]) -> Overlay:
    """The overlay in `path`, or an empty one, with `key.path=value` applied.

    Raises:
        ConfigError: an assignment is wrong; the file is no overlay that a deploy would take, cannot be
            written, or has comments, which rewriting it would lose.
    """
    _require_place(path)
    root, problems = apply_sets(_read(path), sets)
    for text in sets if not problems else ():
        keys: KeyPath = tuple(text.partition("=")[0].split("."))
        if isinstance(_at(root, keys).value, dict):
            words = "cannot be saved: an overlay is merged key by key, and would not replace the whole map"
            hint = f"set its keys one by one: --set {format_path(keys)}.KEY=VALUE"
            problems.append(SET.problem(words, key=format_path(keys), hint=hint))
    if problems:
        raise ConfigError(problems)
    text = yaml.serialize(_yaml(root), Dumper=yaml.SafeDumper, allow_unicode=True)
    return Overlay(path, tuple(sets), str(text))


def _require_place(path: Path) -> None:
    place = path.resolve()
    if not place.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {place.parent}", hint="make it, or save elsewhere")
    if place.exists() and not place.is_file():
        raise ConfigError(f"{path}: is no file", hint="save elsewhere")
    for needed in (place.parent, *([place] if place.exists() else [])):
        if not os.access(needed, os.W_OK):
            raise ConfigError(f"{path}: {needed} cannot be written", hint="save elsewhere")


def _read(path: Path) -> Node:
    if not path.exists() or not path.read_bytes().strip():
        return Node({}, Place(str(path)))
    root = load_overlay(path)
    _refuse_comments(path)
    if wrong := problems_of_what_is_written(read(root)):
        raise ConfigError(wrong)
    return root


def _refuse_comments(path: Path) -> None:
    """Comments are what lies between the tokens, or behind the mark of a block of text."""
    text = path.read_text(encoding="utf-8-sig")
    end = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        begin = token.start_mark.index
        between = text[end:begin]
        if isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"):
            between = f"{between}{text[begin : token.end_mark.index].partition(chr(10))[0]}"
        if "#" in between:
            line = text[: end + between.index("#")].count("\n") + 1
            raise ConfigError(
                f"{path}:{line}: has comments, which saving would lose",
                hint="save elsewhere, or write the values there by hand",
            )
        end = max(end, token.end_mark.index)


def _at(root: Node, keys: KeyPath) -> Node:
    for key in keys:
        root = root.value[key]
    return root


def _yaml(node: Node) -> Any:
    """Nodes for the writer: a plain scalar stays as it was written, since the schema says what it is."""
    if isinstance(node.value, dict):
        pairs = [(yaml.ScalarNode(_TEXT, key), _yaml(child)) for key, child in node.value.items()]
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=not pairs)
    if isinstance(node.value, list):
        items = [_yaml(child) for child in node.value]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=not items)
    value = "null" if node.value is None or (node.plain and not node.value) else str(node.value)
    plain = node.plain or node.value is None
    tag = _RESOLVER.resolve(yaml.ScalarNode, value, (True, False)) if plain else _TEXT
    return yaml.ScalarNode(tag, value)
