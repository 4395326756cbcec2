"""A build that fails tells its reason alone, whatever the engine printed before."""

from pathlib import Path

import pytest

from toolkit.build.builder import build
from toolkit.build.environment import Environment
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            'echo "ddtree build: /x: no such checkpoint directory" >&2; exit 2',
            "the engine's build failed: /x: no such checkpoint directory",
        ),
        ("exit 3", "the engine's build ended with exit status 3, after the line: target: /x"),
        ("kill -9 $$", "the engine's build ended with SIGKILL, after the line: target: /x"),
    ],
)
def test_a_failed_build_tells_its_reason_alone(tmp_path: Path, ends: str, message: str) -> None:
    engine = tmp_path / "python"
    engine.write_text(f'#!/bin/sh\necho "device: CPU" >&2; echo "target: /x" >&2; {ends}\n')
    engine.chmod(0o755)
    layout = Layout(tmp_path)
    layout.environments.mkdir()
    lines: list[str] = []
    with pytest.raises(ToolkitError) as caught:
        build(
            load_profile("local-cpu").profile, Environment(engine, {}, "aa"), layout, on_progress=lines.append
        )
    assert caught.value.message == message
    assert lines[:2] == ["device: CPU", "target: /x"]
