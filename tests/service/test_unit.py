"""The unit model: a round trip, and what it refuses."""

import json
from dataclasses import replace

import pytest

from toolkit.errors import ConfigError, ToolkitError
from toolkit.service.unit import RestartPolicy, SecretSource, Unit, read_unit, write_unit

UNIT = Unit(
    name="x",
    release="r",
    description="a unit",
    argv=("/usr/bin/python3", "-m", "x", "", "\tü$%"),
    environment={"A": "b c", "EMPTY": ""},
    working_directory="/var/cache/x",
    host="127.0.0.1",
    port=1,
    secrets={"api-key": SecretSource(command=("pass", "show")), "admin-api-key": SecretSource(env="K")},
    secrets_file="/s.yaml",
    restart=RestartPolicy(1.5, 2, 3),
    limits={"memlock": None, "nofile": 9},
    gpus=8,
    nvlink=True,
)


def test_round_trip(tmp_path):
    (tmp_path / "unit.json").write_bytes(write_unit(UNIT))
    assert read_unit(tmp_path) == UNIT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"argv": ("p", "a\nb")}, r"engine.extra_args: .*control character '\\n'"),
        ({"argv": ("p", "a\0b")}, r"control character '\\x00'"),
        ({"argv": ("p", "\x7f")}, r"control character"),
        ({"argv": ("p", "\udc80")}, "no valid Unicode"),
        ({"argv": ()}, "needs a program"),
        ({"environment": {"A": "x\ny"}}, r"service.environment.A: .*control character '\\n'"),
        ({"environment": {"A B": "x"}}, "'A B' is no variable name"),
        ({"environment": {"A=": "x"}}, "'A=' is no variable name"),
        ({"environment": {"1A": "x"}}, "'1A' is no variable name"),
        ({"description": "a\nExecStartPre=/bin/evil"}, "description"),
    ],
)
def test_what_no_service_can_be_given_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(UNIT, **change)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        replace(UNIT, argv=("p", "\n", "\0"), environment={"A": "\r"})
    assert len(caught.value.problems) == 3


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "unit.json"
    with pytest.raises(ToolkitError, match=r"unit\.json: absent"):
        read_unit(tmp_path)
    value = UNIT.to_json()
    without = {key: item for key, item in value.items() if key != "argv"}
    for text in (
        "{",
        "[]",
        json.dumps({**value, "schema": 2}),
        json.dumps({**value, "new": 1}),
        json.dumps(without),
    ):
        path.write_text(text)
        with pytest.raises(ToolkitError, match=r"unit\.json"):
            read_unit(tmp_path)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),  # noqa: S104
        ("::", "http://[::1]:1"),
        ("fd00::1", "http://[fd00::1]:1"),
        ("localhost", "http://localhost:1"),
    ],
)
def test_url_is_one_that_this_host_can_reach(host, url):
    assert replace(UNIT, host=host).url == url
