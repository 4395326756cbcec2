"""Sent to a host as text and run there by its own Python: puts the toolkit in place and becomes its agent.

It needs nothing but the standard library. Standard input: one JSON line `{"root", "digest", "python",
"modules"}`; after the answer `{"need": true}` a line with the length of a gzip-compressed tar archive and the
archive. Then the agent takes over both streams; with `"run"`, a module and its arguments, that module does
instead, under the Python that runs this, which need have nothing installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

MARKER = ".complete"
REMEMBERED = "python"
STATE = Path("/var/lib/ddtoolkit")
_FETCHED = ("models", "state")  # what `models add` makes
DIGITS = 16


def answer(value: dict[str, Any]) -> None:
    """Write one JSON line."""
    os.write(1, json.dumps(value).encode() + b"\n")


def line() -> bytes:
    """Read one line, and not a byte more: what follows is for the agent."""
    read = bytearray()
    while not read.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit(1)
        read += piece
    return bytes(read)


def archive() -> io.BytesIO:
    """Read the archive."""
    left = int(line())
    pieces = []
    while left:
        piece = os.read(0, min(left, 1 << 20))
        if not piece:
            sys.exit(1)
        pieces.append(piece)
        left -= len(piece)
    return io.BytesIO(b"".join(pieces))


def unpack(target: Path) -> None:
    """Unpack beside the place where it belongs, and rename: a half-made copy is never used."""
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    staging = target.with_name(f"{target.name}.{os.getpid()}")
    staging.mkdir(mode=0o755)
    try:
        lock(staging)
        with tarfile.open(fileobj=archive(), mode="r:gz") as packed:
            packed.extractall(staging)  # noqa: S202  made by the control machine from its own package
        (staging / MARKER).touch()
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def lock(folder: Path) -> int:
    """Take a flock on a folder, which ends with this process; OSError where someone else has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def clear(folder: Path) -> None:
    """Remove half-made copies whose makers are dead, and what was to name the interpreter and never did."""
    for path in folder.glob("*.*"):
        with contextlib.suppress(OSError):
            if path.name.startswith(f".{REMEMBERED}."):
                path.unlink()
            elif path.is_dir():
                fd = lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)


def tree_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the files below `folder`, hexadecimal; without compiled ones."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(str(path.relative_to(folder)).encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def look(python: str, modules: list[str]) -> subprocess.Popen[bytes] | None:
    """Begin to see which modules the interpreter does not have; None if it does not run."""
    text = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if not u.find_spec(m)])"
    try:
        return subprocess.Popen(
            [python, "-I", "-c", text, *modules], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
    except OSError:
        return None


def lacking(looks: subprocess.Popen[bytes] | None) -> list[str] | None:
    """Which modules the interpreter that `look` asked does not have; None if it does not run."""
    if looks is None:
        return None
    try:
        out, _ = looks.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        looks.kill()
        return None
    return out.decode().split() if looks.returncode == 0 else None


def remembered(root: Path) -> str:
    """The interpreter of the last deploy."""
    try:
        return (root / REMEMBERED).read_text(encoding="utf-8").strip()
    except OSError:
        return sys.executable


def begun(root: Path) -> bool:
    """Whether provisioning made anything here: not a plan's copy of the toolkit, nor fetched checkpoints."""
    made = any(path.is_dir() for path in (root.parent / "services", root.parent / "envs"))
    return made or (STATE.is_dir() and any(path.name not in _FETCHED for path in STATE.iterdir()))


def main() -> None:
    """Put the toolkit in place and become its agent."""
    os.umask(0o022)
    wanted = json.loads(line())
    root = Path(wanted["root"])
    python = wanted["python"] or remembered(root)
    target = root / wanted["digest"]
    run = wanted.get("run")
    looks = look(python, wanted["modules"]) if run is None else None
    clear(root)
    whole = (target / MARKER).is_file() and tree_digest(target / "toolkit")[:DIGITS] == wanted["digest"]
    if run is None and (absent := lacking(looks)) != []:
        answer({"python": python, "absent": absent, "begun": begun(root)})
        return
    if not whole:
        answer({"need": True})
        try:
            unpack(target)
        except OSError as error:
            answer({"failed": f"{error.filename or target}: {error.strerror or error}"})
            return
    answer({"ready": True})
    kept = ("PATH", "HOME", "LANG", "TZ", "SUDO_USER", "SSH_CONNECTION")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    # What it compiles stays beside its source, which root owns too: the next command starts in half the time.
    environment |= {"PYTHONPATH": str(target), "LC_ALL": "C.UTF-8", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
    os.chdir("/")
    words = [python, "-P", "-m", "toolkit.hostside"] if run is None else [sys.executable, "-P", "-m", *run]
    os.execve(words[0], words, environment)  # noqa: S606


if __name__ == "__main__":
    main()
