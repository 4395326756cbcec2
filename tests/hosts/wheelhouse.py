"""The real wheels of the embedded engine for a bare Debian 12 host, and of who deploys, kept between runs."""

import fcntl
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

from tests.hosts.rootfs import cache_folder
from toolkit.build import wheelhouse
from toolkit.build.lock import CONTROL, lock_of

PYTHON = "3.11"  # of Debian 12


def why_not() -> str | None:
    """Why there is none; None where it can be made."""
    version = importlib.metadata.version("torch")
    if not version.endswith("+cpu"):
        return f"torch {version} here is no build for the CPU alone: its wheels would take gigabytes"
    return None


def filled() -> Path:
    """The folder, complete and as its checksums say."""
    lock, control = lock_of("embedded"), lock_of(CONTROL)
    folder = cache_folder() / f"wheelhouse-{lock.sha256[:16]}-{control.sha256[:16]}"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / wheelhouse.CHECKSUMS).is_file() or wheelhouse.verify(folder):
            target = wheelhouse.Target(PYTHON, platform.machine())
            given = [_torch(folder, target)]
            wheelhouse.make(lock, folder, target, given, lambda _: None, control=wheelhouse.here())
        else:
            wheelhouse.put_project(folder, control=True)
    return folder


def _torch(folder: Path, target: wheelhouse.Target) -> Path:
    """The build of torch that this machine's pip is set to, which the lock has to name."""
    version = lock_of("embedded").versions()["torch"]
    place = folder.with_name("torch-wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [*target.flags(), "--dest", str(place), f"torch=={version}"]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return next(place.glob(f"torch-{version}*.whl"))
