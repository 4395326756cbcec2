"""What DDTREE runs on: attention backends that take a tree mask, and server arguments it refuses.

The data, `capabilities.toml`, were found in SGLang 0.5.17. A backend without tree masks decodes as if the
tree were a chain and says nothing: the tokens are wrong while the acceptance length looks right. So what is
not known to work is refused before a model loads.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("capabilities.toml")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether an attention backend can verify trees, for each attention architecture ("MHA", "MLA").

    Attributes:
        architectures: those it can.
        reason: why not, for the others.
    """

    architectures: frozenset[str]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """An attribute of SGLang's `ServerArgs`, the values DDTREE takes, and why not others."""

    attribute: str
    allowed: tuple[Any, ...]
    reason: str

    def refusal(self, args: Any) -> str | None:
        """One line, or None where the value is allowed."""
        value = getattr(args, self.attribute)
        if value in self.allowed:
            return None
        flag = "--" + self.attribute.replace("_", "-")
        allowed = " or ".join("unset" if item is None else str(item) for item in self.allowed)
        return f"{flag} is {value!r:.60}, DDTREE takes {allowed}: {self.reason}"


def _read() -> tuple[dict[str, Capability], list[Rule]]:
    with _FILE.open("rb") as file:
        data = tomllib.load(file)
    unset = {"unset": None}  # TOML has no null
    backends = {
        name: Capability(frozenset(entry["architectures"]), entry.get("reason", ""))
        for name, entry in data["backend"].items()
    }
    rules = [
        Rule(name, tuple(unset.get(value, value) for value in entry["allowed"]), entry["reason"])
        for name, entry in data["argument"].items()
    ]
    return backends, rules


BACKENDS, RULES = _read()


@dataclass(frozen=True, slots=True)
class Model:
    """What of the target decides whether trees can be verified.

    Attributes:
        architecture: "MHA" or "MLA".
        sliding_window: tokens, or None.
        recurrent: whether it has Mamba, GDN or other state-space layers.
    """

    architecture: str
    sliding_window: int | None
    recurrent: bool


def refusals(args: Any, backends: tuple[str, str], model: Model) -> list[str]:
    """Everything that stands against serving DDTREE, one line each.

    Args:
        args: SGLang's resolved server arguments.
        backends: attention backends of prefill and decode.
        model: the target.
    """
    found = [line for rule in RULES if (line := rule.refusal(args)) is not None]
    if backends[0] != backends[1]:
        found.append(
            f"attention backends differ, {backends[0]} for prefill, {backends[1]} for decode: set one"
        )
    for backend in dict.fromkeys(backends):
        capability = BACKENDS.get(backend, Capability(frozenset(), "it is not known to take tree masks"))
        if model.architecture not in capability.architectures:
            able = [name for name, other in BACKENDS.items() if model.architecture in other.architectures]
            found.append(
                f"attention backend {backend} cannot verify trees with {model.architecture}: "
                f"{capability.reason}. Set --attention-backend {' or '.join(able)}"
            )
    if model.sliding_window is not None:
        found.append(
            f"the target has a sliding window of {model.sliding_window}: its tree masks are not proven"
        )
    if model.recurrent:
        found.append("the target has recurrent layers, whose state cannot follow a tree")
    return found
