"""Saving swapped values: the overlay gives the same profile as the swap."""

import os
from pathlib import Path

import pytest

from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.loading import load_profile
from toolkit.profile.overlay import overlay_with

SETS = (
    "speculative.budget=12",
    "engine.extra_args=[--log-level, debug]",
    "service.load_timeout=90s",
    "model.served_name=12",
    "host.python=null",
)


def test_a_new_overlay_gives_what_the_assignments_give(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    overlay_with(path, SETS).write()
    by_file = load_profile("local-cpu", overlays=[path]).data
    assert by_file == load_profile("local-cpu", sets=SETS).data
    assert by_file["model"]["served_name"] == "12"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_an_overlay_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("service: {port: 30005}\nspeculative: {budget: 32}\n")
    path.chmod(0o600)
    overlay_with(path, ["speculative.budget=12", "speculative.topk_cap=4"]).write()
    data = load_profile("local-cpu", overlays=[path]).data
    assert (data["service"]["port"], data["speculative"]["budget"]) == (30005, 12)
    assert data["speculative"]["topk_cap"] == 4
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "sets", "said"),
    [
        (None, ["speculative.budgt=1"], "did you mean budget"),
        (None, ["service.host=0.0.0.0"], "did you mean bind"),
        (None, ["speculative"], "no assignment"),
        (None, ["name=x"], "cannot be set"),
        ("# why\nservice: {port: 1}\n", ["speculative.budget=8"], "site.yaml:1: has comments"),
        ("service:\n  port: 1  # why\n", ["speculative.budget=8"], "site.yaml:2: has comments"),
        ("- a\n", ["speculative.budget=8"], "must be a map of keys"),
        ("a: [\n", ["speculative.budget=8"], "is no YAML"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_file_stays(
    tmp_path: Path, content: str | None, sets: list[str], said: str
) -> None:
    path = tmp_path / "site.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        overlay_with(path, sets)
    assert (path.read_text() if path.exists() else None) == content


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        overlay_with(tmp_path / "absent" / "x.yaml", ["speculative.budget=8"])


def test_a_folder_that_goes_away_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    overlay = overlay_with(folder / "x.yaml", ["speculative.budget=8"])
    folder.rmdir()
    with pytest.raises(ToolkitError, match="the swap itself is done"):
        overlay.write()


HELD = (
    "service:\n  environment:\n    A: on\n    B: 010\n    C: 1:30\n    D: 0.10\n    E: '~'\n    F: 'a # b'\n"
    "    G: |-\n      # text\n"
)


@pytest.mark.parametrize("value", ["1e3", "010", "on", "~", "", " x #b", "a: b", "é 😀", "it's"])
def test_values_are_kept_byte_for_byte_with_those_that_the_file_had(tmp_path: Path, value: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(HELD)
    held = load_profile("local-cpu", overlays=[path]).data["service"]["environment"]
    assert held["A"] == "on"
    sets = [f"service.environment.X={value}", "engine.extra_args=[on, 010, 1e3, '']"]
    overlay_with(path, sets).write()
    saved = load_profile("local-cpu", overlays=[path])
    assert saved.data["service"]["environment"] == held | {"X": value}
    assert saved.data["engine"]["extra_args"] == ["on", "010", "1e3", ""]
    overlay_with(path, sets).write()  # what it wrote itself has no comments
    assert load_profile("local-cpu", overlays=[path]).data == saved.data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("speculativ: {budget: 8}\n", "site.yaml:1:1: speculativ: no such key"),
        ("speculative: {topk_cap: wide}\n", "topk_cap: must be an integer"),
        ("service: {port: 1}\nservice: {port: 2}\n", "the key is written twice"),
        ("name: other\n", "an overlay cannot change the name"),
        ("description: |  # why\n  text\n", "site.yaml:1: has comments"),
        ("# nothing yet\n", "empty overlay"),
    ],
)
def test_an_overlay_that_no_deploy_would_take_is_refused_before_the_swap(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        overlay_with(path, ["speculative.budget=8"])
    assert path.read_text() == content


def test_a_whole_map_is_not_what_an_overlay_can_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would not replace the whole map"):
        overlay_with(tmp_path / "x.yaml", ["service.environment={A: b}"])


def test_a_pipe_is_no_overlay_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="is no file"):
        overlay_with(tmp_path / "x.yaml", ["speculative.budget=8"])


def test_a_link_stays_one_and_its_file_keeps_its_owner(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "site.yaml"
    real.write_text("service: {port: 30005}\n")
    owner = 65534 if os.getuid() == 0 else os.getuid()
    os.chown(real, owner, -1)
    link.symlink_to(real.name)
    overlay_with(link, ["speculative.budget=12"]).write()
    assert link.is_symlink()
    assert (real.stat().st_uid, load_profile("local-cpu", overlays=[real]).data["service"]["port"]) == (
        owner,
        30005,
    )


def test_what_others_wrote_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    overlay = overlay_with(path, ["speculative.budget=12"])
    path.write_text("service: {port: 30005}\n")
    overlay.write()
    data = load_profile("local-cpu", overlays=[path]).data
    assert (data["service"]["port"], data["speculative"]["budget"]) == (30005, 12)
    path.write_text("# mine\nservice: {port: 30005}\n")
    with pytest.raises(ToolkitError, match="has comments, which saving would lose; the swap itself is done"):
        overlay.write()
    assert path.read_text().startswith("# mine")
