"""One file a case: what is refused with exactly which lines, and what is read as which value."""

import json
from pathlib import Path

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile

CASES = Path(__file__).parent / "cases"
REFUSED = sorted((CASES / "refused").glob("*.yaml"))
ACCEPTED = sorted((CASES / "accepted").glob("*.yaml"))


def test_cases_are_there():
    assert len(REFUSED) >= 40
    assert len(ACCEPTED) >= 6


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_refused(path):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    lines = [str(problem).replace(f"{path}:", "", 1) for problem in caught.value.problems]
    assert lines == path.with_suffix(".txt").read_text().splitlines()
    assert all(problem.source == str(path) for problem in caught.value.problems)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_accepted(path):
    data = load_profile(str(path)).data
    for key, value in json.loads(path.with_suffix(".json").read_text()).items():
        found = data
        for part in key.split("."):
            found = found[part]
        assert (key, found, type(found)) == (key, value, type(value))


def test_a_secret_written_inline_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        load_profile(str(CASES / "refused" / "secret_inline.yaml"))
    assert "sk-very-secret" not in str(caught.value) + repr(caught.value.problems)


def test_a_tag_runs_nothing(tmp_path):
    path = tmp_path / "tag.yaml"
    path.write_text(f'name: !!python/object/apply:os.system ["touch {tmp_path}/owned"]\n')
    with pytest.raises(ConfigError, match="not allowed"):
        load_profile(str(path))
    assert not (tmp_path / "owned").exists()
