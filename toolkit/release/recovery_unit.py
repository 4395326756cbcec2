"""The unit that has interrupted transactions finished or reversed after a reboot."""

from __future__ import annotations

import sys

from toolkit.service import transient, unit_files
from toolkit.service.systemd import RECOVER_UNIT, quote, quote_argument

_MODULE = "toolkit.release.boot"


def install_recovery() -> None:
    """Install and enable it, with the interpreter and the code that run now; only what differs is written.

    Raises:
        ToolkitError: systemd refuses, or this is not root.
    """
    unit_files.install(RECOVER_UNIT, _text())
    unit_files.enable(RECOVER_UNIT)


def _text() -> str:
    program = " ".join(map(quote_argument, (sys.executable, "-P", "-m", _MODULE)))
    environment = transient.python_environment().items()
    lines = [
        "[Unit]",
        "Description=ddtoolkit: finish or reverse what a reboot interrupted",
        "[Service]",
        "Type=oneshot",
        f"ExecStart={program}",
        *(f"Environment={quote(f'{name}={value}')}" for name, value in environment),
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"
