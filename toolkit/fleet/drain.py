"""Taking a host out of the load balancer around a restart, by commands of the inventory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from toolkit.errors import EXIT_DONE, ToolkitError
from toolkit.inventory.host import Host

_LIMIT = 600.0

# Called with a host's name and a message of its agent's kind.
TellHost = Callable[[str, dict[str, Any]], None]


def exit_code_of(value: Any) -> int:
    """Exit code of what `deploy`, `swap`, `rollback` and the like gave."""
    outcome = (value or {}).get("outcome")
    return EXIT_DONE if outcome is None else int(outcome["exit_code"])


def drained(host: Host, change: Callable[[], Any], serves: Callable[[], bool], tell: TellHost) -> Any:
    """Make a change with the host drained; it is put back if it serves afterwards, however the change went.

    Args:
        host: the host; its hooks run here, on the control machine, without a shell.
        change: makes the change and gives its result.
        serves: whether the service answers now.
        tell: called with each step.

    Raises:
        ToolkitError: a hook failed, or the change did; says so where the host stays drained.
    """
    _run(host, "drain", host.drain, tell)
    try:
        value = change()
    except ToolkitError as error:
        if _put_back(host, serves, tell):
            raise
        error.message += f" ({host.name} stays drained)"
        error.args = (error.message,)
        raise
    if not _put_back(host, serves, tell):
        tell(host.name, {"step": ["drained", "it stays drained, since it does not serve"]})
    return value


def undrained(host: Host, change: Callable[[], Any], serves: Callable[[], bool], tell: TellHost) -> Any:
    """Make a change that may begin the service, and put the host back if it serves afterwards.

    Arguments and errors as `drained`.
    """
    value = change()
    _put_back(host, serves, tell)
    return value


def _put_back(host: Host, serves: Callable[[], bool], tell: TellHost) -> bool:
    """Undrain a host that serves; whether it is in the load balancer now."""
    if host.drain is None and host.undrain is None:
        return True
    if not serves():
        return False
    _run(host, "undrain", host.undrain, tell)
    return True


def _run(host: Host, name: str, command: tuple[str, ...] | None, tell: TellHost) -> None:
    if command is None:
        return
    tell(host.name, {"step": [name, " ".join(command)]})
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(host, name, command, str(error)) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise _failed(host, name, command, f"ended with status {done.returncode}: {said}")


def _failed(host: Host, name: str, command: tuple[str, ...], reason: str) -> ToolkitError:
    before = "; nothing was changed there" if name == "drain" else "; it serves, but stays drained"
    return ToolkitError(
        f"{host.name}: ddtoolkit_{name}: {command[0]}: {reason}{before}",
        hint="mend the command in the inventory",
    )
