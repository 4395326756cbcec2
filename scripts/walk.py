"""Writes docs/walk.md: every command of walk.template.md, run against one fresh host, with what it printed.

    python -m scripts.walk [--out docs/walk.md]

As root, in the checkout. The host is one of tests/hosts; the commands run beside it, in a network of their
own, on a machine that calls itself `workstation`. What they print is not touched. A command that ends with
another status than its block says (`console status=5`) ends the run, and nothing is written.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hosts import wheelhouse
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).with_name("walk.template.md")
HOST = "inference-1"
WHEELS = "/srv/wheelhouse"
PICTURE = "report.png"  # beside the page
SSH_FOLDER = Path("/root/.ssh")
LIMIT = 600
PROMPT = "$ "
BLOCK = re.compile(r"^```(console|yaml)(?: status=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Everything that the commands write is in memory, and theirs alone.
WORKSTATION = """
hostname workstation
mount -t tmpfs tmpfs /srv
mount -t tmpfs -o mode=0700 tmpfs /root/.ssh
echo ready
exec sleep infinity
"""


class Workstation:
    """Where the commands run: a machine of its own name, beside the host.

    Args:
        network: the host's.
    """

    def __init__(self, network: Network) -> None:
        self._made = not SSH_FOLDER.exists()
        SSH_FOLDER.mkdir(mode=0o700, exist_ok=True)
        enter = ["nsenter", f"--net={network.namespace}", "unshare", "--mount", "--uts"]
        self._keeper = subprocess.Popen(
            network.command(*enter, "sh", "-ec", WORKSTATION),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._keeper.stdout is None or self._keeper.stdout.readline() != "ready\n":
            raise SystemExit("the workstation cannot be set up, see above")
        self.write("/root/.ssh/id_ed25519", network.key.read_text(encoding="utf-8"))

    def write(self, path: str, content: str) -> None:
        """Write a file that only its owner reads."""
        status, said = self.run(f"umask 077; cat > {path}", content)
        if status:
            raise SystemExit(f"{path}: {said}")

    def run(self, command: str, given: str = "") -> tuple[int, str]:
        """Status of a command line, and what it printed."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        environment = {"PATH": path, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "COLUMNS": "110"}
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        pid = str(self._keeper.pid)
        enter = [
            "nsenter",
            "--target",
            pid,
            "--net",
            "--mount",
            "--uts",
            "bash",
            "-c",
            'cd /srv && eval "$0"',
        ]
        # A program that goes on in the background would keep a pipe open.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                [*enter, command],
                env=environment,
                input=given.encode(),
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            )
            said.seek(0)
            return done.returncode, said.read().decode()

    def close(self) -> None:
        """End it."""
        self._keeper.kill()
        self._keeper.communicate()
        if self._made:
            SSH_FOLDER.rmdir()


@contextmanager
def host_and_workstation() -> Iterator[tuple[Host, Workstation]]:
    """A fresh host, and the machine beside it."""
    network = Network()
    try:
        host = Host(network, "bookworm", name=HOST, binds=[f"{wheelhouse.filled()}:{WHEELS}"], disk="6G")
        workstation = Workstation(network)
        try:
            yield host, workstation
        finally:
            workstation.close()
    finally:
        network.close()


def fingerprint_of(host: Host) -> str:
    """The fingerprint of the host's key, as the host itself tells it."""
    return host.root(["ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub"]).stdout.split()[1]


def walk() -> tuple[str, bytes]:
    """Run every block of the template; the page and its picture."""
    with host_and_workstation() as (host, workstation):
        text = TEMPLATE.read_text(encoding="utf-8").format(address=host.ip, fingerprint=fingerprint_of(host))

        def filled(block: re.Match[str]) -> str:
            kind, status, content = block[1], int(block[2] or 0), block[3]
            if kind == "yaml":
                workstation.write(content.splitlines()[0].removeprefix("# "), content)
                return block[0]
            lines: list[str] = []
            for line in content.splitlines():
                lines += [line, *shown(line.removeprefix(PROMPT), status, workstation)]
            return "\n".join(["```console", *lines, "```"])

        page = BLOCK.sub(filled, text)
        return page, base64.b64decode(workstation.run(f"base64 {PICTURE}")[1])


def shown(command: str, wanted: int, workstation: Workstation) -> list[str]:
    """What a command printed, and its status where that is not 0."""
    begin = time.monotonic()
    status, said = workstation.run(command)
    print(f"{time.monotonic() - begin:6.1f} s  {command}", file=sys.stderr, flush=True)
    if status != wanted:
        raise SystemExit(f"{command}: status {status}, expected {wanted}\n{said}")
    told = [f"{PROMPT}echo $?", str(status)] if status else []
    return [*(line.rstrip() for line in said.splitlines()), *told]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "walk.md")
    options = parser.parse_args()
    if reason := why_not() or wheelhouse.why_not():
        raise SystemExit(reason)
    page, picture = walk()
    options.out.write_text(page, encoding="utf-8")
    options.out.with_name(PICTURE).write_bytes(picture)


if __name__ == "__main__":
    main()
