"""Profiles that name checkpoints to fetch: what they may say, where that lies, what is planned and done."""

import copy
from pathlib import Path

import pytest

from tests.weights.checkpoints import contents
from toolkit.build.builder import checkpoint_marks
from toolkit.deploy.preview import playbook_settings
from toolkit.errors import ConfigError, ToolkitError
from toolkit.layout import Layout
from toolkit.plan.steps import CurrentRelease, Desired, Observed, make_plan
from toolkit.profile.checkpoints import located
from toolkit.profile.loading import load_profile, profile_from_data
from toolkit.service.command import unit_for
from toolkit.weights.wanted import Lacking, fetch, lacking, requests

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIRST = "model-00001-of-00003.safetensors"


def profile(tmp_path, source, revision=None, **host):
    data = copy.deepcopy(load_profile("local-cpu").data)
    data["host"] |= {"root": str(tmp_path), **host}
    data["model"]["target"] = {"source": source, "revision": revision}
    data["model"]["drafter"] = {"source": "/models/drafter"}
    return profile_from_data(data)


def problems(tmp_path, monkeypatch, *lines):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "name: x\nspeculative: {algorithm: NONE}\nmodel:\n  target:\n" + "\n".join(lines) + "\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_profile("x.yaml")
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["    source: hf://org/m@main"],
            "x.yaml:5:5: model.target: is at 'main', which moves: name its commit",
        ),
        (["    source: hf://org/m"], "model.target: needs a revision: write hf://OWNER/REPOSITORY@COMMIT"),
        (["    source: https://h/kimi/"], "model.target: needs a revision: any name for this state"),
        (["    source: http://h/kimi/", "    revision: v1"], "model.target: is no https:// URL"),
        (["    source: https://u:secret@h/kimi/", "    revision: v1"], "take out user, ? and #"),
        (
            ["    source: s3://h/kimi/"],
            "x.yaml:5:13: model.target.source: is neither `bundled`, nor a folder",
        ),
    ],
)
def test_a_wrong_source_is_told_with_its_place(tmp_path, monkeypatch, lines, said):
    told = problems(tmp_path, monkeypatch, *lines)
    assert said in told
    assert "secret" not in told


def test_the_server_gets_the_folder_and_the_release_keeps_the_source(tmp_path):
    made = profile(tmp_path, f"hf://org/m@{COMMIT}")
    layout = Layout(tmp_path)
    folder = str(tmp_path / "models" / f"org--m@{COMMIT}")
    unit = unit_for(made, release_dir=tmp_path / "r1", layout=layout, python=Path("/usr/bin/python3"))
    assert unit.argv[unit.argv.index("--model-path") + 1] == folder
    assert unit.argv[unit.argv.index("--speculative-draft-model-path") + 1] == "/models/drafter"
    assert located(made, layout).model.target.source == folder
    assert made.model_dump(mode="json")["model"]["target"]["source"] == f"hf://org/m@{COMMIT}"


def test_what_is_on_the_host_already_is_left_as_it_is(tmp_path):
    made = profile(tmp_path, "/models/kimi", "v7")
    assert located(made, Layout(tmp_path)) is made
    assert requests(made) == []
    assert lacking(made) == Lacking()


def test_a_request_has_the_profiles_terms(tmp_path):
    made = profile(
        tmp_path,
        f"hf://org/m@{COMMIT}",
        model_hub="https://mirror.example/hub",
        download_rate="100MB",
        download_files=8,
        min_free_disk="2GB",
    )
    assert requests(made) == [
        {
            "root": str(tmp_path),
            "endpoint": "https://mirror.example/hub",
            "rate": 100_000_000,
            "parallel": 8,
            "min_free": 2_000_000_000,
            "source": f"hf://org/m@{COMMIT}",
            "revision": None,
        }
    ]


def test_playbooks_get_the_requests(tmp_path, monkeypatch):
    sets = [f"model.target.source=hf://org/m@{COMMIT}", f"model.drafter.source=hf://org/d@{COMMIT}"]
    settings = playbook_settings(load_profile("local-cpu", sets=sets))
    assert [item["source"] for item in settings["weights"]] == [
        f"hf://org/m@{COMMIT}",
        f"hf://org/d@{COMMIT}",
    ]


def test_weights_come_before_the_build_and_what_serves(tmp_path):
    from tests.deploy.test_plan import ENVIRONMENT, PROFILE, manifest

    wanted = Desired(PROFILE, ENVIRONMENT, {})
    first = make_plan("x", wanted, Observed(weights=["kimi@v1: 590.0 GB"], libraries="lib"))
    assert [step.action for step in first.steps] == [
        "libraries", "weights", "build", "release", "start", "acceptance",
    ]  # fmt: skip
    release = CurrentRelease("r1", PROFILE, manifest())
    again = make_plan("x", wanted, Observed(weights=["kimi@v1: corrupt"], release=release, state="running"))
    assert [step.action for step in again.steps] == ["weights", "build", "release", "restart", "acceptance"]
    assert again.steps[1].reasons == ("its weights come anew",)


def test_what_lacks_is_told_fetched_and_then_lacks_no_more(tmp_path, server, published):
    made = profile(tmp_path, f"{server.url}/folder/", "v1")
    missing = lacking(made)
    assert missing.lines == (f"folder@v1: it is not there; 600.4 kB from {server.url}/folder/ at v1",)
    assert missing.folders == ["folder@v1"]
    steps = []
    fetch(made, lambda name, text: steps.append((name, text)), lambda text: None)
    assert steps == [("weights", missing.lines[0])]
    assert contents(tmp_path / "models" / "folder@v1") == contents(published)
    assert lacking(made) == Lacking([], None)
    marks = checkpoint_marks(made, Layout(tmp_path))["target"]
    assert set(marks) == {*contents(published)}


def test_what_does_not_fit_is_refused_before_anything_is_copied(tmp_path, server):
    made = profile(tmp_path, f"{server.url}/folder/", "v1", min_free_disk="1000TB")
    with pytest.raises(ToolkitError, match=r"folder@v1 600\.4 kB \+ kept free .* are free: .* short"):
        fetch(made, lambda name, text: None, lambda text: None)
    assert not (tmp_path / "models").exists()


def test_a_source_that_cannot_be_asked_is_told_in_the_plan(tmp_path):
    made = profile(tmp_path, "http://127.0.0.1:1/kimi/", "v1")
    line = lacking(made).lines[0]
    assert line.startswith(
        "kimi@v1: it is not there; of unknown size from http://127.0.0.1:1/kimi/ at v1; its source"
    )
    assert "Connection refused" in line


def test_the_build_takes_the_hashes_that_were_taken_on_arrival(tmp_path, server):
    from toolkit.ddtree.manifest import Cache, hashes

    made = profile(tmp_path, f"{server.url}/folder/", "v1")
    fetch(made, lambda name, text: None, lambda text: None)
    folder = tmp_path / "models" / "folder@v1"
    cache = Cache(tmp_path / "cache")
    found = hashes(folder, cache)["files"]
    assert ".weights.json" not in found
    assert not list((tmp_path / "cache").rglob("hashes/*"))  # nothing was read
    status = (folder / FIRST).stat()
    (folder / FIRST).write_bytes(b"other")
    assert hashes(folder, cache)["files"][FIRST]["size"] == 5 != status.st_size
