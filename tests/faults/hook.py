"""Counts the file operations, programs and journal writes of the toolkit's processes, and strikes at one.

Standard library only: it is loaded into processes of a test host (by a `.pth` file of the interpreter there)
and into the control machine's process. Nothing of the toolkit knows about it. It replaces primitives such as
`os.replace` by wrappers; each call is an operation with a label, `replace .../current @ store.switch`, and
has a moment before it and one after it. A plan names one moment by label, occurrence and side, and what is to
be done there:

- `kill`: SIGKILL for this process;
- `enospc`: the operation fails with ENOSPC;
- `hold`: write `reached` into the folder of the plan and wait for `go`, while the outside acts.

Bulk operations (`shutil.copytree`, `rmtree`, unpacking an archive) count once, with a third moment in the
middle.
"""

import builtins
import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

FOLDER = "/run/ddfaults"
POLL = 0.003
HOLD_LIMIT = 120.0
# Programs that only tell something: afterwards everything is as before.
TELLING = re.compile(
    r"systemctl\S* (--no-ask-password )?(show|is-enabled|is-active|--version)|journalctl|systemd-analyze|"
    r"python\S* -I -c|--version$|df |nvidia-smi|lspci"
)
DURABLE = ("fsync", "fdatasync")
NAMES = (
    (re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}"), "RELEASE"),
    (re.compile(r"/(tmp|var/tmp)/ddtoolkit-([a-z]+)-\w+"), r"/\1/ddtoolkit-\2"),
    (re.compile(r"(?<=/releases/)\.staging-RELEASE"), ".staging-RELEASE"),
    (re.compile(r"/proc/(self/fd/)?\d+\S*"), "/proc"),
    (re.compile(r"(?<=[./-])[0-9a-f]{8,64}(?![0-9a-z])"), "HEX"),
    (re.compile(r"\.HEX-\w+"), ".HEX"),
    (re.compile(r"(?<=HEX)\.\d+"), ".PID"),
    (re.compile(r"\.\d+\.tmp"), ".PID.tmp"),
)  # fmt: skip

_real = {
    "open": os.open, "write": os.write, "close": os.close, "kill": os.kill, "stat": os.stat,
    "replace": os.replace, "unlink": os.unlink,
}  # fmt: skip


class Injector:
    """Counts operations of this process and those forked from it; strikes where the plan says.

    Args:
        role: what this process is: `agent`, `transaction`, `boot`, ...
        folder: where the plan lies and the trace goes.
        plan: `{"role", "label", "occurrence", "side", "act"}`; None: only count.
    """

    def __init__(self, role, folder, plan):
        self.role = role
        self.folder = folder
        self.plan = plan if plan and plan.get("role") == role else None
        self.trace = os.path.exists(f"{folder}/counting")  # noqa: PTH110
        self.counts = {}
        self.inside = threading.local()
        self.guard = threading.Lock()

    def operation(self, label, action, *, bulk=False, changes=True, files=True, step=None):
        """Run `action` as the operation `label`; `step` is what it tells about the work from now on."""
        if getattr(self.inside, "depth", 0):
            self._inner()
            return action()
        with self.guard:
            number = self.counts[label] = self.counts.get(label, 0) + 1
        where = _place() + ([f"step:{step}"] if step else [])
        self.inside.depth, self.inside.count = 1, 0
        self.inside.middle = self._middle(label, number) if bulk else None
        try:
            self._moment(label, number, "before", where, files, changes)
            value = action()
        except OSError:
            self._note(label, number, "after", where, files, False, self.inside.count)
            raise
        finally:
            self.inside.depth, inner = 0, self.inside.count
        self.inside.count = inner
        self.inside.depth = 1
        try:
            self._moment(label, number, "after", where, files, changes)
        finally:
            self.inside.depth = 0
        return value

    def _middle(self, label, number):
        plan = self.plan
        wanted = plan and (label, number, "middle") == (plan["label"], plan["occurrence"], plan["side"])
        return plan["inner"] if wanted else None

    def _inner(self):
        self.inside.count += 1
        if self.inside.middle == self.inside.count:
            self._strike()

    def _moment(self, label, number, side, where, files, changes):
        if self.trace:
            self._note(label, number, side, where, files, changes, self.inside.count)
        plan = self.plan
        if plan and (label, number, side) == (plan["label"], plan["occurrence"], plan["side"]):
            self._strike()

    def _note(self, label, number, side, where, files, changes, inner):
        if not self.trace:
            return
        line = {
            "role": self.role, "pid": os.getpid(), "label": label, "occurrence": number, "side": side,
            "where": where, "files": files, "changes": changes, "inner": inner, "time": time.time(),
        }  # fmt: skip
        self._write("trace", json.dumps(line) + "\n")

    def _strike(self):
        # Once a boot: an operation that is tried again, or a forked process, must get through.
        try:
            fd = _real["open"](f"{self.folder}/struck", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        _real["close"](fd)
        act = self.plan["act"]
        self._write("reached.new", json.dumps({"pid": os.getpid(), "time": time.time()}))
        _real["replace"](f"{self.folder}/reached.new", f"{self.folder}/reached")
        if act == "kill":
            _real["kill"](os.getpid(), signal.SIGKILL)
        elif act == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.plan["label"])
        end = time.monotonic() + HOLD_LIMIT
        while time.monotonic() < end:
            try:
                _real["stat"](f"{self.folder}/go")
                return
            except FileNotFoundError:
                time.sleep(POLL)

    def _write(self, name, text):
        fd = _real["open"](f"{self.folder}/{name}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            _real["write"](fd, text.encode())
        finally:
            _real["close"](fd)


def _place():
    """Functions of the toolkit that are at work, innermost first: `store.stage`."""
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/toolkit/" in name and "/site-packages/" not in name:
            function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            found.append(f"{name.rpartition('/')[2][:-3]}.{function.replace('<locals>.', '')}")
        frame = frame.f_back
    return found


def shown(path):
    """A path without what differs from run to run."""
    if isinstance(path, int):
        try:
            path = os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115
        except OSError:
            return "?"
    text = os.fsdecode(path)
    for pattern, name in NAMES:
        text = pattern.sub(name, text)
    return text


def _ignored(path):
    if isinstance(path, int):
        return False
    text = os.fsdecode(path)
    # The last is how tempfile finds out whether a folder can be written.
    return text.startswith((FOLDER, "/dev/", "/proc/")) or re.fullmatch(r"/(tmp|var/tmp)/[a-z0-9_]{8}", text)


def _label(verb, text):
    places = _place()
    return f"{verb} {text}" + (f" @ {places[0]}" if places else "")


def _wrap(injector, module, name, *, changes=True):
    real = getattr(module, name)

    @functools.wraps(real)
    def wrapper(*args, **more):
        target = args[1] if name in ("rename", "replace", "symlink", "link") else args[0]
        if _ignored(target):
            return real(*args, **more)
        label = _label(name, shown(target))
        return injector.operation(label, lambda: real(*args, **more), changes=changes)

    setattr(module, name, wrapper)


def _wrap_bulk(injector, owner, name, target):
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapper(*args, **more):
        path = target(args, more)
        if not os.path.lexists(path) and name == "rmtree":
            return real(*args, **more)
        label = _label(name, shown(path))
        return injector.operation(label, lambda: real(*args, **more), bulk=True)

    if hasattr(real, "avoids_symlink_attacks"):
        wrapper.avoids_symlink_attacks = real.avoids_symlink_attacks
    setattr(owner, name, wrapper)


def _wrap_opens(injector):
    real_os, real_io = os.open, io.open

    def open_descriptor(path, flags, *args, **more):
        makes = flags & os.O_CREAT and not (isinstance(path, str | os.PathLike) and os.path.lexists(path))
        if not (makes or flags & os.O_TRUNC) or _ignored(path):
            return real_os(path, flags, *args, **more)
        label = _label("open", shown(path))
        return injector.operation(label, lambda: real_os(path, flags, *args, **more))

    def open_file(file, mode="r", *args, **more):
        if not set(mode) & set("wax+") or isinstance(file, int) or _ignored(file):
            return real_io(file, mode, *args, **more)
        label = _label("open", shown(file))
        return injector.operation(label, lambda: real_io(file, mode, *args, **more))

    os.open = open_descriptor
    io.open = builtins.open = open_file


def _wrap_writes(injector):
    for name in ("write", "pwrite"):
        real = getattr(os, name)

        def wrapper(fd, data, *args, _real=real, _name=name):
            # Pipes and sockets are no files; where they lead is somebody else's operation.
            path = shown(fd)
            if not path.startswith("/") or _ignored(path):
                return _real(fd, data, *args)
            step = _begun(data) if path.endswith("/journal.jsonl") else None
            return injector.operation(_label(_name, path), lambda: _real(fd, data, *args), step=step)

        setattr(os, name, wrapper)


def _begun(line):
    """The step that a line of a journal says is begun."""
    try:
        event = json.loads(line)
        return event["step"] if event["state"] == "begin" else None
    except (ValueError, KeyError):
        return None


def _wrap_programs(injector):
    real_run, real_start = subprocess.run, subprocess.Popen.__init__

    def words(argv):
        argv = [os.fspath(word) for word in argv] if not isinstance(argv, str | bytes) else [str(argv)]
        text = " ".join([Path(argv[0]).name, *argv[1:]]).split("\n")[0]
        text = re.sub(r"--(unit|setenv|description|property=StandardError)=\S+", "", text)
        return shown(re.sub(r"--since=\S+", "--since", text))[:110]

    def run(argv, *args, **more):
        text = words(argv)
        return injector.operation(
            _label("run", text),
            lambda: real_run(argv, *args, **more),
            changes=TELLING.search(text) is None,
            files=False,
        )

    def start(self, argv, *args, **more):
        injector.operation(
            _label("start", words(argv)), lambda: real_start(self, argv, *args, **more), files=False
        )

    subprocess.run = run
    subprocess.Popen.__init__ = start


def install(role, folder=FOLDER, plan=None):
    """Replace the primitives in this process; returns the injector."""
    injector = Injector(role, folder, plan)
    for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir", "symlink", "link", "truncate",
                 "ftruncate", "posix_fallocate"):  # fmt: skip
        _wrap(injector, os, name)
    # What a file holds, and under which name, is what others see: who may read it comes with that.
    for name in (*DURABLE, "chmod", "fchmod"):
        _wrap(injector, os, name, changes=False)
    _wrap_bulk(injector, shutil, "rmtree", lambda args, _: args[0])
    _wrap_bulk(injector, shutil, "copytree", lambda args, _: args[1])
    _wrap_bulk(injector, tarfile.TarFile, "extractall", lambda args, _: args[1])
    _wrap_opens(injector)
    _wrap_writes(injector)
    _wrap_programs(injector)
    return injector


def read_plan(folder=FOLDER):
    """The plan in `folder`; None where this run is not about this machine's processes."""
    try:
        with io.open(f"{folder}/plan.json", encoding="utf-8") as file:  # noqa: UP020 - never replaced yet
            return json.load(file)
    except (OSError, ValueError):
        return None
