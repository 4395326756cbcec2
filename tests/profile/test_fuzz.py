"""Whatever a file or an option holds, the answer is a profile or a ConfigError."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.errors import ConfigError
from toolkit.profile.loading import change_profile, load_profile, profile_from_data
from toolkit.profile.nodes import MAX_BYTES
from toolkit.profile.shape import profile_keys

SHARED_FOLDER = HealthCheck.function_scoped_fixture
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[SHARED_FOLDER])
BASE = "name: a\nmodel: {drafter: {source: bundled}}\n"
KEYS = st.sampled_from([*profile_keys(), "nope", "service.environment.A", "engine.extra_args.x"])
WORDS = st.sampled_from(["on", "1e3", "~", "9s", "bundled", "DDTREE"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
PUNCTUATION = [*"[]{}:,-?&*!|>'\"%@`#\t\n\r\\ ", "- ", ": ", "\n  ", "\x85", "\u2028", "\ufeff", "\x1f"]
TOKENS = ["name", "budget", "1", "&a ", "*a", "<<: ", "!!str ", "---\n", "...\n", "%YAML 1.1\n", "\\x"]
FRAGMENTS = st.lists(st.sampled_from(PUNCTUATION + TOKENS), max_size=30).map("".join)


def refusal(call, *arguments, **options):
    """The ConfigError that a call ends with, None if it succeeds; anything else goes through."""
    try:
        call(*arguments, **options)
    except ConfigError as error:
        return error
    return None


def loads(path, **options):
    """Whether the profile loads; each problem has a message and a source."""
    error = refusal(load_profile, str(path), **options)
    if error is None:
        return True
    assert error.problems
    assert all(problem.message and problem.source for problem in error.problems)
    return False


@SETTINGS
@given(raw=st.binary(max_size=200) | st.one_of(FRAGMENTS, st.text(max_size=80)).map(str.encode))
def test_any_bytes(tmp_path, raw):
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(raw)
    loads(path)


@SETTINGS
@given(fragment=FRAGMENTS)
def test_any_fragment_in_a_profile(tmp_path, fragment):
    path = tmp_path / "fuzz.yaml"
    path.write_text(BASE + "speculative:\n  " + fragment, newline="")
    loads(path)


@SETTINGS
@given(key=KEYS, value=VALUES)
def test_any_value_at_any_key(tmp_path, key, value):
    data = {"name": "a", "model": {"drafter": {"source": "bundled"}}}
    at = data
    *parents, last = key.split(".")
    for part in parents:
        at = at.setdefault(part, {})
    at[last] = value
    path = tmp_path / "fuzz.yaml"
    path.write_text(yaml.safe_dump(data))
    loads(path)
    stored = json.loads(json.dumps(data))
    for error in (
        refusal(profile_from_data, stored),
        refusal(change_profile, stored, ["speculative.budget=9"]),
    ):
        assert error is None or error.problems


@SETTINGS
@given(key=KEYS | st.text(max_size=10), value=st.text(max_size=20) | FRAGMENTS)
def test_any_set(small, key, value):
    loads(small, sets=[f"{key}={value}"])


@SETTINGS
@given(value=st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=30))
def test_text_arrives_as_it_was_written(small, value):
    for text in (f"service.environment.A={value}", f"model.served_name=x{value}"):
        key, _, written = text.partition("=")
        found = load_profile(str(small), sets=[text]).data
        for part in key.split("."):
            found = found[part]
        assert found == written


@pytest.mark.timeout(60)
def test_the_largest_files_are_read_in_bounded_time(tmp_path):
    path = tmp_path / "large.yaml"
    heads = ["[", "{a: ", "? ", "- ", "&a ", '"', "a: b\n", "a:\n  - b\n"]
    for text in [head * (MAX_BYTES // len(head)) for head in heads]:
        path.write_text(text)
        assert not loads(path)
