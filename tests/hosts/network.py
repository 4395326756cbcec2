"""One private network of test hosts, with everything that a run of them owns."""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hosts import guard, rootfs

GUARD = Path(__file__).with_name("guard.py")
RELAY = Path(__file__).with_name("relay.py")
GATEWAY = "10.213.0.1"
COMMAND_LIMIT = 60
CLOSE_LIMIT = 60
SETUP = f"""
ip link set lo up
ip link add br0 type bridge
ip address add {GATEWAY}/24 dev br0
ip link set br0 up
ip route add unreachable default
echo 1 > /proc/sys/net/ipv4/ip_forward
# The first packet to a host that is still booting would otherwise delay its successor by a second.
echo 20 > /proc/sys/net/ipv4/neigh/br0/retrans_time_ms
echo ready
exec sleep infinity
"""


class Relay:
    """A local port that leads into the network (see relay.py).

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self, network: "Network", namespace: str, address: str, port: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port: int = listening.getsockname()[1]
            self._process = subprocess.Popen(
                network.command(
                    "nsenter", f"--net={namespace}", sys.executable, "-I", str(RELAY),
                    str(listening.fileno()), address, str(port),
                ),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(listening.fileno(),),
            )  # fmt: skip

    def tell(self, command: str) -> None:
        """Give a command of relay.py and wait until it holds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"the relay of port {self.port} did not carry out {command!r}")

    def close(self) -> None:
        """End the relay; the port refuses connections from then on."""
        self._process.kill()
        self._process.communicate()


class Network:
    """A network namespace with a bridge, a control group, a folder and an SSH key.

    A guard process removes them as soon as this process closes the network or ends, in whatever way.

    Attributes:
        folder: everything that the run wrote.
        cgroup: control group of every process that it started.
        namespace: path of its network namespace.
        key: private SSH key (ed25519) that every host accepts for the user `deploy`.
        known_hosts: the hosts' keys, hashed.
    """

    def __init__(self) -> None:
        guard.sweep()
        root = guard.cgroup_root()
        assert root is not None
        self.folder = Path(tempfile.mkdtemp(prefix=guard.PREFIX))
        self.cgroup = root / self.folder.name
        held = guard.lock(self.folder)
        assert held is not None
        (self.folder / guard.MARK).write_text(str(self.cgroup))
        self.cgroup.mkdir()
        command = [sys.executable, "-I", str(GUARD), str(self.folder), str(self.cgroup)]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=(held,), start_new_session=True
        )
        os.close(held)
        self._numbers = iter(range(2, 255))
        self._lower: dict[str, Path] = {}
        self._used: list[int] = []
        self._children: list[subprocess.Popen[str]] = []
        try:
            self.namespace = self._make_namespace()
            self.key = self.folder / "id_ed25519"
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.key)])
            self.known_hosts = self.folder / "known_hosts"
            self.known_hosts.touch()
        except BaseException:
            self.close()
            raise

    def _make_namespace(self) -> str:
        process = subprocess.Popen(
            self.command("unshare", "--net", "sh", "-e", "-c", SETUP),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._children.append(process)
        assert process.stdout is not None
        with process.stdout:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the network of the test hosts cannot be set up, see above")
        return f"/proc/{process.pid}/ns/net"

    def command(self, *argv: str, cgroup: Path | None = None) -> list[str]:
        """The command as one that runs in a control group of this run, so that it ends with it."""
        procs = shlex.quote(str((cgroup or self.cgroup) / "cgroup.procs"))
        return ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *argv]

    def inside(self, *argv: str) -> None:
        """Run a short command in the network namespace."""
        run(["nsenter", f"--net={self.namespace}", *argv])

    def lower(self, release: str) -> Path:
        """The root file system of a release, which its hosts share."""
        if release not in self._lower:
            self._lower[release] = rootfs.tree(release)
            self._used.append(rootfs.use(self._lower[release]))
        return self._lower[release]

    def next_number(self) -> int:
        """Last part of the next host's address; none is given twice."""
        return next(self._numbers)

    def trust(self, port: int, public_key: str) -> None:
        """Add a host's key to `known_hosts`, hashed."""
        with self.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{port} {public_key}\n")
        run(["ssh-keygen", "-q", "-H", "-f", str(self.known_hosts)])
        self.known_hosts.with_name("known_hosts.old").unlink()

    def close(self) -> None:
        """End every host and remove everything."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        if self._guard.wait(CLOSE_LIMIT) != 0:
            raise RuntimeError(f"test hosts left something in {self.folder} or {self.cgroup}")
        for process in self._children:
            process.wait()
        for descriptor in self._used:
            os.close(descriptor)


def run(argv: Sequence[str]) -> str:
    """Standard output of a short command, which must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
