"""Runs a transaction detached: `python -m toolkit.release.run FOLDER [--recover [--stopping]]`.

Two processes: a guard, which holds the transaction's flock, and a worker, which does the steps. A worker that
dies is replaced by one that recovers from the journal; a guard that dies leaves the worker working. Should
both die, the next command recovers.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import LockedError, ToolkitError
from toolkit.files import PRIVATE_FILE
from toolkit.release.host import read_host
from toolkit.release.journal import read_journal
from toolkit.release.request import read_request
from toolkit.release.transaction import Transaction
from toolkit.service.detach import detach

CRASH_FILE = "crash.txt"
_ATTEMPTS = 3


def concluded(folder: Path) -> bool:
    """Whether the transaction in `folder` has an outcome."""
    return any(event.step == "outcome" for event in read_journal(folder))


def work(folder: Path, *, recover: bool, stopping: bool = False) -> None:
    """Drive the transaction in `folder` to its outcome, in this process."""
    transaction = Transaction(read_host(folder), read_request(folder), folder, stopping=stopping)
    if recover:
        transaction.recover()
    else:
        transaction.run()


def _guard(folder: Path, begun: Callable[[], None], *, recover: bool, stopping: bool) -> None:
    """Body of the detached process."""
    host = read_host(folder)
    read_request(folder)
    if host.lock.hold_transaction() is None:
        raise LockedError(f"{host.name}: a transaction is running already")
    begun()
    for attempt in range(_ATTEMPTS):
        worker = os.fork()
        if worker == 0:
            os._exit(_work_or_crash(folder, recover=recover or attempt > 0, stopping=stopping))
        os.waitpid(worker, 0)
        if concluded(folder):
            return


def _work_or_crash(folder: Path, *, recover: bool, stopping: bool) -> int:
    try:
        work(folder, recover=recover, stopping=stopping)
    except Exception:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        fd = os.open(folder / CRASH_FILE, flags, PRIVATE_FILE)
        os.write(fd, traceback.format_exc().encode())
        return 1
    return 0


def main() -> int:
    """Start the detached process; exit status 0 once it holds the flock."""
    parser = argparse.ArgumentParser(prog="toolkit.release.run")
    parser.add_argument("folder", type=Path, help="folder with the request and the journal")
    parser.add_argument("--recover", action="store_true", help="go on from the journal of a dead process")
    parser.add_argument("--stopping", action="store_true", help="start nothing: it is stopped next")
    options = parser.parse_args()
    folder = options.folder.absolute()
    try:
        why = detach(lambda begun: _guard(folder, begun, recover=options.recover, stopping=options.stopping))
    except ToolkitError as error:
        why = error.message
    if why:
        sys.stderr.write(why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
