"""Small Debian packages built for a test, and the apt repository of them that a host is shown."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from tests.hosts.machines import Host

REPOSITORY = "/srv/packages"


def package(
    folder: Path,
    name: str,
    version: str,
    files: dict[str, str] | None = None,
    scripts: dict[str, str] | None = None,
    **fields: str,
) -> None:
    """Build one package whose files are scripts and units, with scripts of its maintainer."""
    root = folder / ".build"
    control = {"Package": name, "Version": version, "Architecture": "all", **fields}
    control |= {"Maintainer": "tests <tests@example.org>", "Description": name}
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text("".join(f"{key}: {value}\n" for key, value in control.items()))
    for script, text in (scripts or {}).items():
        (root / "DEBIAN" / script).write_text(text)
        (root / "DEBIAN" / script).chmod(0o755)
    for path, text in (files or {}).items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o644 if path.endswith(".service") else 0o755)
    command = ["dpkg-deb", "--root-owner-group", "--build", root, folder / f"{name}_{version}_all.deb"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["rm", "-r", root], check=True)


def index(folder: Path) -> None:
    """Write `Packages`, which apt reads."""
    entries = []
    for path in sorted(folder.glob("*.deb")):
        fields = subprocess.run(
            ["dpkg-deb", "--field", path], check=True, capture_output=True, text=True
        ).stdout
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        entries.append(f"{fields}Filename: ./{path.name}\nSize: {len(data)}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(entries))


def forget_sources(host: Host) -> None:
    """Take out the sources of the Debian that the host was made from: nothing answers there."""
    host.root(["sh", "-c", "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*"])


def add_source(host: Host) -> None:
    """Configure the repository as an apt source."""
    line = f"deb [trusted=yes] file:{REPOSITORY} ./\n"
    host.path("/etc/apt/sources.list.d/nvidia.list").write_text(line)


def apt_install(host: Host, *names: str) -> None:
    """Install packages by hand."""
    host.root(["apt-get", "-q", "update"])
    host.root(["apt-get", "-q", "-y", "install", *names])
