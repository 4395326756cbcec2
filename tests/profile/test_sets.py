"""`--set`: typed by the schema, refused like a file's typos."""

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile


def value(data, key):
    for part in key.split("."):
        data = data[part]
    return data


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("speculative.budget=7", "speculative.budget", 7),
        ("speculative.budget= 7 ", "speculative.budget", 7),
        ("model.served_name=on", "model.served_name", "on"),
        ("model.served_name=7", "model.served_name", "7"),
        ("model.served_name=null", "model.served_name", "null"),
        ("model.served_name=a=b", "model.served_name", "a=b"),
        ("model.served_name= a: {b ", "model.served_name", " a: {b "),
        ("service.environment.FOO=1e3", "service.environment.FOO", "1e3"),
        ("service.environment.FOO=", "service.environment.FOO", ""),
        ("service.environment.FOO='x'", "service.environment.FOO", "'x'"),
        ("service.environment.FOO=pa$1wor$D %s \\", "service.environment.FOO", "pa$1wor$D %s \\"),
        ('service.environment.FOO={"a": "b c"}', "service.environment.FOO", '{"a": "b c"}'),
        ("service.environment={A: 1, B: no}", "service.environment", {"A": "1", "B": "no"}),
        ("service.environment={}", "service.environment", {}),
        ("service.stop_timeout=2m", "service.stop_timeout", "2m"),
        ("acceptance.tolerance=1e-2", "acceptance.tolerance", 0.01),
        ("acceptance.min_acceptance_length=3", "acceptance.min_acceptance_length", 3.0),
        ("speculative.debug_metrics=true", "speculative.debug_metrics", True),
        ("host.root=null", "host.root", None),
        ("model.context_length=null", "model.context_length", None),
        ("model.context_length=", "model.context_length", None),
        (
            "model.drafter={source: bundled}",
            "model.drafter",
            {"source": "bundled", "revision": None, "shape": None},
        ),
        ("engine.extra_args=[--log-level, debug]", "engine.extra_args", ["--log-level", "debug"]),
        ("service.api_key={env: KEY}", "service.api_key.env", "KEY"),
        ("service.api_key.env=KEY", "service.api_key.env", "KEY"),
    ],
)
def test_values(small, text, key, expected):
    resolved = load_profile(str(small), sets=[text])
    found = value(resolved.data, key)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "speculative.buget=7",
            "speculative.buget: no such key (did you mean budget?)",
        ),
        ("budget=7", "budget: no such key (did you mean speculative.budget?)"),
        ("speculativ.budget=7", "speculativ: no such key (did you mean speculative?)"),
        (
            "speculative.budget.x=7",
            "speculative.budget: has no keys: it takes an integer from 1 to 1024",
        ),
        (
            "speculative.budget=many",
            "speculative.budget: must be an integer from 1 to 1024, not 'many'",
        ),
        (
            'speculative.budget="7"',
            "speculative.budget: must be an integer from 1 to 1024, not '7' (write it without quotes)",
        ),
        (
            "speculative.budget=010",
            (
                "speculative.budget: must be an integer from 1 to 1024, not '010' "
                "(an octal form: write it without the leading 0)"
            ),
        ),
        ("speculative.budget=", "speculative.budget: is empty; it must be an integer from 1 to 1024"),
        (
            "speculative.budget=null",
            "speculative.budget: must be an integer from 1 to 1024, not null",
        ),
        (
            "speculative.debug_metrics=on",
            "speculative.debug_metrics: must be true or false, not 'on' (write true)",
        ),
        (
            "service.load_timeout=90",
            "service.load_timeout: has no unit: write a duration such as 90s (units: ms, s, m, min, h, d)",
        ),
        (
            "speculative.budget=3",
            (
                "speculative.budget: 3 is below block_size - 1 = 7: the greedy chain would not fit "
                "in the tree (at least 7)"
            ),
        ),
        (
            "engine.extra_args=[a",
            "engine.extra_args: is no YAML: a list or map in brackets is not closed (close it with ] or })",
        ),
        (
            "engine.extra_args=!!python/name:os.system x",
            (
                "engine.extra_args: the tag !!python/name:os.system is not allowed: types follow the schema "
                "(take it out)"
            ),
        ),
        (
            "engine.extra_args.0=x",
            "'engine.extra_args.0' is no assignment (write key.path=value)",
        ),
        ("engine.extra_args.x=x", "engine.extra_args: has no keys: it takes a list, each item text"),
        ("name=other", "name: cannot be set: it names the service (change the file)"),
        ("schema=1", "schema: cannot be set: it belongs to the file (change the file)"),
        ("speculative.budget", "'speculative.budget' is no assignment (write key.path=value)"),
        ("=7", "'' is no assignment (write key.path=value)"),
        ("", "'' is no assignment (write key.path=value)"),
        ("a..b=7", "'a..b' is no assignment (write key.path=value)"),
        (
            "service.environment.FOO=a\nb",
            "service.environment.FOO: holds a newline (U+000A) at character 2: take it out",
        ),
        (
            "service.environment.FOO=a\0",
            "service.environment.FOO: holds a NUL (U+0000) at character 2: take it out",
        ),
        (
            "service.environment.FOO=\udcff",
            (
                "service.environment.FOO: holds U+DCFF, which is no character, at character 1 "
                "(write it as UTF-8)"
            ),
        ),
    ],
)
def test_refused(small, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(small), sets=[text])
    assert [str(problem) for problem in caught.value.problems] == [f"--set: {expected}"]


def test_an_inline_secret_is_not_shown(small):
    for text in ("service.api_key=sk-hidden", "service.api_key.env=sk-hidden!"):
        with pytest.raises(ConfigError) as caught:
            load_profile(str(small), sets=[text])
        assert "sk-hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("service.api_key.command=[vault, --token, sk-hidden]", "service.api_key.command"),
        ("service.api_key={command: [vault, --token, sk-hidden]}", "service.api_key.command"),
        ("service={admin_api_key: {command: [vault, sk-hidden]}}", "service.admin_api_key.command"),
    ],
)
def test_arguments_that_give_a_secret_do_not_stand_on_a_command_line(small, text, key):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(small), sets=[text])
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == (key, "write it into the profile or an overlay")
    assert "no secret on a command line" in problem.message
    assert "sk-hidden" not in str(caught.value)


def test_a_command_without_arguments_may_give_a_secret(small):
    loaded = load_profile(str(small), sets=["service.api_key.command=[/usr/local/bin/key]"]).profile
    assert loaded.service.api_key.command == ("/usr/local/bin/key",)


def test_several_at_once_report_every_problem(small):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(small), sets=["speculative.buget=7", "service.port=x", "acceptance.requests=1"])
    assert [problem.key for problem in caught.value.problems] == [
        "speculative.buget",
        "service.port",
        "acceptance.requests",
    ]


def test_the_same_key_twice_is_refused(small):
    with pytest.raises(ConfigError, match=r"speculative\.budget: is set twice"):
        load_profile(str(small), sets=["speculative.budget=7", "speculative.budget=8"])


def test_origin_is_the_option(small):
    resolved = load_profile(str(small), sets=["speculative.budget=7"])
    assert str(resolved.origins["speculative.budget"]) == "--set"
    assert str(resolved.origins["speculative.topk_cap"]) == "default"


def test_a_set_mends_a_wrong_value_of_the_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: a\nmodel: {drafter: null}\nspeculative: {budget: x}\n")
    resolved = load_profile(str(path), sets=["model.drafter.source=bundled", "speculative.budget=9"])
    assert resolved.profile.speculative.budget == 9
    assert resolved.profile.model.drafter.source == "bundled"
