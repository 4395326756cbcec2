"""`python -m toolkit.life.begun look|purge`: a host on which a first deploy was begun, without a release yet.

No agent runs there yet, so this runs under the host's own Python with nothing installed. `look` tells whether
there is a release after all, as where only the interpreter is damaged; `purge` takes back all that
provisioning made. The last line is an object with `changed`, and `removed` and `kept`, a line each, or with
`error` and `hint`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pwd
import subprocess
import sys
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.layout import TOOL, Layout
from toolkit.life.removing import remove_path
from toolkit.life.system import give_back
from toolkit.release.claims import claims
from toolkit.service.systemctl import systemctl

MODULE = "toolkit.life.begun"
_JOURNAL = Path("/etc/systemd/journald.conf.d")
_LIMIT = 60.0


def releases(layout: Layout) -> list[Path]:
    """Releases of every service below a layout."""
    return sorted(layout.services.glob("*/releases/*"))


def purge(layout: Layout) -> tuple[list[str], list[str]]:
    """Take back what provisioning made; checkpoints stay, as with `uninstall --purge` of a service.

    Returns:
        What was removed and what was kept and why, a line each.

    Raises:
        ToolkitError: a release is there, or something cannot be removed.
    """
    if found := releases(layout):
        raise ToolkitError(
            f"{found[0]} is a release of a service; nothing was removed",
            hint="deploy profile NAME mends what the service runs under; uninstall it then",
        )
    if begun := claims(layout):
        raise ToolkitError(
            f"{', '.join(begun)} is under way; nothing was removed",
            hint="run the same command again once it has ended",
        )
    removed: list[str] = []
    kept: list[str] = []
    system = layout.root is None
    if system:
        _end_installations(removed)
        for path in sorted(_JOURNAL.glob("ddtoolkit-*.conf")):
            remove_path(path, removed.append)
            systemctl("restart", "systemd-journald.service")
        with contextlib.suppress(OSError):  # it holds others' settings, or is not there
            _JOURNAL.rmdir()
        gone, left = give_back(layout.provisioned)
        removed, kept = [*removed, *gone], [*kept, *left]
    folders = (layout.services, layout.environments, layout.wheels, layout.logs, layout.caches, layout.state)
    for path in folders:
        remove_path(path, removed.append)
    if layout.models.is_dir() and any(layout.models.iterdir()):
        kept.append(f"{layout.models}: checkpoints")
    elif layout.models.is_dir():
        remove_path(layout.models, removed.append)
    if system:
        remove_path(Path(TOOL), removed.append)
        for path in (layout.models.parent, Path(TOOL).parent):
            with contextlib.suppress(OSError):  # something else is in it
                path.rmdir()
        _remove_users(layout, removed, kept)
    return removed, kept


def _end_installations(removed: list[str]) -> None:
    """Libraries are installed on, whoever began it and went away."""
    names = ("ddtoolkit-lib-*.service", "--plain", "--no-legend", "--all")
    for line in systemctl("list-units", *names).stdout.splitlines():
        unit = line.split()[0]
        systemctl("stop", unit, limit=_LIMIT)
        removed.append(f"{unit}, which was at work")


def _remove_users(layout: Layout, removed: list[str], kept: list[str]) -> None:
    """Remove the system user that provisioning made, told by its home."""
    for entry in [item for item in pwd.getpwall() if Path(item.pw_dir) == layout.caches]:
        command = ["/usr/sbin/userdel", entry.pw_name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        if ended.returncode:
            kept.append(f"user {entry.pw_name}: {ended.stderr.strip()}")
        else:
            removed.append(f"user {entry.pw_name}")


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog=MODULE, allow_abbrev=False)
    parser.add_argument("verb", choices=("look", "purge"))
    args = parser.parse_args(arguments)
    layout = Layout()
    if args.verb == "look":
        print(json.dumps({"changed": False, "released": bool(releases(layout))}), flush=True)
        return 0
    try:
        removed, kept = purge(layout)
    except ToolkitError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return 1
    print(json.dumps({"changed": bool(removed), "removed": removed, "kept": kept}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
