"""Which command a profile becomes."""

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.ddtree.server.args import parse_args
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.service.command import unit_for
from toolkit.service.secrets import write_secrets
from toolkit.service.unit import RestartPolicy, SecretSource

LAYOUT = Layout(Path("/base"))
RELEASE = LAYOUT.service("stub").releases / "20260304T050607Z-01234567"


def unit(python="/env/bin/python", environment=None, **sections):
    profile = Profile.model_validate({"schema": 1, "name": "stub", **sections})
    return unit_for(profile, release_dir=RELEASE, layout=LAYOUT, python=Path(python), environment=environment)


def flag(argv, name):
    return argv[argv.index(name) + 1]


def test_embedded_engine():
    made = unit(
        model={"drafter": {"source": "bundled"}, "served_name": "small", "context_length": 2048},
        engine={"threads": 2, "extra_args": ["--random-seed", "7"]},
        speculative={"budget": 7, "topk_cap": 1, "expansion": "chain"},
        service={"port": 31000, "stop_timeout": 20, "max_running_requests": 3},
    )
    argv = made.argv
    assert argv[:3] == ("/env/bin/python", "-m", "toolkit.ddtree.server")
    assert flag(argv, "--model-path") == flag(argv, "--speculative-draft-model-path") == "bundled"
    assert flag(argv, "--speculative-algorithm") == "DDTREE"
    assert flag(argv, "--speculative-ddtree-budget") == "7"
    assert flag(argv, "--speculative-ddtree-topk-cap") == "1"
    assert flag(argv, "--speculative-ddtree-expansion") == "chain"
    assert flag(argv, "--context-length") == "2048"
    assert flag(argv, "--cpu-threads") == "2"
    assert flag(argv, "--max-running-requests") == "3"
    assert flag(argv, "--port") == "31000"
    assert float(flag(argv, "--shutdown-timeout")) < 20
    assert argv[-2:] == ("--random-seed", "7")
    assert "--config" not in argv
    assert "--allow-unauthenticated" not in argv
    assert (made.release, made.host, made.port) == (RELEASE.name, "127.0.0.1", 31000)
    assert made.environment["DDTOOLKIT_RELEASE"] == RELEASE.name
    assert not any("current" in word for word in argv)


@pytest.mark.parametrize(
    ("algorithm", "present", "absent"),
    [
        ("NONE", [], ["--speculative-algorithm", "--speculative-draft-model-path"]),
        ("DFLASH", ["--speculative-dflash-block-size"], ["--speculative-ddtree-budget"]),
        ("DDTREE", ["--speculative-dflash-block-size", "--speculative-ddtree-budget"], []),
    ],
)
def test_only_flags_of_the_algorithm(algorithm, present, absent):
    argv = unit(model={"drafter": {}}, speculative={"algorithm": algorithm}).argv
    assert all(name in argv for name in present)
    assert not any(name in argv for name in absent)


def test_secrets_come_by_file_and_extra_arguments_stay_last():
    made = unit(
        service={"api_key": {"env": "K"}, "admin_api_key": {"command": ["pass", "show"]}},
        engine={"extra_args": ["--x"]},
    )
    assert made.secrets == {
        "api-key": SecretSource(env="K"),
        "admin-api-key": SecretSource(command=("pass", "show")),
    }
    assert made.secrets_file == f"/base/state/stub/secrets/{RELEASE.name}.yaml"
    assert made.argv[-3:] == ("--config", made.secrets_file, "--x")


def test_debug_file_and_open_address():
    made = unit(
        model={"drafter": {}},
        speculative={"debug_metrics": True},
        service={"bind": "0.0.0.0", "allow_unauthenticated": True},  # noqa: S104
    )
    assert flag(made.argv, "--speculative-ddtree-debug-file") == "/base/cache/stub/ddtree-debug.jsonl"
    assert "--allow-unauthenticated" in made.argv


def test_the_debug_file_of_sglang():
    made = unit(
        engine={"kind": "sglang"},
        hardware={"device": "cuda", "count": 1},
        model={"target": {"source": "/m/t"}, "drafter": {"source": "/m/d"}},
        speculative={"debug_metrics": True},
    )
    assert flag(made.argv, "--speculative-ddtree-debug-file") == "/base/cache/stub/ddtree-debug.jsonl"


def test_sglang():
    made = unit(
        engine={"kind": "sglang", "dtype": "bfloat16"},
        hardware={"device": "cuda", "count": 8, "interconnect": "nvlink"},
        host={"user": "ddtree"},
        model={"target": {"source": "~/kimi"}, "drafter": {"source": "/m/d"}, "trust_remote_code": True},
        parallelism={"tp": 8, "ep": 4},
        service={"manager": "systemd"},
    )
    argv = made.argv
    assert argv[1:3] == ("-m", "sglang.launch_server")
    assert flag(argv, "--model-path") == str(Path.home() / "kimi")
    assert (flag(argv, "--tp-size"), flag(argv, "--ep-size")) == ("8", "4")
    assert flag(argv, "--attention-backend") == "triton"
    assert "--trust-remote-code" in argv
    assert "--enable-metrics" in argv
    assert (made.gpus, made.nvlink, made.user) == (8, True, "ddtree")
    assert made.limits == {"memlock": None, "nofile": 1 << 20}


def test_environment_of_profile_wins_over_build_over_default():
    made = unit(environment={"HOME": "/b", "X": "build"}, service={"environment": {"X": "profile"}})
    assert (made.environment["HOME"], made.environment["X"]) == ("/b", "profile")
    assert made.environment["TRITON_CACHE_DIR"] == "/base/cache/stub/triton"


def test_timeouts_and_restart_policy_are_the_profiles():
    made = unit(
        service={
            "load_timeout": "20m",
            "stop_timeout": "2m",
            "restart": {"delay": "15s", "burst": 3, "interval": "2h"},
        }
    )
    assert (made.load_timeout, made.stop_timeout) == (1200.0, 120.0)
    assert made.restart == RestartPolicy(15.0, 3, 7200.0)


def test_embedded_server_takes_every_flag(tmp_path, monkeypatch):
    """Its own parser reads what is rendered here, secrets file included."""
    monkeypatch.setenv("K", "pa$1wor$D%s\"'\\#:{}")
    made = unit(
        model={"drafter": {}, "context_length": 2048},
        engine={"threads": 1},
        speculative={"debug_metrics": True, "budget": 9},
        service={"api_key": {"env": "K"}, "admin_api_key": {"env": "K"}, "max_queued_requests": 5},
    )
    secrets_file = tmp_path / "secrets" / "r.yaml"
    write_secrets(replace(made, secrets_file=str(secrets_file)))
    argv = [str(secrets_file) if word == made.secrets_file else word for word in made.argv]
    parsed = parse_args(argv[3:])
    assert (parsed.port, parsed.max_queued_requests) == (30000, 5)
    assert parsed.api_key == parsed.admin_api_key == "pa$1wor$D%s\"'\\#:{}"
