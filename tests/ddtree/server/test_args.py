import dataclasses
from pathlib import Path

import pytest

from toolkit.ddtree.server.args import UsageError, parse_args
from toolkit.ddtree.types import Algorithm, Expansion, TreeLimits

_TREE = [
    "--model-path",
    "bundled",
    "--speculative-algorithm",
    "DDTREE",
    "--speculative-draft-model-path",
    "bundled",
]


def test_defaults_are_safe_and_plain():
    args = parse_args(["--model-path", "/models/x"])
    assert args.host == "127.0.0.1"
    assert args.engine.algorithm is Algorithm.NONE
    assert args.engine.model_path == Path("/models/x")
    assert args.served_model_name == "/models/x"
    assert args.api_key is None
    assert args.engine.prefix_cache_tokens > 0


def test_tree_flags_reach_the_engine():
    extra = [
        "--speculative-ddtree-budget=33",
        "--speculative-ddtree-topk-cap=4",
        "--speculative-ddtree-expansion=chain_seeded",
        "--disable-radix-cache",
        "--cpu-threads=2",
    ]
    engine = parse_args([*_TREE, *extra]).engine
    assert engine.limits == TreeLimits(33, 4, Expansion.CHAIN_SEEDED)
    informed = parse_args([*_TREE, "--speculative-ddtree-expansion=transition"]).engine
    assert informed.limits == TreeLimits(16, 8, Expansion.TRANSITION)
    assert engine.prefix_cache_tokens == 0
    assert engine.threads == 2
    assert engine.model_path.name == "target"
    assert engine.draft_model_path is not None
    assert engine.draft_model_path.name == "drafter"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model-path is required"),
        (["--model-path", "m", "--speculative-algorithm", "DFLASH"], "needs --speculative-draft-model-path"),
        (
            ["--model-path", "m", "--speculative-draft-model-path", "d"],
            "needs --speculative-algorithm DFLASH or",
        ),
        (["--model-path", "m", "--speculative-ddtree-budget", "8"], "needs --speculative-algorithm DDTREE"),
        ([*_TREE, "--speculative-ddtree-budget", "0"], "0 is out of range: from 1 to 1024"),
        ([*_TREE, "--speculative-ddtree-budget", "many"], "invalid integer value: 'many'"),
        ([*_TREE, "--speculative-ddtree-expansion", "wide"], "invalid choice: 'wide'"),
        ([*_TREE, "--speculative-ddtree-debug-metrics"], "needs --speculative-ddtree-debug-file"),
        (["--model-path", "m", "--port", "65536"], "from 0 to 65535"),
        (["--model-path", "m", "--host", "0.0.0.0"], "reachable from other machines"),  # noqa: S104
        (["--model-path", "m", "--host", "0.0.0.0", "--api-key", "k"], "set api-key and admin-api-key"),  # noqa: S104
        (["--model-path", "m", "--host", "example.org"], "reachable from other machines"),
        (["--model-path", "m", "--api-key", ""], "not empty"),
        (["--model-path", "m", "--api-key", "a "], "without spaces around it"),
        (["--model-path", "m", "--admin-api-key", "a\tb"], "printable text"),
        (["--model-path", "m", "--tokenizer-path", "t"], "same as --model-path"),
        (["--model-path", "m", "--shutdown-timeout", "nan"], "out of range"),
        (["--model-path", "m", "--tp-size", "2"], "unrecognized arguments: --tp-size"),
        (["--model-p", "m"], "unrecognized arguments: --model-p"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(argv, said):
    with pytest.raises(UsageError) as caught:
        parse_args(argv)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host):
    assert parse_args(["--model-path", "m", "--host", host]).host == host


@pytest.mark.parametrize("extra", [["--api-key=a", "--admin-api-key=b"], ["--allow-unauthenticated"]])
def test_another_address_needs_both_keys_or_the_flag(extra):
    assert parse_args(["--model-path", "m", "--host", "0.0.0.0", *extra]).host == "0.0.0.0"  # noqa: S104


def test_a_config_file_gives_flags_and_the_command_line_wins(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text(
        "model-path: m\nport: 4000\nmax_running_requests: 3\napi-key: 's3cret'\ndisable-radix-cache: true\n"
        "shutdown-timeout: 2.5\nallow-unauthenticated: false\nserved-model-name: null\n"
    )
    args = parse_args(["--config", str(config), "--port", "5000"])
    assert (args.port, args.engine.max_running_requests, args.api_key) == (5000, 3, "s3cret")
    assert args.engine.prefix_cache_tokens == 0
    assert args.shutdown_timeout == 2.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modelpath: m", "unknown key 'modelpath', nearest is 'model-path'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: true", "'port' must be a number"),
        ("disable-radix-cache: 1", "must be true or false"),
        ("api-key: 0123", "'api-key' must be a quoted string"),
        ("api-key: [hunter2", "not valid YAML line"),
        ("- port", "must be a mapping"),
        ("port: [1, 2]", "'port' must be a number"),
        ("model-path: a\nmodel-path: b", "'model-path' is given twice"),
    ],
)
def test_a_bad_config_file_is_refused_without_showing_values(tmp_path, text, said):
    config = tmp_path / "server.yaml"
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse_args(["--model-path", "m", "--config", str(config)])
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"absent.yaml: No such file"):
        parse_args(["--config", str(tmp_path / "absent.yaml")])


def test_keys_show_in_no_representation():
    args = parse_args(["--model-path", "m", "--api-key", "hunter2", "--admin-api-key", "hunter3"])
    assert "hunter" not in repr(args) + str(args)
    assert dataclasses.asdict(args)["api_key"] == "hunter2"


def test_what_is_unwise_is_warned_of(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("api-key: k\n")
    config.chmod(0o644)
    flags = ["--model-path", "m", "--config", str(config)]
    assert ["mode 0600" in warning for warning in parse_args(flags).warnings] == [True]
    config.chmod(0o600)
    assert parse_args(flags).warnings == ()
    open_flags = ["--model-path", "m", "--host", "0.0.0.0", "--allow-unauthenticated"]  # noqa: S104
    assert ["without an API key" in warning for warning in parse_args(open_flags).warnings] == [True]
