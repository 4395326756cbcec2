"""Root file systems of test hosts: made once by mmdebstrap, kept unpacked, and only ever read by hosts."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

RELEASES = ("bookworm", "trixie")
# The last line is what a Python and an engine bound from the outside load.
PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,python3,python3-apt,python3-venv,iproute2,sudo,ca-certificates,"
    "procps,"
    "libstdc++6,libgomp1,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1,"
    "libexpat1"
)
# Names that newer releases gave to the same libraries.
RENAMED = {"trixie": {"libssl3": "libssl3t64", "libreadline8": "libreadline8t64"}}
PREPARE = Path(__file__).with_name("prepare.sh")
BUILD_LIMIT = 900


def cache_folder() -> Path:
    """Where root file systems are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddtoolkit-tests"


def packages(release: str) -> str:
    """Debian packages of a host, separated by commas."""
    renamed = RENAMED.get(release, {})
    return ",".join(renamed.get(name, name) for name in PACKAGES.split(","))


def tree(release: str) -> Path:
    """The release's root file system, built when its recipe has none yet."""
    folder = cache_folder()
    # Its set-user-ID programs are nobody else's to run.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    recipe = hashlib.sha256(f"{release}\n{packages(release)}\n{PREPARE.read_text()}".encode()).hexdigest()[
        :16
    ]
    path = folder / f"{release}-{recipe}"
    with (folder / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            build(release, path)
    return path


def build(release: str, path: Path) -> None:
    """Make the root file system at `path`, where it appears only when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        made = Path(folder) / "root"
        command = ["mmdebstrap", "--mode=root", "--variant=apt", "--format=directory"]
        command += [
            f"--include={packages(release)}",
            f'--customize-hook=bash "{PREPARE}" "$1"',
            release,
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"mmdebstrap {release} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        made.rename(path)
    for older in path.parent.glob(f"{release}-*"):
        if older != path:
            _remove_unused(older)


def use(path: Path) -> int:
    """Descriptor that keeps a root file system from being removed as long as it is open."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove_unused(path: Path) -> None:
    """Remove the root file system of an older recipe, unless a run uses it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
