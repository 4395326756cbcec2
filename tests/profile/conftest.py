"""Fixtures of the profile tests."""

from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDTOOLKIT_PROFILES", raising=False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small valid profile file."""
    path = tmp_path / "small.yaml"
    path.write_text("name: small\nmodel: {drafter: {source: bundled}}\nspeculative:\n  budget: 16\n")
    return path
