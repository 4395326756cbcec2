"""Wheels made on the spot, and locks for them."""

import base64
import hashlib
import random
import zipfile
from pathlib import Path

from toolkit.build.lock import Lock
from toolkit.build.wheels.house import open_house
from toolkit.fleet.send_wheels import Order, bring
from toolkit.inventory.host import Host
from toolkit.layout import Layout


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, requires: str = "", payload: bytes = b""
) -> Path:
    """A pure wheel with one module of that name, and `payload` in a file beside it."""
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
        if payload:
            packed.writestr(f"{name}.bin", payload)
    return path


def checksums(folder: Path) -> Path:
    """Write the checksums that make a folder of wheels a wheelhouse; the folder."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.whl"))]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


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


class Site:
    """A wheelhouse here, with wheels of a lock, and a host that they are brought to.

    Attributes:
        house: the folder.
        store: where they lie on the host.
        said: every line that was told.
    """

    def __init__(self, folder: Path, host: Host, root: Path | None, size: int = 3_000_000) -> None:
        self.host, self.root = host, root
        self.house = folder / "house"
        self.house.mkdir()
        self.store = Layout(root).wheels
        self.large = make_wheel(self.house, "large", payload=random.Random(7).randbytes(size))
        self.small = make_wheel(self.house, "small")
        self.lock = lock_for(self.large, self.small)
        checksums(self.house)
        self.said: list[str] = []

    def order(self, **changed) -> Order:
        root = None if self.root is None else str(self.root)
        return Order(open_house(self.house), self.lock, root, **changed)

    def tell(self, message) -> None:
        self.said.append(str(message.get("line")))

    def bring(self, **changed) -> dict:
        return bring(self.host, self.order(**changed), self.tell)

    def whole(self, store: Path | None = None) -> bool:
        """Whether the store, as this machine sees it, has both."""
        wheels = (self.large, self.small)
        return all(sha256((store or self.store) / wheel.name) == sha256(wheel) for wheel in wheels)
