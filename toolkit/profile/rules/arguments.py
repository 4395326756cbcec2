"""Rules of `engine.extra_args`: nothing there may contradict a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.profile.nodes import KeyPath
from toolkit.profile.rules.finding import Finding, error
from toolkit.profile.rules.tables import OWNED_FLAGS, TREE_ARGUMENTS
from toolkit.profile.schema import Profile

_SHORTEST_ABBREVIATION = len("--spec")


def argument_rules(profile: Profile) -> Iterator[Finding]:
    """Arguments that the toolkit writes itself, and those that do not go with a tree."""
    arguments = profile.engine.extra_args
    for index, argument in enumerate(arguments):
        flag = argument.partition("=")[0]
        key = _owner(flag)
        path: KeyPath = ("engine", "extra_args", index)
        if key is not None:
            yield error(f"{flag} is written from {key}; two values would contradict", path, hint=f"set {key}")
        elif flag in TREE_ARGUMENTS and profile.speculative.algorithm == "DDTREE":
            right, reason = TREE_ARGUMENTS[flag]
            if option(arguments, flag) not in right:
                yield error(f"{flag} does not go with DDTREE: {reason}", path, "speculative.algorithm")
    yield from _width(profile)


def option(arguments: Sequence[str], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value`, the last one given; None without one."""
    value = None
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name == flag:
            value = inline if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return value


def _owner(flag: str) -> str | None:
    """The key that `flag` is written from; argparse also takes its beginning, which counts too."""
    if flag in OWNED_FLAGS or len(flag) < _SHORTEST_ABBREVIATION:
        return OWNED_FLAGS.get(flag)
    if not flag.startswith("--") or flag in TREE_ARGUMENTS:
        return None
    return next((key for name, key in OWNED_FLAGS.items() if name.startswith(flag)), None)


def _width(profile: Profile) -> Iterator[Finding]:
    flag, width = "--speculative-num-draft-tokens", profile.speculative.budget + 1
    given = option(profile.engine.extra_args, flag)
    if given is not None and profile.speculative.algorithm == "DDTREE" and given != str(width):
        yield error(
            f"{flag} {given} is not the verify width, budget + 1 = {width}: graphs would not fit",
            "engine.extra_args",
            "speculative.budget",
            "speculative.algorithm",
            hint="take it out",
        )
