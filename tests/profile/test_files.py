"""Files that are no profile, and files that look odd but are one."""

import os

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile

GOOD = b"name: a\nmodel: {drafter: {source: bundled}}\ndescription: x\n"


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("raw", "place", "message"),
    [
        (b"name: a\ndescription: caf\xe9\n", (2, 17), "is not UTF-8 text"),
        ("name: a\n".encode("utf-16"), (1, 1), "is not UTF-8 text"),
        (b"name: a\r\ndescription: \xff", (2, 14), "is not UTF-8 text"),
        (b"name: a\ndescription: x\0y\n", (2, 15), "holds a NUL (U+0000)"),
        (b"name: a\ndescription: \x1b[31m\n", (2, 14), "holds a control character (U+001B)"),
        (b"name: a\n#" + b"x" * (10 << 20), (None, None), "is larger than 128 KiB"),
        (b"%YAML 9.0\n---\nname: a\n", (1, 1), "is no YAML"),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\nname: a\n", (1, 9), "is no YAML"),
        (b"name: " + b"9" * 5000 + b"\nmodel: {drafter: {source: bundled}}", (1, 7), "must be"),
        (
            b"schema: " + b"9" * 5000 + b"\nname: a\nmodel: {drafter: {source: bundled}}",
            (1, 9),
            "must be 1, not",
        ),
    ],
)
def test_bytes_that_are_no_profile(tmp_path, raw, place, message):
    path = tmp_path / "odd.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    problem = caught.value.problems[0]
    assert (problem.line, problem.column) == place
    assert message in problem.message


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf" + GOOD, GOOD.replace(b"\n", b"\r\n"), GOOD.strip()])
def test_byte_order_mark_crlf_and_no_final_newline(tmp_path, raw):
    path = tmp_path / "odd.yaml"
    path.write_bytes(raw)
    assert load_profile(str(path)).data["description"] == "x"


def test_places_after_a_byte_order_mark(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_bytes(b"\xef\xbb\xbf{nam: b, name: a, model: {drafter: {source: bundled}}}")
    assert (refusal(path).line, refusal(path).column) == (1, 2)


def test_places_under_crlf(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_bytes(GOOD.replace(b"\n", b"\r\n") + b"speculative:\r\n  budget: x\r\n")
    assert (refusal(path).line, refusal(path).column) == (5, 11)


def test_missing_file(tmp_path):
    assert refusal(tmp_path / "no.yaml").message == "cannot be read: no such file or directory"


def test_directory_and_fifo_are_no_files(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refusal(tmp_path / "folder.yaml").message == "is no file"
    assert refusal(tmp_path / "pipe.yaml").message == "is no file"


def test_a_name_that_is_no_file_name():
    assert refusal("/a\0b").message == "is no file name"
    assert "too long" in refusal("/" + "a" * 5000).message


def test_unreadable_file(small):
    small.chmod(0)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(65534)
    try:
        problem = refusal(small)
    finally:
        if as_root:
            os.seteuid(0)
    assert problem.message == "cannot be read: permission denied"
