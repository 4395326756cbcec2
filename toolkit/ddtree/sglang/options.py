"""What DDTREE was asked to do: its flags, the environment that carries them, and limits of requests.

SGLang's `ServerArgs` has no room for a plugin's values, so the launcher leaves them in one environment
variable, which the scheduler processes that it starts inherit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from toolkit.ddtree.types import EngineConfig, Expansion, TreeLimits

ALGORITHM = "DDTREE"
ENVIRONMENT = "SGLANG_DDTREE"
"""Environment variable that holds the options as a JSON object, such as {"budget": 32, "topk_cap": 8}."""

_MOST = 1024
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_DEFAULT: TreeLimits = _DEFAULTS["limits"]

_FLAG = "speculative_ddtree_"
_DEBUG_BYTES = 16 << 20
_SMALLEST_DEBUG = 4096
_LIMITS = ("budget", "topk_cap", "expansion")
_OF_SERVER = ("attention", "debug_file", "debug_file_bytes", "check_prefix")


class Attention(StrEnum):
    """Whose kernel verifies trees, where SGLang's Triton backend serves the target."""

    SPLIT = "split"
    """DDTREE's own: cuts each prefix into parts that run side by side."""
    BACKEND = "backend"
    """The backend's."""


class OptionError(ValueError):
    """An option or a request's limit that DDTREE refuses; the message is one line."""


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The server's own tree limits, the upper bound of each request's.

    Attributes:
        budget: tree nodes without the root; the verify width is budget + 1.
        topk_cap: candidates that a draft slot offers.
        expansion: the tree policy.
        attention: whose kernel verifies trees; None: DDTREE's own on a GPU, the backend's where kernels are
            interpreted.
        debug_file: where each verify step's debug line goes; None writes none.
        debug_file_bytes: size at which that file is rotated.
        check_prefix: what the ids of the server's own self-check requests begin with; empty for none.
    """

    budget: int = _DEFAULT.budget
    topk_cap: int = _DEFAULT.topk_cap
    expansion: Expansion = _DEFAULT.expansion
    attention: Attention | None = None
    debug_file: str | None = None
    debug_file_bytes: int = _DEBUG_BYTES
    check_prefix: str = ""

    @property
    def width(self) -> int:
        """Rows a verify step runs for each request, the root included."""
        return self.budget + 1

    @property
    def limits(self) -> TreeLimits:
        """The same as the engine's limits."""
        return TreeLimits(self.budget, self.topk_cap, self.expansion)

    @classmethod
    def parse(cls, values: Any, source: str) -> TreeOptions:
        """Check a mapping of options; absent ones keep their defaults.

        Args:
            values: what was given.
            source: where it was given, for the message.

        Raises:
            OptionError: an unknown key, or a value out of range.
        """
        return _merge(cls(), values, source, _MOST, _MOST, (*_LIMITS, *_OF_SERVER))

    @classmethod
    def from_environment(cls) -> TreeOptions:
        """The options that the launcher left, or the defaults.

        Raises:
            OptionError: the variable does not hold them.
        """
        text = os.environ.get(ENVIRONMENT)
        if text is None:
            return cls()
        try:
            values = json.loads(text)
        except ValueError:
            raise OptionError(f"{ENVIRONMENT} holds no JSON: {text[:80]!r}") from None
        return cls.parse(values, ENVIRONMENT)

    def to_environment(self) -> None:
        """Leave the options to the processes that this one starts."""
        os.environ[ENVIRONMENT] = json.dumps(asdict(self))

    def request_limits(self, custom_params: Any) -> TreeLimits:
        """The limits of one request: its `custom_params["ddtree"]`, and for the rest the server's own.

        Raises:
            OptionError: an unknown key, a value out of range or above the server's own, or the policy
                `transition` where the server's own is another.
        """
        asked = custom_params.get("ddtree") if isinstance(custom_params, Mapping) else None
        if asked is None:
            return self.limits
        source = "custom_params.ddtree"
        limits = _merge(self, asked, source, self.budget, self.topk_cap, _LIMITS).limits
        if limits.expansion is Expansion.TRANSITION and self.expansion is not Expansion.TRANSITION:
            # Candidates are re-scored inside the drafter's graph, for the whole batch or for nobody.
            raise OptionError(
                f"{source}.expansion is transition, which this server does not offer: it was started without "
                "--speculative-ddtree-expansion transition"
            )
        return limits


def _merge(
    base: TreeOptions, values: Any, source: str, most_nodes: int, most_ranks: int, known: tuple[str, ...]
) -> TreeOptions:
    if not isinstance(values, Mapping):
        raise OptionError(f"{source} is {values!r:.80}; give an object")
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{source}.{key}"
        if key not in known:
            raise OptionError(f"{name} is not known; there are {', '.join(known[:-1])} and {known[-1]}")
        if key == "budget":
            given[key] = _integer(value, name, 1, most_nodes)
        elif key == "topk_cap":
            given[key] = _integer(value, name, 1, most_ranks)
        elif key == "expansion":
            given[key] = _one_of(Expansion, value, name)
        elif key == "attention":
            given[key] = None if value is None else _one_of(Attention, value, name)
        elif key in ("debug_file", "check_prefix"):
            given[key] = _text(value, name)
        else:
            given[key] = _integer(value, name, _SMALLEST_DEBUG, 1 << 40)
    return replace(base, **given)


def _integer(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"{name} is {value!r:.40}; give an integer from {least} to {most}")
    return value


def _text(value: Any, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise OptionError(f"{name} is {value!r:.40}; give a text")
    return value


_Choice = TypeVar("_Choice", bound=StrEnum)


def _one_of(kind: type[_Choice], value: Any, name: str) -> _Choice:
    if value not in list(kind):
        raise OptionError(f"{name} is {value!r:.40}; choose from {', '.join(kind)}")
    return kind(value)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add DDTREE's flags to SGLang's parser."""
    group = parser.add_argument_group("DDTREE speculative decoding")
    group.add_argument(
        "--speculative-ddtree-budget", type=int, metavar="N",
        help=f"tree nodes without the root; the verify width is N + 1 (default: {_DEFAULT.budget})",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-topk-cap", type=int, metavar="N",
        help=f"candidates that a draft slot offers (default: {_DEFAULT.topk_cap})",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-expansion", choices=[str(item) for item in Expansion],
        help=f"tree policy (default: {_DEFAULT.expansion})",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-attention", choices=[str(item) for item in Attention],
        help="whose kernel verifies trees on the Triton backend: DDTREE's own, which cuts prefixes into "
        f"parts, or the backend's (default: {Attention.SPLIT}; on a CPU {Attention.BACKEND})",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-debug-metrics", action="store_true",
        help="write one JSON object a verify step and request to the debug file",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-debug-file", metavar="FILE",
        help="where they go; rotated, mode 0640, holds no tokens",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ddtree-debug-file-bytes", type=int, metavar="N",
        help=f"size at which the debug file is rotated (default: {_DEBUG_BYTES})",
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> TreeOptions:
    """The options of a command line; those not given come from the environment, then the defaults.

    Raises:
        OptionError: a value is out of range, or a flag is given without DDTREE.
    """
    names = [field.name for field in fields(TreeOptions)]
    given = {name: getattr(args, _FLAG + name, None) for name in (*names, "debug_metrics")}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if given and not selects(args.speculative_algorithm):
        flags = ", ".join(f"--{(_FLAG + name).replace('_', '-')}" for name in given)
        raise OptionError(f"{flags} needs --speculative-algorithm DDTREE, not {args.speculative_algorithm}")
    if not given.pop("debug_metrics", False):
        given.pop("debug_file", None)
    elif "debug_file" not in given:
        raise OptionError("--speculative-ddtree-debug-metrics needs --speculative-ddtree-debug-file FILE")
    known = (*_LIMITS, *_OF_SERVER)
    return _merge(TreeOptions.from_environment(), given, "--speculative-ddtree", _MOST, _MOST, known)


def selects(algorithm: str | None) -> bool:
    """Whether an algorithm's name is DDTREE's; SGLang takes names in any case."""
    return algorithm is not None and algorithm.upper() == ALGORITHM
