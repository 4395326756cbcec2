"""The whole job with the bundled pair, through the real command: deploy, change, undo, fail, recover."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import Site, free_port


def test_the_first_deploy_is_accepted_and_its_report_is_kept(site: Site) -> None:
    status = site.status
    assert (status["state"], status["healthy"]) == ("running", True)
    assert status["accepted"]["verdict"] == "accepted"
    release = site.home / "service" / "services" / "local" / "releases" / status["release"]
    report = json.loads((release / "acceptance.json").read_text())
    passed = {check["name"] for check in report["checks"] if check["status"] == "passed"}
    assert passed >= {"real_tokens", "lossless", "lossless_control", "many_requests", "self_check"}
    assert report["acceptance_length"]["tree"]["value"] > report["acceptance_length"]["chain"]["value"] > 2
    manifest = json.loads((release / "manifest.json").read_text())
    assert manifest["environment"]["versions"]["torch"]
    assert manifest["engine"]["checkpoints"]


def test_a_second_deploy_has_nothing_to_do_and_restarts_nothing(site: Site) -> None:
    before = site.status
    shown = site.run("deploy", "profile", "local.yaml")
    assert shown.returncode == 0
    assert "nothing to do" in shown.stderr
    assert site.status["pid"] == before["pid"]
    assert site.run("plan", "local.yaml", "--exit-code").returncode == 0


def test_what_the_server_does_not_depend_on_is_put_on_record_without_a_restart(site: Site) -> None:
    before = site.status
    rate = ("--set", "host.download_rate=9MB")
    shown = site.run("deploy", "profile", "local.yaml", *rate)
    assert shown.returncode == 0, shown.stderr
    assert "record: committed: host.download_rate: on record; " in shown.stderr
    assert "nothing to do" in site.run("deploy", "profile", "local.yaml", *rate).stderr
    asked = site.run("deploy", "profile", "local.yaml")
    assert asked.returncode == 2
    assert "deployed with --set host.download_rate=9MB, this one is not" in asked.stderr
    assert site.run("deploy", "profile", "local.yaml", "--yes").returncode == 0
    after = site.status
    assert (after["pid"], after["release"]) == (before["pid"], before["release"])
    past = site.json("history")[-2:]
    assert [entry["kind"] for entry in past] == ["record", "record"]
    asked_for = "deploy profile local.yaml --set host.download_rate=9MB"
    assert [entry["command"] for entry in past] == [asked_for, "deploy profile local.yaml"]
    assert "deployed with" not in site.run("plan", "local.yaml", "--set", "host.download_rate=8MB").stdout


def test_what_a_swap_saved_goes_on_record_with_the_deploy_that_is_given_it(site: Site) -> None:
    before = site.status
    assert site.run("swap", "--set", "host.download_rate=7MB", "--save", "rate.yaml").returncode == 0
    assert site.status["config"]["swapped"] == ["host.download_rate"]
    shown = site.run("deploy", "profile", "local.yaml", "-f", "rate.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "record: committed: what the deploy was given is on record; nothing was restarted" in shown.stderr
    assert site.status["config"]["swapped"] == []
    assert not [item for item in site.json("drift", "local") if item["kind"] == "config"]
    assert "nothing to do" in site.run("deploy", "profile", "local.yaml", "-f", "rate.yaml").stderr
    # To name a swapped key is to mean its value, and sets nothing back unasked.
    assert site.run("swap", "--set", "host.download_rate=6MB").returncode == 0
    named = site.json("plan", "local.yaml", "--set", "host.download_rate=5MB")
    assert named["undone_swaps"] == []
    assert site.run("deploy", "profile", "local.yaml", "--yes").returncode == 0
    assert (site.status["pid"], site.status["release"]) == (before["pid"], before["release"])


def test_both_openai_endpoints_answer_streaming_and_not(site: Site) -> None:
    url = f"http://127.0.0.1:{site.port}/v1"
    body = {"model": "small", "prompt": "def fibonacci(n):\n", "max_tokens": 32, "temperature": 0}
    whole = httpx.post(f"{url}/completions", json=body, timeout=30).json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}/completions", json=body | {"stream": True}, timeout=30) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(parts) > 1
    assert "".join(parts) == whole
    chat = {"model": "small", "messages": [{"role": "user", "content": "import os"}], "max_tokens": 8}
    answer = httpx.post(f"{url}/chat/completions", json=chat, timeout=30).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_a_swap_that_is_worse_is_shown_and_undoes_itself(site: Site) -> None:
    before = site.status
    text = site.generate()["text"]
    unsaved = site.home / "unsaved.yaml"
    sets = ("--set", "speculative.budget=7", "--set", "speculative.topk_cap=1")
    shown = site.run("swap", *sets, "--save", str(unsaved))
    assert shown.returncode == 5, shown.stderr
    assert not unsaved.exists()
    assert "speculative.budget: 16 -> 7" in shown.stderr
    assert "acceptance" in shown.stderr
    assert "next: where the loss is meant, the same command with --new-baseline" in shown.stderr
    after = site.status
    assert after["release"] == before["release"]
    assert after["config"]["speculative"]["budget"] == 16
    assert site.generate()["text"] == text
    last = site.json("history")[-1]
    assert last["outcome"] == "rolled_back"
    refused = site.run("rollback", "--to", last["release"])
    assert refused.returncode == 2
    assert f"{last['release']} was refused: its swap by " in refused.stderr
    assert last["reason"] in refused.stderr
    assert site.status["pid"] == after["pid"]


def test_a_swap_with_a_new_baseline_stays_and_rollback_returns(site: Site) -> None:
    before = site.status
    saved = site.home / "saved.yaml"
    shown = site.run("swap", "--set", "speculative.budget=8", "--new-baseline", "--save", str(saved))
    assert saved.read_text() == "speculative:\n  budget: 8\n"
    assert shown.returncode == 0, shown.stderr
    swapped = site.status
    assert swapped["config"]["speculative"]["budget"] == 8
    assert swapped["config"]["swapped"] == ["speculative.budget"]

    refused = site.run("deploy", "profile", "local.yaml")
    assert refused.returncode == 2
    assert "speculative.budget: 8 -> 16" in refused.stderr

    assert site.run("rollback").returncode == 0
    after = site.status
    assert after["release"] == before["release"]
    kinds = [(entry["kind"], entry["outcome"]) for entry in site.json("history")[-2:]]
    assert kinds == [("swap", "committed"), ("rollback", "committed")]


def test_swapping_to_what_is_there_changes_nothing(site: Site) -> None:
    entries = len(site.json("history"))
    shown = site.run("swap", "--set", "speculative.budget=16")
    assert (shown.returncode, "nothing to do" in shown.stderr) == (0, True)
    assert len(site.json("history")) == entries


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("speculative.budgt=7", "did you mean budget?"),
        ("speculative.budget=3", "block_size"),
        ("service.port=x", "service.port"),
        ("name=other", "cannot be set"),
        ("host.root=/elsewhere", "cannot be swapped"),
    ],
)
def test_a_wrong_swap_is_refused_before_anything_is_touched(site: Site, change: str, said: str) -> None:
    pid = site.status["pid"]
    shown = site.run("swap", "--set", change)
    assert shown.returncode == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
    assert site.status["pid"] == pid


def test_a_server_that_dies_is_started_again(site: Site) -> None:
    pid = site.status["pid"]
    os.kill(pid, signal.SIGKILL)
    status = site.wait_for(lambda now: now["healthy"] and now["pid"] != pid)
    assert status["restarts"] >= 1
    assert site.generate()["meta_info"]["completion_tokens"] == 16


def test_a_deploy_whose_controller_is_killed_goes_on_by_itself(site: Site) -> None:
    before = site.status
    process = site.start(
        "deploy", "profile", "local.yaml", "--set", "speculative.budget=20", "--new-baseline"
    )
    site.wait_for(lambda now: (now["transaction"] or {}).get("state") == "running", 150)
    process.kill()
    process.communicate()
    after = site.wait_for(lambda now: now["transaction"]["state"] == "ended", 150)
    assert after["transaction"]["outcome"] == "committed"
    assert after["release"] != before["release"]
    assert after["config"]["speculative"]["budget"] == 20
    assert site.generate()["text"]


def test_a_missing_checkpoint_is_named_and_the_old_release_goes_on(site: Site, tmp_path: Path) -> None:
    pid = site.status["pid"]
    absent = tmp_path / "absent"
    sets = [f"model.{part}.source={absent / part}" for part in ("target", "drafter")]
    shown = site.run("deploy", "profile", "local.yaml", "-y", *(x for item in sets for x in ("--set", item)))
    assert shown.returncode == 1
    assert str(absent / "target") in shown.stderr
    assert "Traceback" not in shown.stderr
    assert site.status["pid"] == pid


def test_a_port_in_use_is_named_with_its_holder(site: Site) -> None:
    pid = site.status["pid"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = site.run("swap", "--set", f"service.port={port}")
    assert shown.returncode == 1
    assert f"{port}" in shown.stderr
    assert str(os.getpid()) in shown.stderr
    assert site.status["pid"] == pid


def test_two_changes_at_once_one_is_told_who_holds_the_lock(site: Site) -> None:
    first = site.start("restart")
    site.wait_for(lambda now: (now["transaction"] or {}).get("state") == "running" or now["lock"])
    second = site.run("restart")
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert second.returncode == 3
    assert "restart" in second.stderr


def test_stop_stays_stopped_and_start_serves_again(site: Site) -> None:
    assert site.run("stop").returncode == 0
    assert site.status["state"] == "stopped"
    with pytest.raises(httpx.ConnectError):
        site.generate()
    shown = site.run("deploy", "profile", "local.yaml", "--set", "speculative.budget=20")
    assert shown.returncode == 0, shown.stderr
    assert site.status["healthy"]


def test_an_experiment_shows_and_returns_by_itself(site: Site) -> None:
    before = site.status
    shown = site.run(
        "swap",
        "--set",
        "speculative.budget=7",
        "--set",
        "speculative.topk_cap=1",
        "--experiment",
        "--for",
        "5s",
    )
    assert shown.returncode == 0, shown.stderr
    assert site.status["release"] != before["release"]
    after = site.wait_for(lambda now: now["release"] == before["release"] and now["healthy"], 90)
    assert after["experiment"] is None


def test_a_swap_that_ends_an_experiment_is_held_against_its_base(site: Site) -> None:
    before = site.status
    sets = ("--set", "speculative.budget=7", "--set", "speculative.topk_cap=1")
    tried = site.run("swap", *sets, "--experiment", "--for", "5m")
    assert tried.returncode == 0, tried.stderr
    shown = site.run("swap", "--set", "speculative.budget=9")
    assert "speculative.topk_cap: 8 -> 1" in shown.stderr
    assert shown.returncode == 5, shown.stderr
    after = site.status
    assert (after["release"], after["experiment"]) == (before["release"], None)


def test_a_rollback_during_an_experiment_returns_to_its_base(site: Site) -> None:
    before = site.status
    tried = site.run("swap", "--set", "speculative.budget=15", "--experiment", "--for", "5m")
    assert tried.returncode == 0, tried.stderr
    assert site.run("rollback").returncode == 0
    after = site.status
    assert (after["release"], after["experiment"]) == (before["release"], None)


def test_a_candidate_that_is_being_judged_is_not_taken_for_deployed(site: Site) -> None:
    before = site.status
    sets = ("--set", "speculative.budget=7", "--set", "speculative.topk_cap=1")
    with site.start("swap", *sets) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "judging the release" in line:
                break
        second = site.run("swap", *sets)
        first.stderr.read()
    assert second.returncode == 3, second.stderr
    assert first.returncode == 5
    assert site.status["release"] == before["release"]


def test_logs_and_history_are_readable(site: Site) -> None:
    assert site.run("logs", "-n", "5").stdout.strip()
    shown = site.json("logs", "-n", "5")
    assert (shown["service"], len(shown["lines"])) == ("local", 5)
    with site.start("logs", "-f", "-n", "2", "--json") as following:
        assert following.stdout is not None
        assert [list(json.loads(following.stdout.readline())) for _ in range(2)] == [["line"], ["line"]]
        following.send_signal(signal.SIGINT)
    shown = site.run("history", "-n", "50")
    assert "rolled back" in shown.stdout
    assert "why: acceptance refused it: acceptance_length: " in shown.stdout
    assert shown.stderr == ""
    undone = next(entry for entry in site.json("history") if entry["outcome"] == "rolled_back")
    assert f"why      {undone['reason']}\n" in site.run("history", "--entry", undone["id"]).stdout
    assert site.run("history", "--entry", "none").returncode == 2
    assert "acceptance length" in site.run("status").stdout


def test_a_first_deploy_that_fails_leaves_nothing_serving_and_says_so(site: Site) -> None:
    port = free_port()
    profile = site.home / "broken.yaml"
    profile.write_text(
        site.profile.read_text().replace("name: local", "name: broken").replace(str(site.port), str(port))
        + "engine: {extra_args: [--no-such-flag]}\n"
    )
    start = time.monotonic()
    shown = site.run("deploy", "profile", "broken.yaml")
    assert shown.returncode == 1
    assert time.monotonic() - start < 55
    assert "no-such-flag" in shown.stderr
    assert "stopped" in shown.stderr
    (status,) = site.json("status", "broken")
    assert status["state"] != "running"
    subprocess.run(["rm", "-r", site.home / "service" / "services" / "broken"], check=True)
