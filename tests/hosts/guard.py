"""Removes what a run of test hosts made, however that run ended.

    python guard.py FOLDER CGROUP

It waits for the end of standard input, whose other end the run holds, then ends every process in the
control group and removes both. The run's folder stays locked until then, so a run that was ended
together with its guard is told apart and swept by the next one.
"""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

PREFIX = "ddtoolkit-hosts-"
MARK = "cgroup"
LIMIT = 10.0


def cgroup_root() -> Path | None:
    """Where the cgroup2 hierarchy is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    return None


def remove_cgroup(cgroup: Path) -> None:
    """End every process in a control group and remove it with those below it."""
    if not cgroup.exists():
        return
    deadline = time.monotonic() + LIMIT
    (cgroup / "cgroup.kill").write_text("1")
    while "populated 1" in (cgroup / "cgroup.events").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    for folder, _, _ in os.walk(cgroup, topdown=False):
        _rmdir(Path(folder), deadline)


def _rmdir(cgroup: Path, deadline: float) -> None:
    """Remove one control group; the kernel calls it busy for a moment after its last process."""
    while True:
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def remove(folder: Path, cgroup: Path) -> None:
    """Everything of one run. Its mounts are in namespaces that end with its processes."""
    remove_cgroup(cgroup)
    shutil.rmtree(folder)


def lock(folder: Path) -> int | None:
    """Descriptor that holds the folder as long as it is open in any process; None: another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sweep() -> None:
    """Remove what runs left that were ended together with their guards."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            cgroup = Path((folder / MARK).read_text())
            held = lock(folder)
        except FileNotFoundError:  # not marked yet, or removed meanwhile
            continue
        if held is not None:
            remove(folder, cgroup)
            os.close(held)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(Path(sys.argv[1]), Path(sys.argv[2]))
