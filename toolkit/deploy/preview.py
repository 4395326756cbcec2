"""What the playbooks are given, without touching any host."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from toolkit.build import package
from toolkit.build.for_profile import arguments, lock_for
from toolkit.build.libraries.install import MODULE, interpreter
from toolkit.build.lock import Lock
from toolkit.doctor.request import examination, load_request
from toolkit.errors import ToolkitError
from toolkit.layout import PYTHON, TOOL
from toolkit.profile.loading import ResolvedProfile
from toolkit.profile.schema import Profile
from toolkit.provision.gpu_host import gpu_host_settings
from toolkit.provision.requirements import requirements
from toolkit.release.locate import layout_of
from toolkit.weights import wanted as weights


def playbook_settings(resolved: ResolvedProfile) -> dict[str, Any]:
    """The variables of all playbooks; secrets are no part of them.

    Returns:
        `directories`, `packages`, `min_free_bytes`, `user` and `home` for provisioning; `gpu_host` for
        `gpu.yml`, null where the profile names no driver; `tool` (folder on the host, name of the archive),
        `libraries` (module and arguments; empty where an interpreter has them), `wheels` (their lock; null
        likewise) and `python` for the build; `weights` (a request a checkpoint) for fetching them; `doctor`
        (what a host is examined for, and what it is loaded with); `profile`, `sources` (base64) and
        `given` (how they were asked for) for the installation.
    """
    profile = resolved.profile
    layout = layout_of(profile)
    lock = lock_for(profile)
    name = f"ddtoolkit-{package.digest()}.tar.gz"
    python = profile.host.python or PYTHON
    if lock is not None:
        python = str(interpreter(layout.environments / lock.folder_name))
    return {
        **requirements(profile, layout).settings(),
        "gpu_host": gpu_host_settings(profile),
        "tool": {"folder": f"{TOOL}/{package.digest()}", "archive": name},
        "libraries": [] if lock is None else [MODULE, *arguments(profile, lock)],
        "wheels": None if lock is None else _wheels(profile, lock),
        "python": python,
        "weights": weights.requests(profile),
        "doctor": {"examination": examination(profile), "load": load_request(profile)},
        "profile": resolved.data,
        "given": resolved.given.to_json(),
        "sources": {
            item.path.name: base64.b64encode(item.path.read_bytes()).decode() for item in resolved.sources
        },
    }


def _wheels(profile: Profile, lock: Lock) -> dict[str, Any]:
    """Which wheels `ddtoolkit_wheelhouse` is asked for."""
    return {
        "engine": lock.engine,
        "lock": lock.sha256,
        "environment": lock.folder_name,
        "root": profile.host.root,
        "min_free": profile.host.min_free_disk,
    }


def write_settings(resolved: ResolvedProfile, folder: Path) -> Path:
    """Write `settings.json` and the toolkit's archive for the playbooks; the path of the settings.

    Raises:
        ToolkitError: the folder cannot be written.
    """
    settings = playbook_settings(resolved)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / settings["tool"]["archive"]).write_bytes(package.archive())
        path = folder / "settings.json"
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ToolkitError(f"{error.filename or folder}: {error.strerror}") from None
    return path
