"""Resolved profiles for people, and the schema for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.profile.loading import Origin, ResolvedProfile
from toolkit.profile.nodes import KeyPath, format_path
from toolkit.profile.schema import Profile

_SAFE_WORD = re.compile(r"[A-Za-z_/~][A-Za-z0-9_/~.-]*|[0-9]+[A-Za-z]+")
_AMBIGUOUS = re.compile(r"(?i:true|false|null|~|y|n|yes|no|on|off)")
_WIDEST = 60


def resolved_text(resolved: ResolvedProfile) -> str:
    """The resolved profile as YAML that loads to the same profile, each value's origin as its comment.

    Secrets are references and stay so.
    """
    lines = list(_lines(resolved.data, resolved.origins, ()))
    width = min(max(len(text) for text, _ in lines), _WIDEST)
    return "".join(
        f"{text:<{width}}  # {_comment(origin)}\n" if origin else f"{text}\n" for text, origin in lines
    )


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a profile file, for editors and other tools."""
    schema = Profile.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ddtoolkit profile", **schema}


def yaml_scalar(value: Any) -> str:
    """One-line YAML of a JSON-safe value; reads the same under YAML 1.1 and 1.2."""
    if isinstance(value, str) and _SAFE_WORD.fullmatch(value) and not _AMBIGUOUS.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _comment(origin: Origin) -> str:
    return "".join(character if character.isprintable() else "?" for character in str(origin))


def _lines(
    data: Mapping[str, Any], origins: Mapping[str, Origin], path: KeyPath
) -> Iterator[tuple[str, Origin | None]]:
    indent = "  " * len(path)
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", None
            yield from _lines(value, origins, below)
        else:
            yield f"{indent}{key}: {yaml_scalar(value)}", origins.get(format_path(below))
