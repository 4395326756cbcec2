"""What control machine and agent say to each other: one JSON object a line, in both directions.

To the agent: `{"op": NAME, "args": {...}}`. Back, while it works: `{"step": [name, message]}`,
`{"line": text}`, `{"event": {...}}`; then `{"result": ...}` or `{"error": {...}}`. Both sides send
`{"beat": n}` every few seconds, whatever else they do: after a long silence each takes the other for gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit import errors
from toolkit.errors import ConfigError, Problem, ToolkitError

BEAT = 5.0
# An agent holds locks: a control machine that is cut off silently must not keep them until TCP gives up.
PATIENCE = 60.0
MAX_LINE = 64 << 20
# What the agent's interpreter must have.
MODULES = ("pydantic", "yaml", "httpx")


def error_to_json(error: ToolkitError) -> dict[str, Any]:
    """An error for the other side."""
    problems = error.problems if isinstance(error, ConfigError) else []
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "problems": [
            {
                "message": item.message,
                "key": item.key,
                "source": item.source,
                "line": item.line,
                "column": item.column,
                "hint": item.hint,
            }
            for item in problems
        ],
    }


def error_from_json(value: Mapping[str, Any], host: str) -> ToolkitError:
    """The error that the other side met, with the host's name before its message."""
    kind = getattr(errors, str(value.get("kind")), ToolkitError)
    if not (isinstance(kind, type) and issubclass(kind, ToolkitError)):
        kind = ToolkitError
    hint = value.get("hint")
    message = str(value.get("message"))
    if kind is ConfigError:
        problems = [Problem(**item) for item in value.get("problems", ())]
        named = [
            Problem(f"{host}: {item.message}" if not (item.key or item.source) else item.message,
                    item.key, item.source, item.line, item.column, item.hint)
            for item in problems
        ]  # fmt: skip
        return ConfigError(named or f"{host}: {message}", hint=hint)
    return kind(message if message.startswith(f"{host}: ") else f"{host}: {message}", hint=hint)
