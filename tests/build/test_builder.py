"""A build that fails tells its reason alone, whatever the engine printed before."""

import json
from pathlib import Path

import pytest

from tests.sglang.checkpoints import QWEN3
from toolkit.build.builder import build
from toolkit.build.environment import Environment
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.profile.schema import Profile
from toolkit.service.command import unit_for


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


@pytest.mark.parametrize("service", [False, True])
def test_what_builds_kept_is_taken_over_from_the_place_of_a_service_called_build(
    tmp_path: Path, service: bool
) -> None:
    engine = tmp_path / "python"
    engine.write_text(
        '#!/bin/sh\nwhile [ "$1" != --cache-dir ]; do shift; done; mkdir -p "$2"; echo new > "$2/new"\n'
        'echo "{}" > "$4"\n'
    )
    engine.chmod(0o755)
    layout = Layout(tmp_path / "root")
    layout.environments.mkdir(parents=True)
    cache = layout.service("build").cache
    (cache / "hashes").mkdir(parents=True)
    (cache / "hashes" / "a.json").write_text("1")
    if service:
        layout.service("build").releases.mkdir(parents=True)
    for _ in range(2):
        build(load_profile("local-cpu").profile, Environment(engine, {}, "aa"), layout)
    assert (cache / "hashes" / "a.json").exists() is service
    assert (layout.builds / "hashes" / "a.json").exists() is not service
    assert (layout.builds / "new").read_text() == "new\n"
    assert not (cache / "new").exists()


def test_the_build_of_sglang_reads_the_flags_that_the_server_gets(tmp_path: Path) -> None:
    engine = tmp_path / "python"
    engine.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$SGLANG_X" "$@" > "$0.said"\n'
        'while [ "$1" != --out ]; do shift; done; echo \'{"versions": {}}\' > "$2"\n'
    )
    engine.chmod(0o755)
    layout = Layout(tmp_path)
    layout.environments.mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3))
    profile = Profile.model_validate(
        {
            "schema": 1,
            "name": "big",
            "hardware": {"device": "cuda", "count": 8},
            "engine": {"kind": "sglang", "version": "0.5.17", "extra_args": ["--tool-call-parser=x"]},
            "model": {"target": {"source": str(model)}},
            "speculative": {"algorithm": "NONE"},
            "parallelism": {"tp": 8},
            "service": {"environment": {"SGLANG_X": "a b"}},
        }
    )
    manifest = build(profile, Environment(engine, {}, "aa"), layout)
    assert manifest["engine"] == {"versions": {}}
    path, variable, *words = Path(f"{engine}.said").read_text().splitlines()
    assert (path, variable) == (manifest["environment"]["path"], "a b")
    assert words[:3] == ["-P", "-m", "toolkit.ddtree.sglang.build"]
    flags = words[words.index("--") + 1 :]
    unit = unit_for(profile, release_dir=tmp_path / "r", layout=layout, python=engine)
    assert flags == list(unit.argv[3:])
    assert flags[-1] == "--tool-call-parser=x"


def test_a_checkpoint_that_is_another_model_is_told_before_the_engine_is_asked(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.environments.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = {"target": {"source": str(tmp_path), "shape": "kimi-k2.6-int4"}}
    settings = {"engine": {"kind": "sglang"}, "model": model, "speculative": {"algorithm": "NONE"}}
    profile = Profile.model_validate({"schema": 1, "name": "big", **settings})
    with pytest.raises(ToolkitError, match=r"config\.json: attention is MHA, and kimi-k2\.6-int4 has MLA"):
        build(profile, Environment(tmp_path / "no-python", {}, "aa"), layout)
