"""The build: environment, checkpoint hashes, kernel warm-up and tuning, and the manifest of it all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.build.environment import Environment, materialise
from toolkit.build.memory_found import check_checkpoints
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.checkpoints import located
from toolkit.profile.schema import Checkpoint, Profile
from toolkit.service.command import flags_for
from toolkit.service.processes import signal_name
from toolkit.weights.store import MARKER

_EMBEDDED = "toolkit.ddtree.build"
_SGLANG = "toolkit.ddtree.sglang.build"
_FORMER = "build"
# What the engine's build puts before the reason of a failure, its last line.
_REASON = "ddtree build: "


def build(
    profile: Profile,
    environment: Environment,
    layout: Layout,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Make the environment and build the engine in it.

    Returns:
        The manifest: `environment` (path, digest, versions, source) and `engine`, what the engine's own build
        reported (checkpoint hashes, device facts, tuned values).

    Raises:
        ToolkitError: a checkpoint is missing, broken, or not what the profile says, the disk is full, or the
            build failed; the message has the engine's own reason.
    """
    home = materialise(environment, layout.environments)
    for line in check_checkpoints(profile, located(profile, layout)):
        if on_progress is not None:
            on_progress(line)
    profile = located(profile, layout)
    return {
        "environment": {
            "path": str(home),
            "digest": environment.digest,
            "python": str(environment.python),
            "versions": environment.versions,
            "source": environment.source,
            "lock": environment.lock,
        },
        "checkpoints": checkpoint_marks(profile, layout),
        "engine": _engine_build(profile, environment, home, layout, on_progress),
    }


def checkpoint_marks(profile: Profile, layout: Layout) -> dict[str, Any]:
    """What tells cheaply whether a checkpoint changed: size, mtime and inode of each of its files.

    Bundled checkpoints are part of the environment and need no mark.
    """
    profile = located(profile, layout)
    marks: dict[str, Any] = {}
    for role, checkpoint in (("target", profile.model.target), ("drafter", profile.model.drafter)):
        if checkpoint is None or checkpoint.source == "bundled":
            continue
        folder = Path(checkpoint.source).expanduser()
        marks[role] = {
            path.name: [(status := path.stat()).st_size, status.st_mtime_ns, status.st_ino]
            for path in sorted(folder.glob("*"))
            if path.is_file() and path.name != MARKER
        }
    return marks


def _location(checkpoint: Checkpoint) -> str:
    return "bundled" if checkpoint.source == "bundled" else str(Path(checkpoint.source).expanduser())


def _embedded(profile: Profile) -> list[str]:
    """Arguments of the embedded engine's build."""
    words = ["--model-path", _location(profile.model.target)]
    if profile.model.drafter is not None:
        words += ["--speculative-draft-model-path", _location(profile.model.drafter)]
    words += ["--device", profile.hardware.device, "--dtype", profile.engine.dtype]
    words += ["--speculative-ddtree-budget", str(profile.speculative.budget)]
    words += ["--speculative-ddtree-expansion", profile.speculative.expansion]
    if profile.model.drafter is not None:
        words += ["--speculative-dflash-block-size", str(profile.speculative.block_size)]
    return words


def _engine_build(
    profile: Profile,
    environment: Environment,
    home: Path,
    layout: Layout,
    on_progress: Callable[[str], None] | None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-build-") as scratch:
        out = Path(scratch) / "manifest.json"
        place = ["--cache-dir", str(_kept(layout)), "--out", str(out)]
        command = [str(environment.python), "-P", "-m"]
        if profile.engine.kind == "sglang":
            flags = [*flags_for(profile, layout.service(profile.name).cache), *profile.engine.extra_args]
            command += [_SGLANG, "--device", profile.hardware.device, *place, "--", *flags]
        else:
            command += [_EMBEDDED, *_embedded(profile), *place]
        lines: list[str] = []
        with subprocess.Popen(
            command,
            cwd=home,
            env=os.environ | profile.service.environment | {"PYTHONPATH": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stderr is not None  # noqa: S101  Popen was told to make it
            for line in child.stderr:
                lines.append(line.rstrip())
                if on_progress is not None:
                    on_progress(lines[-1])
        if child.returncode != 0 or not out.is_file():
            raise _failed(child.returncode, lines[-1] if lines else "")
        manifest: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return manifest


def _kept(layout: Layout) -> Path:
    """The folder of what builds keep; earlier versions had it where the cache of a service `build` lies."""
    before = layout.service(_FORMER).cache
    if not layout.builds.exists() and not layout.service(_FORMER).base.exists():
        with contextlib.suppress(OSError):  # it is not there, or is made anew, which takes a while
            status = before.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                before.rename(layout.builds)
    return layout.builds


def _failed(status: int, last_line: str) -> ToolkitError:
    """What is told of a build that failed: its own reason where it gave one, else how far it came."""
    if last_line.startswith(_REASON):
        return ToolkitError(f"the engine's build failed: {last_line.removeprefix(_REASON)}")
    how = f"exit status {status}" if status >= 0 else signal_name(-status)
    after = f", after the line: {last_line}" if last_line else ""
    return ToolkitError(
        f"the engine's build ended with {how}{after}", hint="--verbose shows every line that it prints"
    )
