"""When a build is taken from the release before, and when it is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.build.environment import Environment, materialise
from toolkit.deploy.reuse import built_already, fits
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release, content_digest
from toolkit.service.command import unit_for

NAME = "local-cpu"
PYTHON = Path(sys.executable)


@pytest.fixture
def environment() -> Environment:
    return Environment(PYTHON, {"python": "3"}, "source")


@pytest.fixture
def base(tmp_path: Path, environment: Environment) -> Release:
    """A release on this machine, as a deploy stages it."""
    layout = Layout(tmp_path)
    layout.environments.mkdir(parents=True)
    home = materialise(environment, layout.environments)
    device = {"name": cpu(), "cores": len(os.sched_getaffinity(0))}
    manifest = {
        "environment": {"path": str(home), "digest": environment.digest},
        "checkpoints": {},
        "engine": {"device": device, "shapes": {"verify_width": 17}},
    }
    profile = load_profile(NAME).data
    store = ServiceHost(layout, NAME).store
    release_id = store.new_id(content_digest(profile, manifest))
    unit = unit_for(
        load_profile(NAME).profile, release_dir=store.path(release_id), layout=layout, python=PYTHON
    )
    return store.stage(release_id, profile=profile, unit=unit, manifest=manifest)


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def changed(*sets: str) -> Any:
    return load_profile(NAME, sets=sets).profile


def test_another_tree_width_needs_no_build_on_a_cpu(base: Release, environment: Environment) -> None:
    found = built_already(changed("speculative.budget=20"), environment, base)
    assert found is not None
    assert found["engine"]["shapes"]["verify_width"] == 21
    assert found["environment"] == base.manifest["environment"]


@pytest.mark.parametrize(
    "sets",
    [
        ("engine.dtype=bfloat16",),
        ("model.target.source=/elsewhere", "model.drafter.source=/elsewhere"),
        ("speculative.block_size=4",),
        ("speculative.expansion=best_first",),
    ],
)
def test_what_the_build_is_told_needs_one(
    base: Release, environment: Environment, sets: tuple[str, ...]
) -> None:
    assert built_already(changed(*sets), environment, base) is None


def _other_processor(manifest: dict[str, Any]) -> None:
    manifest["engine"]["device"]["cores"] += 1


def _other_checkpoint(manifest: dict[str, Any]) -> None:
    manifest["checkpoints"] = {"target": {"model.safetensors": [1, 2, 3]}}


def _no_code(manifest: dict[str, Any]) -> None:
    manifest["environment"]["path"] += "-gone"


@pytest.mark.parametrize("change", [_other_processor, _other_checkpoint, _no_code])
def test_another_machine_checkpoint_or_code_needs_one(
    base: Release, environment: Environment, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    manifest = base.manifest
    change(manifest)
    store = ServiceHost(Layout(tmp_path), NAME).store
    release_id = store.new_id(content_digest(base.profile, manifest))
    other = store.stage(
        release_id, profile=base.profile, unit=replace(base.unit, release=release_id), manifest=manifest
    )
    assert built_already(changed(), environment, base) is not None
    assert built_already(changed(), environment, other) is None


def test_a_release_that_hands_changed_is_no_base(base: Release, environment: Environment) -> None:
    path = base.path / "manifest.json"
    path.chmod(0o644)
    path.write_text(path.read_text(encoding="utf-8").replace('"verify_width": 17', '"verify_width": 9'))
    assert built_already(changed(), environment, base) is None


def test_a_build_of_other_code_does_not_fit(base: Release, environment: Environment) -> None:
    assert fits(base.manifest, environment)
    assert not fits(base.manifest, replace(environment, source="other"))
    assert not fits({}, environment)
