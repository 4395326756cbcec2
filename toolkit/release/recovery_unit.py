"""The unit that has interrupted transactions finished or reversed after a reboot."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from toolkit.service import transient, unit_files
from toolkit.service.systemd import RECOVER_UNIT, quote, quote_argument

_MODULE = "toolkit.release.boot"
_OWN = re.compile(r'(?<=ExecStart=)"[^"]*"|^Environment=.*\n', re.MULTILINE)  # a deploy's own


def install_recovery() -> None:
    """Install and enable it, with the interpreter and the code that run now; only what differs is written.

    Raises:
        ToolkitError: systemd refuses, or this is not root.
    """
    unit_files.install(RECOVER_UNIT, _text(), at_boot=True)


def recovery_fault() -> str | None:
    """What is wrong with the installed unit; None where it would do its work.

    It keeps the code of the deploy that installed it, which need not be the code that runs now.
    """
    text = unit_files.installed(RECOVER_UNIT)
    if text is None:
        return "is missing: a change that a reboot interrupts would stay so"
    if not unit_files.enabled(RECOVER_UNIT):
        return "is not run at boot: a change that a reboot interrupts would stay so"
    found, wanted = (_OWN.sub("", item) for item in (text, _text()))
    if found != wanted:
        return "is not the unit that a deploy installs"
    code = re.search(r'"PYTHONPATH=([^"]*)"', text)
    if code is not None and not Path(code[1]).is_dir():
        return f"runs code that is gone: {code[1]}"
    return None


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
