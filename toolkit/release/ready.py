"""Waits for a token of the server that was started: of that very one, not of another on its port."""

from __future__ import annotations

from toolkit.service import ports
from toolkit.service.manager import ServiceManager
from toolkit.service.readiness import NotReadyError, wait_ready
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import Unit


def wait_for_token(manager: ServiceManager, unit: Unit, *, patient: bool) -> None:
    """Wait for a token of the unit's server.

    Args:
        manager: started it.
        unit: what was started.
        patient: fail only at the last end of the process, rather than at any.

    Raises:
        NotReadyError: the process ended, another one answers on its port, or the load timeout was over.
    """
    restarts = manager.status().restarts

    def ended() -> str:
        status = manager.status()
        if not status.active:
            return status.message
        if patient or (status.state == "running" and status.restarts == restarts):
            return ""
        return f"{status.exit_words()} before its first token"

    def answered() -> str:
        """The port was free before the start; another server may have taken it since."""
        pid = manager.status().pid
        if pid is None:
            return ended() or "a token came while the server did not run"
        other = ports.foreign_listener(unit.port, pid)
        if not other:
            return ""
        why = f"port {unit.port} on {unit.host} was taken by process {other}, which answers there"
        if patient:
            return why  # it may go away again
        raise NotReadyError(why, hint="stop what holds it, or set another service.port")

    key = stored_secrets(unit).get("api-key")
    wait_ready(unit.url, unit.load_timeout, ended=ended, answered=answered, api_key=key)
