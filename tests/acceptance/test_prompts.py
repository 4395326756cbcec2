"""Prompt files."""

import json

import pytest

from toolkit.acceptance.prompts import BUILT_IN, load_prompts, prompts_hash
from toolkit.errors import ConfigError


def write(path, lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def good(count):
    return [json.dumps({"prompt": f"def f{i}():"}) for i in range(count)]


def test_the_built_in_set_is_varied():
    prompts = load_prompts()
    assert len(prompts) == 24
    assert BUILT_IN.is_file()
    assert len({prompt[:12] for prompt in prompts}) >= 20
    assert all(15 < len(prompt) < 500 for prompt in prompts)
    assert all(prompt.isascii() for prompt in prompts)


def test_a_file_of_ones_own(tmp_path):
    lines = good(16)
    assert load_prompts(write(tmp_path / "p.jsonl", [*lines[:3], "", *lines[3:]]))[3] == "def f3():"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*good(15), "{"], ":16: is no JSON object"),
        ([*good(15), '{"text": "a"}'], ":16: is no JSON object"),
        ([*good(15), '{"prompt": 3}'], ":16: is no JSON object"),
        ([*good(15), '{"prompt": "  "}'], ":16: is no JSON object"),
        ([*good(16), good(1)[0]], ":17: repeats"),
        (good(15), "holds 15 prompts, at least 16"),
        (["[" * 100_000], ":1: is no JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, words):
    with pytest.raises(ConfigError) as caught:
        load_prompts(write(tmp_path / "p.jsonl", lines))
    assert f"{tmp_path}/p.jsonl" in str(caught.value)
    assert words in str(caught.value)


def test_all_bad_lines_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_prompts(write(tmp_path / "p.jsonl", ["{", *good(16), "["]))
    assert len(caught.value.problems) == 2


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        load_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")


def test_the_hash_tells_sets_apart():
    assert prompts_hash(["a", "b"]) == prompts_hash(["a", "b"])
    assert len({prompts_hash(p) for p in (["a", "b"], ["b", "a"], ["a"], ["ab"], ["a", "b", ""])}) == 5
