"""A build that need not be made again, since a release has it: what starts the engine takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from toolkit.build.bootstrap import tree_digest
from toolkit.build.builder import checkpoint_marks
from toolkit.build.environment import MARKER, Environment, damage
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.release.locate import layout_of
from toolkit.release.store import Release, content_digest

# What the engine's build is told. The tree's width is left out: no kernel of a CPU is compiled for it.
_KEYS = (
    ("hardware", "device"),
    ("engine", "dtype"),
    ("model", "target", "source"),
    ("model", "drafter", "source"),
    ("speculative", "block_size"),
    ("speculative", "expansion"),
)


def built_already(profile: Profile, environment: Environment, base: Release | None) -> dict[str, Any] | None:
    """The manifest of a release whose build would come out the same for `profile`; None where it may not.

    Only for a CPU: what a GPU's build depends on cannot be told without asking the driver.

    Args:
        profile: what is to be built.
        environment: the engine's environment.
        base: the release before.
    """
    if base is None or profile.hardware.device != "cpu":
        return None
    try:
        manifest = base.manifest
        whole = (
            content_digest(base.built_profile, manifest) == base.digest and base.environment_damage() is None
        )
        built, engine = manifest["environment"], manifest["engine"]
        before, now = base.profile, profile.model_dump(mode="json", by_alias=True)
        same = (
            whole
            and built["digest"] == environment.digest
            and manifest["checkpoints"] == checkpoint_marks(profile, layout_of(profile))
            and all(_value(before, key) == _value(now, key) for key in _KEYS)
            and (engine["device"]["name"], engine["device"]["cores"]) == _cpu()
        )
        if not same:
            return None
        if profile.model.drafter is None:
            return manifest
        shapes = {**engine["shapes"], "verify_width": profile.speculative.budget + 1}
        return {**manifest, "engine": {**engine, "shapes": shapes}}
    except (ToolkitError, KeyError, TypeError):
        return None  # a damaged release is no base for anything


def discard_changed(environment: Environment, layout: Layout) -> None:
    """Let an environment whose code hands have changed count as absent, so that the build makes it anew."""
    folder = layout.environments / environment.digest
    if damage(folder) is None and tree_digest(folder / "toolkit") != environment.source:
        (folder / MARKER).unlink()


def fits(manifest: dict[str, Any], environment: Environment) -> bool:
    """Whether a build that was made ahead is of this environment, and its code is in place."""
    try:
        built = manifest["environment"]
        return built["digest"] == environment.digest and damage(Path(built["path"])) is None
    except (KeyError, TypeError):
        return False


def _value(profile: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = profile
    for key in path:
        value = None if value is None else value.get(key)
    return value


def _cpu() -> tuple[str, int]:
    """Name and number of this machine's processors, as the engine's build records them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "", len(os.sched_getaffinity(0))
