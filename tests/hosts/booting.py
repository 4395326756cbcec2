"""A machine's life: its files, its boot, its reboots and its end."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hosts import engine, guard
from tests.hosts.network import GATEWAY, Network, Relay, run

BOOT = Path(__file__).with_name("boot.sh")
BOOT_LIMIT = 60.0
STOP_LIMIT = 20.0
RUN_LIMIT = 120.0
PAUSE = 0.02
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORK_FILE = """\
[Match]
Name=host0
[Network]
Address={address}/24
Gateway={gateway}
LinkLocalAddressing=no
"""


class Machine:
    """One container with systemd as PID 1; see `Host` for its attributes."""

    address = "127.0.0.1"

    def __init__(
        self,
        network: Network,
        release: str = "bookworm",
        *,
        name: str | None = None,
        binds: Sequence[str | Path] = (),
        disk: str = "2G",
        with_engine: bool = False,
    ) -> None:
        number = network.next_number()
        self.network = network
        self.release = release
        self.name = name or f"host{number}"
        self.ip = f"10.213.0.{number}"
        self.key = network.key
        self._id = f"h{number}"
        self._folder = network.folder / self._id
        self._cgroup = network.cgroup / self._id
        self._binds = [str(bind) for bind in binds] + (engine.binds() if with_engine else [])
        self._relay = Relay(network, network.namespace, self.ip, 22)
        self.port = self._relay.port
        self._relays = [self._relay]
        self._write_files(with_engine)
        self._cgroup.mkdir()
        with (self._folder / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                self._command(disk), stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        try:
            state = self._wait_until_up(last_leader=None)
            if state != "running":
                failed = self.root(["systemctl", "--failed", "--no-legend", "--plain"]).stdout
                raise RuntimeError(f"{self.name} is {state}: {failed}")
        except BaseException:
            self.stop()
            raise

    def _write_files(self, with_engine: bool) -> None:
        """What tells this host from the others of its release."""
        files = self._folder / "files"
        etc = files / "etc"
        networks = etc / "systemd" / "network"
        networks.mkdir(parents=True)
        (etc / "ssh").mkdir()
        for folder in (files, etc, etc / "ssh", etc / "systemd", networks):
            folder.chmod(0o755)
        (etc / "hostname").write_text(f"{self.name}\n")
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        (networks / "10-host0.network").write_text(NETWORK_FILE.format(address=self.ip, gateway=GATEWAY))
        shutil.copy(f"{self.key}.pub", etc / "ssh" / "authorized_keys")
        host_key = etc / "ssh" / "ssh_host_ed25519_key"
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(host_key)])
        self.host_key = " ".join(host_key.with_suffix(".pub").read_text().split()[:2])
        self.network.trust(self.port, self.host_key)
        if with_engine:
            engine.prepare(files)

    def _command(self, disk: str) -> list[str]:
        return self.network.command(
            "nsenter", f"--net={self.network.namespace}", "unshare", "--mount",
            "bash", str(BOOT), str(self._folder), str(self.network.lower(self.release)), disk,
            "--quiet", "--boot", f"--directory={self._folder / 'root'}", f"--machine={self._id}",
            f"--hostname={self.name}", "--register=no", "--keep-unit", "--network-bridge=br0",
            "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=passive",
            *(f"--bind-ro={bind}" for bind in self._binds),
            cgroup=self._cgroup,
        )  # fmt: skip

    def leader(self) -> int:
        """PID of the host's PID 1 on this machine.

        Raises:
            RuntimeError: the host is not running.
        """
        for folder in ("payload/init.scope", "payload"):
            try:
                pids = (self._cgroup / folder / "cgroup.procs").read_text().split()
            except OSError:  # not there yet, or no more
                continue
            for pid in pids:
                if _is_pid_1(pid):
                    return int(pid)
        raise RuntimeError(f"{self.name} is not running:\n{self.console()[-2000:]}")

    def payload(self) -> Path:
        """Control group of everything that runs in the host."""
        return self._cgroup / "payload"

    def console(self) -> str:
        """What the boot and the container manager printed."""
        return (self._folder / "console.log").read_text(errors="replace")

    def root(
        self,
        argv: Sequence[str],
        input: str | None = None,  # noqa: A002
        *,
        check: bool = True,
        timeout: float = RUN_LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root by entering the host from outside, which needs no network and is quick."""
        enter = ["nsenter", f"--target={self.leader()}", "--all", "--root", "--wd", "env", "-i"]
        return finish([*enter, f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8", *argv], input, check, timeout)

    def _wait_until_up(self, last_leader: int | None) -> str:
        """Wait for a boot after that of `last_leader`; returns systemd's state."""
        self._wait_for(lambda: self._booted_after(last_leader), "start")
        self._wait_for(self._ssh_answers, "answer on SSH")
        command = ["systemctl", "is-system-running", "--wait"]
        return self.root(command, check=False, timeout=BOOT_LIMIT).stdout.strip()

    def _booted_after(self, last_leader: int | None) -> bool:
        try:
            return self.leader() != last_leader
        except RuntimeError:
            return False

    def _ssh_answers(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BOOT_LIMIT
        while not done():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not {what}:\n{self.console()[-3000:]}")
            time.sleep(PAUSE)

    def reboot(self) -> None:
        """Reboot in order and wait until the host is up again."""
        leader = self.leader()
        self.root(["systemctl", "reboot"])
        self._wait_until_up(leader)

    def power_cut(self) -> None:
        """End every process at once, as a power cut would, boot again and wait until the host is up."""
        leader = self.leader()
        (self._folder / "again").touch()
        os.kill(leader, signal.SIGKILL)
        self._wait_until_up(leader)

    def stop(self) -> None:
        """End the host without a shutdown; what it wrote is gone, its port refuses connections."""
        for relay in self._relays:
            relay.close()
        self._relays.clear()
        guard.remove_cgroup(self._cgroup)
        self._process.wait(STOP_LIMIT)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_pid_1(pid: str) -> bool:
    """Whether a process is the first of a PID namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return len(line.split()) > 2 and line.split()[-1] == "1"


def finish(
    command: Sequence[str], given: str | None, check: bool, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command; one that fails shows its error output when `check` is set."""
    stdin = {"input": given} if given is not None else {"stdin": subprocess.DEVNULL}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **stdin)
    if check and done.returncode != 0:
        raise RuntimeError(f"{list(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
