"""A test host on which changes are made again and again, each time from the same state."""

from __future__ import annotations

import contextlib
import json
import os
import site
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import hook
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from toolkit.service.processes import end_with_parent

HERE = Path(__file__).parent
NAME = "systemd-cpu"
UNIT = f"ddtoolkit-{NAME}"
PORT = 30000
KEY = "of-the-faults-7b2e"
ENGINE = "/opt/engine"
SITE = f"{ENGINE}/lib/python3.{sys.version_info.minor}/site-packages"
PYTHON = f"{ENGINE}/bin/python"
HOST_PYTHON = f"{ENGINE}/bin/hostpython"
# Load timeout and acceptance limit that are usual here, in seconds.
LIMIT = 10
STATE = f"/var/lib/ddtoolkit/state/{NAME}"
BASE = f"/opt/ddtoolkit/services/{NAME}"
KEPT = (
    "/opt/ddtoolkit/services", "/opt/ddtoolkit/envs", "/opt/ddtoolkit/tool", "/var/lib/ddtoolkit",
    "/var/cache/ddtoolkit", "/var/log/ddtoolkit", "/root/.local", "/etc/passwd", "/etc/group", "/etc/shadow",
    "/etc/gshadow", "/etc/systemd/system",
)  # fmt: skip
WRAPPER = f"""\
#!/bin/sh
exec /usr/bin/python3 -I -S -c 'import sys; sys.path.insert(0, "{SITE}"); import ddfaults
sys.exit(ddfaults.bootstrap(sys.argv[1:]))' "$@"
"""
CLEAR = f"""
systemctl kill --signal=KILL '{UNIT}*' 2>/dev/null
systemctl stop '{UNIT}*' 'ddtoolkit-recover*' 2>/dev/null
rm -rf /run/ddfaults /var/filler /tmp/ddtoolkit-*
for path in {" ".join(KEPT)}; do rm -rf "$path"; done
cp -a "$1"/. /
systemctl daemon-reload
systemctl reset-failed
"""


@dataclass(frozen=True)
class Result:
    """A command of the control machine that ended.

    Attributes:
        code: exit status; negative: the signal.
        out: standard output.
        err: standard error.
    """

    code: int
    out: str
    err: str


class Running:
    """A command of the control machine, in a process of its own that was forked from this one."""

    def __init__(self, arguments: list[str], folder: Path, env: dict[str, str], plan: Any) -> None:
        self._folder = folder
        together = end_with_parent()
        self.pid = os.fork()
        if self.pid == 0:
            together()
            self._be(arguments, env, plan)
        self._status: int | None = None

    def _be(self, arguments: list[str], env: dict[str, str], plan: Any) -> None:
        code = 70
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            # Whoever runs this may have put something else in their place.
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            os.environ.update(env)
            sys.argv = ["ddtoolkit", *arguments]
            if plan is not None:
                control_points(str(self._folder), plan)
            from toolkit.cli.main import main

            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """SIGKILL for it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def kill_controller(self) -> None:
        """SIGKILL for the command alone; what it started goes on, or not."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def wait(self, limit: float) -> Result:
        """What it came to.

        Raises:
            TimeoutError: it did not end within `limit` seconds; it is killed.
        """
        end = time.monotonic() + limit
        while self.poll() is None:
            if time.monotonic() > end:
                said = (self._folder / "err").read_text(errors="replace")
                self.kill()
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"the command did not end within {limit:g} s: {said[-800:]}")
            time.sleep(0.01)
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("out", "err"))
        return Result(self._status or 0, out, err)


def control_points(folder: str, plan: Any) -> None:
    """Count what this process asks of the host: programs over SSH, and what is said to them."""
    import paramiko

    injector = hook.Injector("control", folder, plan)

    def label(data: bytes) -> str:
        if data.startswith(b'{"op"'):
            return f"ask the agent to {json.loads(data)['op']}"
        return "send the toolkit" if len(data) > 65536 else "name the wanted toolkit"

    def wrap(owner: Any, name: str, said: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def wrapper(self: Any, *args: Any, **more: Any) -> Any:
            return injector.operation(said(*args), lambda: real(self, *args, **more), files=False)

        setattr(owner, name, wrapper)

    wrap(paramiko.Transport, "start_client", lambda *_: "open the SSH connection")
    wrap(paramiko.Transport, "auth_publickey", lambda *_: "log in by key")
    wrap(paramiko.Channel, "exec_command", lambda *_: "start the agent over SSH")
    wrap(paramiko.Channel, "sendall", lambda data, *_: label(bytes(data[:65537])))
    import subprocess

    real = subprocess.Popen.__init__

    def start(self: Any, argv: Any, *args: Any, **more: Any) -> None:
        words = (
            [Path(str(argv[0])).name, *map(str, argv[1:])] if isinstance(argv, list | tuple) else [str(argv)]
        )
        text = " ".join(words)[:60]
        injector.operation(f"start {hook.shown(text)}", lambda: real(self, argv, *args, **more), files=False)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def warm() -> None:
    """Import what commands use, so that their processes need not."""
    import importlib

    from toolkit.build import package

    for name in ("cli.main", "cli.fleet", "fleet.connections", "fleet.deploy", "fleet.change", "fleet.drain",
                 "fleet.many", "remote.agent", "profile.loading"):  # fmt: skip
        importlib.import_module(f"toolkit.{name}")
    package.archive()
    package.digest()


class Bench:
    """One host, the snapshots of its states, and commands on it.

    Args:
        host: booted with `engine=True`.
        folder: empty folder for inventory, output and plans of the control machine.
        limit: load timeout and acceptance limit of the profile, in seconds.
    """

    def __init__(self, host: Host, folder: Path, *, limit: int = LIMIT) -> None:
        self.host = host
        self.name = NAME
        self.folder = folder
        self.limit = limit
        self._bases: dict[str, dict[str, Any]] = {}
        self._install()
        self.stub("serve", "build", "accept")
        variables = {"ddtoolkit_profiles": [NAME], "ansible_python_interpreter": HOST_PYTHON}
        self.inventory = write_inventory(folder / "inventory.yaml", [host], {host.name: variables})
        self._remember_inventory()
        self.snapshot("bare")

    def _install(self) -> None:
        """An interpreter of the host's own, with the libraries of this one, that loads the hook."""
        for folder in (f"{ENGINE}/bin", SITE):
            self.host.root(["mkdir", "-p", folder])
        base = Path(sys.base_prefix) / "bin"
        real = Path(os.path.realpath(sys.executable))
        self.host.root(["ln", "-s", str(real), PYTHON])
        libraries = [path for path in site.getsitepackages() if Path(path).is_dir()]
        files = {
            f"{ENGINE}/pyvenv.cfg": f"home = {base}\ninclude-system-site-packages = false\n",
            f"{SITE}/libraries.pth": "\n".join(libraries) + "\n",
            f"{SITE}/zz-faults.pth": "import ddfaults; ddfaults.play()\n",
            f"{SITE}/ddfaults.py": (HERE / "site_hook.py").read_text(),
            f"{SITE}/ddfaults_hook.py": (HERE / "hook.py").read_text(),
            f"{SITE}/ddfaults_stub.py": (HERE / "stub.py").read_text(),
            f"{SITE}/ddfaults_look.py": (HERE / "look.py").read_text(),
            HOST_PYTHON: WRAPPER,
        }
        for path, text in files.items():
            self.host.path(path).write_text(text)
        self.host.root(
            ["sh", "-c", f"chmod 755 {HOST_PYTHON}; mkdir -m 700 /var/ddfaults-cache /var/snapshots"]
        )

    @property
    def bound(self) -> int:
        """Seconds in which the old or the new release serves again, or a first deploy has failed."""
        return 2 * (self.limit + self.limit)

    def stub(self, *parts: str) -> None:
        """Let the contract stub stand in for these parts of the engine: `serve`, `build`, `accept`."""
        self.host.path("/etc/ddfaults-stub").write_text(" ".join(parts))

    def _remember_inventory(self) -> None:
        """Ansible's reading of the inventory takes seconds of each command; nothing of it is tested here."""
        from toolkit.inventory import load

        hosts = load.load_hosts([self.inventory])
        load.load_hosts = lambda *_, **__: hosts

    def snapshot(self, name: str) -> None:
        """Keep the host's state, with the service stopped."""
        keep = f"/var/snapshots/{name}"
        copy = f"for path in {' '.join(KEPT)}; do [ ! -e $path ] || cp -a --parents $path {keep}; done"
        self.host.root(
            ["sh", "-c", f"systemctl stop -q {UNIT}; rm -rf {keep}; mkdir {keep}; {copy}"], check=False
        )

    def reset(self, name: str) -> None:
        """Return to a snapshot; what was deployed serves again."""
        self.host.root(["sh", "-c", CLEAR, "sh", f"/var/snapshots/{name}"], check=False)
        if self.host.path(f"/etc/systemd/system/{UNIT}.service").is_file():
            self.host.root(["systemctl", "start", UNIT])
            self._adopt()

    def _adopt(self) -> None:
        """Let the toolkit's record of the last start name this one."""
        record = self.host.path(f"{STATE}/started")
        value = json.loads(record.read_bytes())
        said = self.host.root(["systemctl", "show", UNIT, "--property=InvocationID", "--value"]).stdout
        boot = self.host.path("/proc/sys/kernel/random/boot_id").read_text().strip()
        value |= {"invocation": said.strip(), "time": time.time(), "boot": boot}
        value |= {"asked_to_stop": False, "stopped": "", "leftovers": []}
        record.write_bytes(json.dumps(value).encode().ljust(record.stat().st_size))

    def base(self, name: str) -> dict[str, Any]:
        """What there is to see right after `reset`, which is the same every time."""
        if name not in self._bases:
            self._bases[name] = self.look()
        return self._bases[name]

    def look(self) -> dict[str, Any]:
        """Everything that the checks want to know of the host (look.py)."""
        script = f"{SITE}/ddfaults_look.py"
        found: dict[str, Any] = json.loads(
            self.host.root(["/usr/bin/python3", "-I", "-S", script, NAME, KEY]).stdout
        )
        return found

    def start(self, *arguments: str, plan: Any = None) -> Running:
        """Begin `ddtoolkit ARGUMENTS` with the inventory."""
        for name in ("reached", "go", "struck"):
            (self.folder / name).unlink(missing_ok=True)
        words = [word.format(limit=self.limit) for word in arguments]
        return Running([*words, "-i", str(self.inventory)], self.folder, {"SERVER_KEY": KEY}, plan)

    def command(self, *arguments: str, limit: float = 120.0) -> Result:
        """Run `ddtoolkit ARGUMENTS` to its end."""
        return self.start(*arguments).wait(limit)
