"""Wheels made on the spot, and locks for them."""

import base64
import hashlib
import zipfile
from pathlib import Path

from toolkit.build.libraries.lock import Lock


def make_wheel(folder: Path, name: str, version: str = "1.0", *, requires: str = "") -> Path:
    """A pure wheel with one module of that name."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f'VERSION = "{version}"\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{item},sha256={_record(text)},{len(text)}\n" for item, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as packed:
        for item, text in files.items():
            packed.writestr(item, text)
    return path


def lock_for(*wheels: Path) -> Lock:
    """A lock that names these files, `name-version-...whl`."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
    return Lock("mini", "# A lock.\n" + "".join(lines))


def sha256(path: Path) -> str:
    """As sha256sum(1) prints it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
