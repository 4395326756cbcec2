"""Real hosts for tests: systemd as PID 1, sshd and journald, in namespaces of this machine."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.booting import RUN_LIMIT, Machine, finish
from tests.hosts.network import Relay

FILLER = "/var/filler"


class Host(Machine):
    """One booted host, up once it is made: `Host(network, "trixie", name="gpu1", disk="64M")`.

    `binds` are paths that it sees read-only, each `SOURCE` or `SOURCE:TARGET`; `disk` limits what it may
    write in all (memory is used as it is written); `with_engine` shows it the interpreter and the environment
    of this process, at the same paths.

    Attributes:
        network: whose member it is.
        release: Debian release, `bookworm` (systemd 252) or `trixie` (257).
        name: host name.
        user: user of `run`, with NOPASSWD sudo.
        address: where SSH reaches it from this machine: always 127.0.0.1.
        port: and the port there.
        ip: its address among the other hosts.
        key: private SSH key; the known_hosts file is the network's.
        host_key: its public key, type and base64.
    """

    user = "deploy"

    def run(
        self,
        argv: Sequence[str],
        input: str | None = None,  # noqa: A002
        *,
        check: bool = True,
        timeout: float = RUN_LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command over SSH as the user `deploy`."""
        return finish([*self.ssh(), "--", shlex.join(argv)], input, check, timeout)

    def ssh(self) -> list[str]:
        """The ssh command up to the host, for what `run` does not do."""
        return [
            "ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
            "-o", f"UserKnownHostsFile={self.network.known_hosts}", "-o", "GlobalKnownHostsFile=none",
            "-o", "StrictHostKeyChecking=yes",
            "-i", str(self.key), "-p", str(self.port), f"{self.user}@{self.address}",
        ]  # fmt: skip

    def path(self, inside: str | Path) -> Path:
        """A path of the running host as one of this machine, to read and write (until a reboot)."""
        return Path(f"/proc/{self.leader()}/root") / str(inside).lstrip("/")

    def push(self, source: Path, inside: str | Path) -> None:
        """Copy a file or a folder into the host, owned by root."""
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)

    def pull(self, inside: str | Path, target: Path) -> None:
        """Copy a file or a folder out of the host."""
        if self.path(inside).is_dir():
            shutil.copytree(self.path(inside), target, symlinks=True)
        else:
            shutil.copy(self.path(inside), target)

    def journal(self, *arguments: str) -> str:
        """What journalctl shows, such as `journal("-u", "ssh")`."""
        return self.root(["journalctl", "--no-pager", "-o", "cat", *arguments]).stdout

    def forward(self, port: int) -> int:
        """Local port that leads to 127.0.0.1:`port` in the host, until it reboots. No cut concerns it."""
        relay = Relay(self.network, f"/proc/{self.leader()}/ns/net", self.address, port)
        self._relays.append(relay)
        return relay.port

    def cut(self) -> None:
        """Unplug the network: connections neither break nor get answers until `restore`."""
        self._relay.tell("cut")
        self.network.inside("bridge", "link", "set", "dev", f"vb-{self._id}", "state", "0")

    def restore(self) -> None:
        """Plug the network in again."""
        self.network.inside("bridge", "link", "set", "dev", f"vb-{self._id}", "state", "3")
        self._relay.tell("restore")

    def break_connections(self) -> None:
        """Reset every SSH connection, as a router does that forgot about them."""
        self._relay.tell("break")

    def delay(self, seconds: float) -> None:
        """Let everything between this machine and the host's SSH take this long, each way."""
        self._relay.tell(f"delay {seconds}")

    def fill_disk(self, leave: int = 0) -> None:
        """Use up the host's disk but for `leave` bytes."""
        with self.path(FILLER).open("wb") as file:
            free = os.statvfs(file.fileno())
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)

    def empty_disk(self) -> None:
        """Give back what `fill_disk` took."""
        self.path(FILLER).unlink()
