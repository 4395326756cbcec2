"""Saving swapped values: the overlay gives the same profile as the swap."""

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
        (None, ["speculative"], "no assignment"),
        (None, ["name=x"], "cannot be set"),
        ("# why\nservice: {port: 1}\n", ["speculative.budget=8"], "site.yaml:1: has comments"),
        ("service:\n  port: 1  # why\n", ["speculative.budget=8"], "site.yaml:2: has comments"),
        ("- a\n", ["speculative.budget=8"], "no map of keys"),
        ("a: [\n", ["speculative.budget=8"], "cannot be read"),
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
