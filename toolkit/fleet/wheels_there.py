"""Whether a folder of wheels on a host (`host.wheelhouse`) has what a lock asks for; by names alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from toolkit.build.lock import CUDA, Lock
from toolkit.build.wheelhouse import Target
from toolkit.errors import ConfigError, ToolkitError
from toolkit.inventory.host import Host
from toolkit.remote.agent import module_on
from toolkit.remote.protocol import error_from_json

MODULE = "toolkit.build.wheels"
_SHOWN = 3


def check_there(host: Host, lock: Lock, folder: str, root: str | None) -> None:
    """Look at the folder before anything is changed on the host; contents are left to pip.

    Args:
        host: the host.
        lock: what will be installed from there.
        folder: the folder on the host.
        root: folder on the host that everything lies below; None for the system's places.

    Raises:
        UnreachableError: the host cannot be reached.
        ToolkitError: the folder is not there, or lacks wheels for the host's Python.
    """
    fields = {"lock": lock.sha256, "environment": lock.folder_name, "folder": folder}
    with module_on(host, [MODULE]) as agent:
        agent.send({"verb": "list", "root": root, **fields})
        while "list" not in (message := agent.receive()):
            if "error" in message:
                raise error_from_json({**message, "message": message["error"]}, host.name)
    found: Mapping[str, Any] = message["list"]
    if not found["needed"]:
        return
    try:
        target = Target(found["python"], found["machine"])
    except ConfigError:
        return  # a Python that will not do is named by what looks at that
    make = f"ddtoolkit wheelhouse --out DIR --engine {lock.engine} --python {target.python}"
    hint = f"{make} --machine {target.machine}, where there is an index; then bring it to {folder} there"
    if found["names"] is None:
        said = f"{host.name}: no wheelhouse {folder} on this host (host.wheelhouse)"
        raise ToolkitError(f"{said}; nothing was changed", hint=hint)
    if missing := lacking_in(found["names"], found["cuda"], lock, target):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ToolkitError(
            f"{host.name}: the wheelhouse {folder} on this host has no {', '.join(missing[:_SHOWN])}{more} "
            f"for Python {target.python} on {target.machine}; nothing was changed",
            hint=hint,
        )


def lacking_in(names: Collection[str], cuda: Collection[str], lock: Lock, target: Target) -> list[str]:
    """The requirements of a lock for which none of these files suits a host, `name==version` each.

    Args:
        names: of the wheels in the folder.
        cuda: those of them that are builds of torch which load the CUDA libraries.
        lock: the lock.
        target: the host.
    """
    kinds = {(tag.interpreter, tag.abi) for tag in target.tags()}
    there: dict[tuple[str, str], list[str]] = {}
    for name in names:
        try:
            distribution, version, _, tags = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        if any((tag.interpreter, tag.abi) in kinds and _runs_on(tag, target) for tag in tags):
            there.setdefault((distribution, version.public), []).append(name)
    wanted = [
        (canonicalize_name(name), version)
        for block in lock.blocks()
        if target.wants(block)
        for name, version in Lock(lock.engine, block).pins()
    ]
    torch = next((there.get((name, _public(version)), []) for name, version in wanted if name == "torch"), [])
    # pip chooses among several builds; only where each loads CUDA are its libraries needed for certain.
    without = not torch or not all(name in cuda for name in torch)
    return [
        f"{name}=={version}"
        for name, version in wanted
        if (name, _public(version)) not in there and not (without and name.startswith(CUDA))
    ]


def _public(version: str) -> str:
    return Version(version).public


def _runs_on(tag: Tag, target: Target) -> bool:
    """Whether a wheel's platform is that of the host; which glibc it wants is left to pip."""
    linux = tag.platform.startswith(("linux_", "manylinux"))
    return tag.platform == "any" or (linux and tag.platform.endswith(f"_{target.machine}"))
