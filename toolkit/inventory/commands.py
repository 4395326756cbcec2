"""Next steps as they are given from the control machine, with the inventory and the host that they are about.

What a host says names its commands as they are given there: `ddtoolkit status NAME`. Whoever reads it here
gets a line that can be pasted: `ddtoolkit status NAME -i FILE --limit HOST`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from toolkit.errors import ConfigError, ToolkitError
from toolkit.inventory.host import Host

# Commands that take `-i`; `hosts trust` names its host itself.
_COMMAND = re.compile(
    r"(ddtoolkit (?:deploy profile|lock (?:show|release)|hosts (?:list|prepare|trust)"
    r"|models (?:list|add|verify|rm)"
    r"|plan|render|status|logs|start|stop|restart|swap|rollback|history|test|drift|doctor|upgrade|prune|uninstall)"
    r"(?![\w-]))"
)
_PLACEHOLDER = re.compile(r"-i INVENTORY(?: --limit \S+)?")
# What a host answers with that people read as a next step, by its key.
_TOLD = frozenset({"hint", "fix", "warnings", "by_hand"})


def options(hosts: Sequence[Host]) -> str:
    """`-i FILE --limit HOST` of these hosts; "" where no inventory named them."""
    inventory = hosts[0].inventory if hosts else ()
    if not inventory:
        return ""
    names = ",".join(host.name for host in hosts)
    return shlex.join([*(word for path in inventory for word in ("-i", str(path))), "--limit", names])


def command(hosts: Sequence[Host], words: str) -> str:
    """A command about hosts.

    Args:
        hosts: what it is about.
        words: the command without `ddtoolkit`, such as `status NAME`.
    """
    return " ".join(filter(None, ["ddtoolkit", words, options(hosts)]))


def pasteable(text: str, host: Host) -> str:
    """Text of a host, or about it, whose commands name the inventory and the host."""
    if not host.inventory:
        return text
    first, *parts = _COMMAND.split(text)
    return first + "".join(
        _with_options(words, rest, host) for words, rest in zip(parts[::2], parts[1::2], strict=True)
    )


def _with_options(words: str, rest: str, host: Host) -> str:
    """One command, and what follows it up to the next one."""
    about = options([host])
    if words == "ddtoolkit hosts trust":
        about = about.partition(" --limit ")[0]
    if len(host.profiles) == 1:
        rest = re.sub(r"^ NAME(?![\w-])", f" {host.profiles[0]}", rest)
    if _PLACEHOLDER.search(rest):
        return words + _PLACEHOLDER.sub(lambda _: about, rest, count=1)
    if about in rest:
        return words + rest
    names = "|".join(map(re.escape, ("NAME", *host.profiles)))
    service = re.match(rf" (?:{names})(?![\w/-]|\.\w)", rest)  # not the start of a file's name
    at = 0 if service is None else service.end()
    return f"{words}{rest[:at]} {about}{rest[at:]}"


def told(value: Any, host: Host) -> Any:
    """What a host answered, with its next steps made pasteable; other values are left as they are."""
    if isinstance(value, dict):
        return {key: _each(item, host) if key in _TOLD else told(item, host) for key, item in value.items()}
    if isinstance(value, list):
        return [told(item, host) for item in value]
    return value


def _each(value: Any, host: Host) -> Any:
    if isinstance(value, str):
        return pasteable(value, host)
    if isinstance(value, list):
        return [pasteable(item, host) if isinstance(item, str) else item for item in value]
    return value


@contextmanager
def telling(host: Host) -> Iterator[None]:
    """Let the body's errors about a host have next steps that can be pasted.

    Raises:
        ToolkitError: what the body raised.
    """
    try:
        yield
    except ToolkitError as error:
        rewrite(error, lambda text: pasteable(text, host))
        raise


def rewrite(error: ToolkitError, change: Callable[[str], str]) -> None:
    """Change an error's message and next steps in place."""
    error.message = change(error.message)
    error.args = (error.message,)
    error.hint = None if error.hint is None else change(error.hint)
    if isinstance(error, ConfigError):
        error.problems = [
            replace(item, hint=None if item.hint is None else change(item.hint)) for item in error.problems
        ]
