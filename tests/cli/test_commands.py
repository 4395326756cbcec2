"""Commands that need no deployed service: whole output, exit codes, and what is never imported."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import typer

from tests.cli.conftest import Command
from toolkit import __version__
from toolkit.cli.main import app

HEAVY = ("torch", "ansible", "ansible_runner", "sglang", "transformers", "fastapi", "paramiko", "matplotlib")


def _with_output(file: IO[str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).with_name("ddtoolkit")
    return subprocess.run([program, *arguments], stdout=file, stderr=subprocess.PIPE, text=True, check=False)


def test_help_lists_every_command(ddtoolkit: Command) -> None:
    shown = ddtoolkit("--help")
    assert shown.returncode == 0
    listed = set(re.findall(r"^  ([a-z]+) {2,}\S", shown.stdout, re.MULTILINE))
    assert listed >= {
        "deploy", "plan", "validate", "status", "logs", "start", "stop", "restart", "swap", "rollback",
        "history", "test", "profiles", "render", "lock",
    }  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['ddtoolkit', '--help']\n"
        "from toolkit.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stderr.strip() == "[]"


def test_version(ddtoolkit: Command) -> None:
    assert ddtoolkit("--version").stdout == f"{__version__}\n"


def test_a_valid_profile(ddtoolkit: Command) -> None:
    shown = ddtoolkit("validate", "local-cpu", "--json")
    assert shown.returncode == 0
    told = json.loads(shown.stdout)
    assert (told["ok"], told["name"], told["warnings"]) == (True, "local-cpu", [])


def test_every_mistake_is_told_at_once_with_its_place(ddtoolkit: Command, tmp_path: Path) -> None:
    profile = tmp_path / "bad.yaml"
    profile.write_text("schema: 1\nname: bad\nspeculative:\n  budgt: 7\nservice:\n  port: 70000\n")
    shown = ddtoolkit("validate", "bad.yaml")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "bad.yaml:4:3: speculative.budgt" in shown.stderr
    assert "budget" in shown.stderr
    assert "bad.yaml:6:9: service.port" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_errors_are_json_where_json_was_asked_for(ddtoolkit: Command) -> None:
    shown = ddtoolkit("validate", "absent", "--json")
    assert shown.returncode == 2
    answer = json.loads(shown.stdout)
    assert answer["ok"] is False
    assert "absent" in answer["error"]


@pytest.mark.parametrize("arguments", [("plan",), ("plan", "local-cpu", "--sett", "a=b"), ("bogus",)])
def test_a_wrong_use_is_json_too_where_json_was_asked_for(
    ddtoolkit: Command, arguments: tuple[str, ...]
) -> None:
    shown = ddtoolkit(*arguments, "--json")
    answer = json.loads(shown.stdout)
    assert (shown.returncode, answer["ok"]) == (2, False)
    assert answer["error"] in shown.stderr


def test_profiles_are_listed_and_shown_with_origins(ddtoolkit: Command) -> None:
    assert [item["name"] for item in json.loads(ddtoolkit("profiles", "list", "--json").stdout)] == [
        "b300-nvlink-8x", "h200-nvlink", "local-cpu", "rtx-pro-6000-pcie-8x", "systemd-cpu",
    ]  # fmt: skip
    shown = ddtoolkit(
        "profiles", "show", "local-cpu", "--resolved", "--set", "speculative.budget=32", "--json"
    )
    answer = json.loads(shown.stdout)
    assert answer["profile"]["speculative"]["budget"] == 32
    assert answer["origins"]["speculative.budget"] == "--set"
    assert re.search(r"local-cpu\.yaml:\d+:\d+$", answer["origins"]["speculative.topk_cap"])
    assert answer["origins"]["service.keep_releases"] == "default"


def test_render_writes_a_unit_and_touches_nothing(ddtoolkit: Command, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    shown = ddtoolkit("render", "local-cpu", "--format", "systemd")
    assert shown.returncode == 0
    assert '"--speculative-ddtree-budget" "8"' in shown.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["systemd-cpu", "rtx-pro-6000-pcie-8x"])
def test_what_is_rendered_for_a_host_has_no_path_of_this_machine(ddtoolkit: Command, name: str) -> None:
    text = ddtoolkit("render", name).stdout
    assert str(Path(sys.executable).parent) not in text
    assert re.search(r'^ExecStart="/opt/ddtoolkit/envs/lib-[0-9a-f]{16}/bin/python" ', text, re.MULTILINE)
    assert 'Environment="PYTHONPATH=/opt/ddtoolkit/envs/ENVIRONMENT_ID"' in text
    assert text.startswith("# RELEASE_ID stands for the id that the deploy gives the release.\n")
    named = ddtoolkit("render", name, "--set", "host.python=/opt/own/bin/python3", "--format", "argv")
    assert json.loads(named.stdout)[0] == "/opt/own/bin/python3"
    assert "note: ENVIRONMENT_ID stands for" in named.stderr
    assert "the same for every host" in ddtoolkit("render", name, "-i", "x", "--format", "ansible").stderr


def test_plan_tells_what_would_be_done_and_does_nothing(ddtoolkit: Command, tmp_path: Path) -> None:
    shown = ddtoolkit("plan", "local-cpu", "--json", "--exit-code")
    assert shown.returncode == 7
    plan = json.loads(shown.stdout)
    actions = [step["action"] for step in plan["steps"]]
    assert actions == ["provision", "build", "release", "start", "acceptance"]
    assert not (tmp_path / "home" / ".local").exists()


def test_nothing_deployed_is_said_with_the_next_step(ddtoolkit: Command) -> None:
    assert json.loads(ddtoolkit("status", "--json").stdout) == []
    for command in (["logs"], ["stop"], ["swap", "--set", "a=b"], ["rollback"], ["history"], ["test"]):
        shown = ddtoolkit(*command)
        assert shown.returncode == 2, command
        assert "ddtoolkit deploy profile local-cpu" in shown.stderr


def test_what_a_reading_command_was_asked_for_is_on_standard_output(ddtoolkit: Command) -> None:
    for arguments, said in (
        (["status"], "no service is deployed here\n"),
        (["plan", "local-cpu"], "plan for local-cpu on this machine:\n  provision "),
        (["profiles", "list"], "local-cpu"),
        (["validate", "local-cpu"], "local-cpu: valid\n"),
    ):
        shown = ddtoolkit(*arguments)
        assert said in shown.stdout, arguments
        assert shown.stderr == "", arguments


def test_data_is_alone_on_standard_output(ddtoolkit: Command) -> None:
    for arguments in (["status"], ["plan", "local-cpu"], ["profiles", "list"], ["validate", "local-cpu"]):
        json.loads(ddtoolkit(*arguments, "--json").stdout)


def test_an_answer_that_finds_the_disk_full_says_so() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        for arguments in (["validate", "local-cpu"], ["profiles", "list", "--json"]):
            shown = _with_output(full, *arguments)
            assert shown.returncode == 1
            assert shown.stderr == (
                "error: standard output: cannot be written: No space left on device\n"
                "  next: free some space there\n"
            )


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_what_the_locale_cannot_write_is_escaped(ddtoolkit: Command, encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    name = os.fsdecode("\u00e9".encode() + b"\xff.yaml")
    shown = ddtoolkit("validate", name, "--json", env=environment)
    assert shown.returncode == 2
    assert name in json.loads(shown.stdout)["error"]
    assert "Traceback" not in shown.stderr
    shown = ddtoolkit(
        "profiles", "show", "local-cpu", "--resolved", "--set", "description=\u00e9", env=environment
    )
    assert shown.returncode == 0
    assert "description" in shown.stdout


def test_a_change_tells_its_plan_as_progress(ddtoolkit: Command) -> None:
    shown = ddtoolkit("deploy", "profile", "local-cpu", "--set", "service.api_key={env: NO_SUCH_KEY}")
    assert "plan for local-cpu on this machine:" in shown.stderr
    assert shown.stdout == ""


def test_who_leaves_out_the_word_profile_is_told(ddtoolkit: Command) -> None:
    shown = ddtoolkit("deploy", "local-cpu")
    assert shown.returncode == 2
    assert "next: ddtoolkit deploy profile local-cpu" in shown.stderr


def test_a_service_that_is_nearly_named_is_proposed(ddtoolkit: Command, tmp_path: Path) -> None:
    records = tmp_path / "home" / ".local" / "state" / "ddtoolkit" / "services"
    records.mkdir(parents=True)
    (records / "local-cpu.json").write_text(json.dumps({"root": str(tmp_path / "root")}))
    (tmp_path / "root" / "services" / "local-cpu").mkdir(parents=True)
    assert "next: did you mean local-cpu?" in ddtoolkit("status", "local-cpuu").stderr
    assert "next: name one that is: local-cpu\n" in ddtoolkit("status", "other").stderr
    assert "next: ddtoolkit deploy profile systemd-cpu\n" in ddtoolkit("status", "systemd-cpu").stderr


def test_a_name_of_nothing_is_told_what_there_is(ddtoolkit: Command) -> None:
    said = "next: ddtoolkit profiles list shows what can be deployed\n"
    assert said in ddtoolkit("status", "nope").stderr


def test_what_was_removed_is_found_by_its_name(ddtoolkit: Command, tmp_path: Path) -> None:
    records = tmp_path / "home" / ".local" / "state" / "ddtoolkit" / "services"
    records.mkdir(parents=True)
    (records / "gone.json").write_text(json.dumps({"root": str(tmp_path / "root")}))
    history = tmp_path / "root" / "state" / "gone" / "history.jsonl"
    history.parent.mkdir(parents=True)
    history.write_text('{"id": "a", "kind": "deploy", "outcome": "committed", "who": "ann@desk"}\n')
    shown = ddtoolkit("history")
    assert "; ddtoolkit history gone has the history of what was removed\n" in shown.stderr
    assert "ann@desk" in ddtoolkit("history", "gone").stdout
    again = ddtoolkit("uninstall", "gone", "--yes").stderr
    assert "next: its history is kept: ddtoolkit history gone shows it; ddtoolkit uninstall gone --" in again
    assert "next:" not in ddtoolkit("uninstall", "gone", "--purge", "--yes").stderr


def test_json_changes_nothing_without_yes(ddtoolkit: Command, tmp_path: Path) -> None:
    shown = ddtoolkit("deploy", "profile", "local-cpu", "--json")
    assert shown.returncode == 2
    assert "--yes" in json.loads(shown.stdout)["hint"]
    assert not (tmp_path / "home" / ".local").exists()


CHANGING = {
    "deploy profile", "swap", "rollback", "start", "stop", "restart", "upgrade", "prune", "uninstall", "test",
    "lock release", "models add", "models rm", "hosts prepare", "hosts trust",
    "doctor",  # with --disruptive
}  # fmt: skip


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Every command with its options."""
    if not hasattr(command, "commands"):
        yield " ".join(path), {option for item in command.params for option in item.opts}
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))


def test_every_command_that_changes_something_takes_yes_and_json() -> None:
    found = dict(leaves(typer.main.get_command(app)))
    assert {name for name, options in found.items() if "--yes" in options} == CHANGING
    assert {name for name in CHANGING if not {"--yes", "-y", "--json"} <= found[name]} == set()


@pytest.mark.parametrize(
    "command",
    [
        ("prune",), ("models", "add", "https://h/x/", "--revision", "v1"), ("lock", "release", "token"),
        ("hosts", "trust", "a", "--fingerprint", "SHA256:x"),
    ],
)  # fmt: skip
def test_what_json_would_change_it_refuses_without_yes(ddtoolkit: Command, command: tuple[str, ...]) -> None:
    shown = ddtoolkit(*command, "--json")
    assert shown.returncode == 2
    assert json.loads(shown.stdout)["error"] == "--json changes nothing without --yes"


def test_a_lock_is_not_released_without_its_token(ddtoolkit: Command) -> None:
    shown = ddtoolkit("lock", "release", "--service", "one")
    assert (shown.returncode, shown.stderr) == (
        2,
        "error: a lock is released by its token\n  next: ddtoolkit lock show one prints it\n",
    )


def test_prune_shows_what_it_would_remove_and_asks(ddtoolkit: Command, tmp_path: Path) -> None:
    root = tmp_path / "root"
    unused = root / "envs" / "0011223344556677"
    unused.mkdir(parents=True)
    os.utime(unused, (0, 0))
    records = tmp_path / "home" / ".local" / "state" / "ddtoolkit" / "services"
    records.mkdir(parents=True)
    (records / "x.json").write_text(json.dumps({"root": str(root)}))
    asked = ddtoolkit("prune")
    assert asked.returncode == 2
    assert f"would remove code {unused}" in asked.stdout
    assert "add --yes" in asked.stderr
    assert unused.is_dir()
    assert f"removed code {unused}" in ddtoolkit("prune", "--yes").stdout
    assert not unused.exists()
    assert "nothing to remove" in ddtoolkit("prune").stdout


def test_an_engine_that_is_not_driven_here_is_refused_with_a_way_out(ddtoolkit: Command) -> None:
    sets = ("service.manager=systemd", "host.user=ddtree", "host.root=null")
    shown = ddtoolkit("plan", "local-cpu", *(part for item in sets for part in ("--set", item)))
    assert shown.returncode == 2
    assert "--set service.manager=process --set host.user=null serves from this machine" in shown.stderr


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs this machine")
def test_a_profile_for_hosts_is_told_the_inventory_that_it_lacks(ddtoolkit: Command) -> None:
    shown = ddtoolkit("deploy", "profile", "h200-nvlink", "--overlay", "qwen3-8b", "--overlay", "gpus-1")
    again = (
        "ddtoolkit deploy profile h200-nvlink --overlay qwen3-8b --overlay gpus-1 -i INVENTORY deploys it "
    )
    assert shown.returncode == 2
    assert f"  next: {again}on the hosts that it is for; " in shown.stderr


@pytest.mark.parametrize("place", ["absent/report.json", "."])
def test_a_report_that_could_not_be_written_is_refused_before_the_checks(
    ddtoolkit: Command, place: str
) -> None:
    shown = ddtoolkit("test", "--url", "http://127.0.0.1:1", "--out", place)
    assert (shown.returncode, shown.stderr.splitlines()[0]) == (
        2,
        f"error: {place}: no file can be written there",
    )


def test_a_first_deploy_that_was_killed_is_told_and_taken_away(ddtoolkit: Command, tmp_path: Path) -> None:
    record = tmp_path / "home" / ".local" / "state" / "ddtoolkit" / "services" / "local.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"root": str(tmp_path / "root")}))
    assert ddtoolkit("status").stdout == (
        "no service is deployed here; begun, and not come to a release: local\n"
    )
    ends = "ddtoolkit uninstall local --purge takes away what it has made"
    assert ends in ddtoolkit("status", "local").stderr
    shown = ddtoolkit("uninstall", "--purge", "--yes")
    assert shown.returncode == 0, shown.stderr
    assert "\nuninstall: committed: local is removed: " in f"\n{shown.stderr}"
    assert shown.stderr.endswith("; nothing of it is left on this machine\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]
    assert ddtoolkit("status").stdout == "no service is deployed here\n"


def test_usage_errors_exit_with_two(ddtoolkit: Command) -> None:
    assert ddtoolkit("deploy", "profile").returncode == 2
    assert ddtoolkit("no-such-command").returncode == 2
    assert ddtoolkit("swap", "--for").returncode == 2
    assert "add --experiment" in ddtoolkit("swap", "--for", "2h", "--set", "speculative.budget=7").stderr
