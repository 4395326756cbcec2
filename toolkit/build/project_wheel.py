"""This project's own wheel (PEP 427), made from what runs: a checkout, or an installed wheel of it.

No build backend is asked. The same files give the same bytes: names in order, no times, no compression, whose
results differ between zlib's versions.
"""

from __future__ import annotations

import base64
import hashlib
import stat
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import toolkit
from toolkit.errors import ToolkitError
from toolkit.resources import bundled

NAME = "ddtoolkit"
_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent
_DATA = ("profiles", "playbooks")  # beside the package in a checkout, within it in a wheel
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that a zip archive can hold
_MODE = (stat.S_IFREG | 0o644) << 16


def file_name() -> str:
    """Name of the wheel's file."""
    return f"{NAME}-{toolkit.__version__}-py3-none-any.whl"


def make_wheel(folder: Path) -> Path:
    """Write the wheel into a folder; its path.

    Raises:
        ToolkitError: what runs is neither a checkout nor an installed wheel.
        OSError: it cannot be written; nothing is left then.
    """
    about = f"{NAME}-{toolkit.__version__}.dist-info"
    described = _from_checkout() if (_CHECKOUT / "pyproject.toml").is_file() else _from_installation()
    content = {f"toolkit/{name}": path.read_bytes() for name, path in _files()}
    described["WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {NAME} {toolkit.__version__}\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n"
    ).encode()
    content |= {f"{about}/{name}": data for name, data in described.items()}
    content = dict(sorted(content.items(), key=lambda item: (item[0].startswith(about), item[0])))
    rows = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in content.items()]
    content[f"{about}/RECORD"] = "".join([*rows, f"{about}/RECORD,,\n"]).encode()
    path = folder / file_name()
    temporary = folder / f".{path.name}.new"
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as packed:
            for name, data in content.items():
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system, entry.external_attr = 3, _MODE  # Unix, whatever this machine is
                packed.writestr(entry, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _files() -> Iterator[tuple[str, Path]]:
    """The package's files by their names in it, with profiles and playbooks where a wheel has them."""
    yield from _below(_PACKAGE)
    for kind in _DATA:
        folder = bundled(kind)
        if not folder.is_relative_to(_PACKAGE):
            for name, path in _below(folder):
                yield f"_data/{kind}/{name}", path


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
            yield name.as_posix(), path


def _from_checkout() -> dict[str, bytes]:
    """What describes the distribution, as pyproject.toml says."""
    project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {"METADATA": _metadata(project).encode(), "entry_points.txt": _entry_points(project).encode()}
    for name in project["license-files"]:
        found[f"licenses/{name}"] = (_CHECKOUT / name).read_bytes()
    return found


def _metadata(project: Mapping[str, Any]) -> str:
    """Core metadata, version 2.4 (packaging.python.org, "Core metadata specifications")."""
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", project["name"]),
        ("Version", toolkit.__version__),
        ("Summary", project["description"]),
        ("License-Expression", project["license"]),
        *(("License-File", name) for name in project["license-files"]),
        ("Requires-Python", project["requires-python"]),
        *(("Requires-Dist", item) for item in project["dependencies"]),
    ]
    for extra, items in sorted(project["optional-dependencies"].items()):
        fields.append(("Provides-Extra", extra))
        fields += [("Requires-Dist", _of_extra(item, extra)) for item in items]
    fields.append(("Description-Content-Type", "text/markdown"))
    head = "".join(f"{name}: {value}\n" for name, value in fields)
    return f"{head}\n{(_CHECKOUT / project['readme']).read_text(encoding='utf-8')}"


def _of_extra(requirement: str, extra: str) -> str:
    """A requirement that holds with an extra alone (PEP 508)."""
    what, semicolon, marker = (part.strip() for part in requirement.partition(";"))
    return f"{what}; ({marker}) and extra == '{extra}'" if semicolon else f"{what}; extra == '{extra}'"


def _entry_points(project: Mapping[str, Any]) -> str:
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    blocks = [
        "".join([f"[{group}]\n", *(f"{name} = {value}\n" for name, value in sorted(points.items()))])
        for group, points in sorted(groups.items())
    ]
    return "\n".join(blocks)


def _from_installation() -> dict[str, bytes]:
    """The same from the wheel that this was installed from."""
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Path(str(found.locate_file("toolkit"))).resolve() != _PACKAGE:
        raise ToolkitError(
            f"no wheel can be made of {_PACKAGE}: it is neither a checkout nor installed from a wheel",
            hint="run it from a checkout, or from where pip installed it; or add --no-control",
        )
    named = {}
    for item in found.files or ():
        place, _, name = item.as_posix().partition("/")
        if place.endswith(".dist-info") and (name in ("METADATA", "entry_points.txt") or "/" in name):
            named[name] = Path(str(found.locate_file(item))).read_bytes()
    return named


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
