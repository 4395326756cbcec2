"""Keys that the server does not depend on: what is told and kept of a change; a release, but no server."""

import json
import re
import shlex
import socket
from dataclasses import replace

import pytest

from tests.deploy.conftest import Site, on_trial
from toolkit.cli.fleet.shown import show_changes
from toolkit.deploy.judging import Judging
from toolkit.deploy.kept_secrets import with_kept_secrets
from toolkit.deploy.record import Recorded, record
from toolkit.deploy.swap import overtakes, swap_changes, swap_command
from toolkit.deploy.swapped import Swapped
from toolkit.deploy.watcher import NOBODY
from toolkit.drift.find import find
from toolkit.errors import ToolkitError
from toolkit.fleet.results import HostResult
from toolkit.hostside import operations
from toolkit.profile.changes import Change
from toolkit.profile.loading import load_profile
from toolkit.release.experiment import forget_experiment, read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, layout_of
from toolkit.release.store import Release, Store
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import SecretSource

AGAINST = "from which the changes are told; made permanent by it"

RATE = "host.download_rate"


def steps(shown: dict[str, object]) -> list[str]:
    return [step["action"] for step in shown["steps"]]  # type: ignore[attr-defined]


def test_it_is_planned_told_recorded_and_no_drift(staged: Site) -> None:
    rate = ("--set", f"{RATE}=9MB")
    planned = staged.run("plan", "local.yaml", *rate).stdout
    assert f"record       {RATE}: unset -> 9MB" in planned
    assert "restart" not in planned
    shown = staged.run("swap", *rate)
    assert shown.returncode == 0, shown.stderr
    assert "swap on local, no restart:" in shown.stderr
    assert f"record: committed: {RATE}: on record; the server does not depend on it" in shown.stderr
    # A deploy with the same value only has to put on record that it was given it.
    again = staged.json("plan", "local.yaml", *rate)
    assert (steps(again), again["undone_swaps"]) == (["record", "start"], [])
    given, swapped = again["steps"][0]["reasons"]
    assert given == f"deployed with --set {RATE}=9MB"
    assert swapped == f"{RATE}: swapped before, and deployed now"
    planned = staged.json("plan", "local.yaml")
    assert steps(planned) == ["record", "start"]
    assert [change["key"] for change in planned["undone_swaps"]] == [RATE]
    # The release itself is as it was made: only that it does not run is told.
    assert [item["kind"] for item in staged.json("drift", "local", "--deployed")] == ["process"]
    assert staged.status["config"]["swapped"] == [RATE]
    (entry,) = staged.json("history")
    assert (entry["kind"], entry["outcome"]) == ("record", "committed")
    assert entry["changes"] == [{"key": RATE, "old": None, "new": "9MB"}]


def test_what_is_changed_while_a_command_waits_for_the_lock_is_in_its_diff(staged: Site) -> None:
    layout = layout_of(load_profile(str(staged.profile)).profile)
    release = Store(layout.service("local")).current()
    assert release is not None
    with ServiceHost(layout, "local").lock.hold("a change elsewhere"):
        waiting = staged.start("swap", "--set", f"{RATE}=9MB", "--lock-wait", "60")
        assert waiting.stderr is not None
        first = waiting.stderr.readline()
        profile = release.profile
        profile["host"]["download_rate"] = "9MB"
        release.record(profile, swapped=[RATE], sources={})
    said = f"{first}{waiting.communicate(timeout=60)[1]}"
    assert re.search(
        r"  lock +local is locked by \S+ pid \d+ since [^:]+:\d\d:\d\dZ \(\d+ s\): a change ", first
    )
    assert "; waiting for it, 60 s at most\n" in first
    assert (waiting.returncode, "nothing to do, every key has that value" in said) == (0, True), said


def test_there_is_no_trying_of_what_nobody_would_notice(staged: Site) -> None:
    shown = staged.run("swap", "--set", f"{RATE}=9MB", "--experiment")
    assert shown.returncode == 2
    assert f"the server does not depend on {RATE}: nothing to try" in shown.stderr
    assert staged.json("history") == []


def test_a_record_that_is_damaged_leaves_what_was_deployed(staged: Site) -> None:
    assert staged.run("swap", "--set", f"{RATE}=9MB").returncode == 0
    release = next((staged.home / "service" / "services" / "local" / "releases").iterdir())
    assert json.loads((release / "profile.json").read_text())["host"]["download_rate"] is None
    recorded = release / "recorded.json"
    recorded.chmod(0o644)
    recorded.write_text(recorded.read_text()[:50])
    assert steps(staged.json("plan", "local.yaml")) == ["start"]


def test_values_that_could_not_be_saved_are_told_in_the_one_answer(staged: Site) -> None:
    shown = staged.run("swap", "--set", f"{RATE}=9MB", "--save", "/proc/x.yaml", "--yes", "--json")
    answer = json.loads(shown.stdout)
    assert (shown.returncode, answer["ok"], answer["outcome"]["status"]) == (1, False, "committed")
    assert answer["error"] in shown.stderr
    assert "the swap itself is done" in answer["error"]


def test_beside_an_experiment_it_ends_nothing_and_is_kept_after_it(staged: Site) -> None:
    base, tried = on_trial(staged)
    paths = layout_of(load_profile(str(staged.profile)).profile).service("local")
    assert "release" in steps(staged.json("plan", "local.yaml", "--set", "speculative.budget=20"))
    shown = staged.run("swap", "--set", f"{RATE}=9MB", "--yes")
    assert shown.returncode == 0, shown.stderr
    assert "no restart" in shown.stderr
    assert read_experiment(paths) is not None
    for release in (base, tried):
        assert release.profile["host"]["download_rate"] == "9MB"
    assert base.swapped == (RATE,)
    assert base.profile["speculative"]["budget"] != 20


def test_secrets_of_a_release_whose_unit_was_lost_are_those_that_are_given(staged: Site) -> None:
    """Else no deploy over SSH could replace it."""
    layout = layout_of(load_profile(str(staged.profile)).profile)
    base = Store(layout.service("local")).current()
    assert base is not None
    unit = replace(
        base.unit,
        secrets={"api-key": SecretSource(env="KEY")},
        secrets_file=str(staged.home / "private" / "x"),
    )
    (base.path / "unit.json").unlink()
    kept = with_kept_secrets(unit, base, {"api-key": "value"})
    assert stored_secrets(kept) == {"api-key": "value"}


@pytest.mark.parametrize("name", ["profile.json", "unit.json"])
def test_what_hands_changed_is_refused_and_told_what_mends_it(staged: Site, name: str) -> None:
    release = next((staged.home / "service" / "services" / "local" / "releases").iterdir())
    path = release / name
    path.chmod(0o644)
    path.write_text(path.read_text().replace("30", "31"))
    shown = staged.run("start", "local")
    assert shown.returncode == 1
    assert f"{path}: is not the one that the release was made with" in shown.stderr
    assert "ddtoolkit deploy profile local" in shown.stderr
    # It would start from that, and return to it where the new one is worse.
    shown = staged.run("swap", "local", "--set", "speculative.budget=7", "--yes")
    assert shown.returncode == 1
    assert f"{path}: is not the one that the release was made with" in shown.stderr
    assert "ddtoolkit deploy profile local" in shown.stderr
    assert any(f"{path}: is not the one" in line for line in staged.status["warnings"])
    if name == "profile.json":
        shown = staged.run("swap", "--set", f"{RATE}=9MB", "--yes")
        assert shown.returncode == 1
        assert f"{path}: is not the one that the release was made with" in shown.stderr
    found = staged.json("drift", "local", "--deployed")
    assert any(item["subject"].startswith(str(release)) for item in found)
    assert [item["fix"] for item in found if item["kind"] == "process"] == ["ddtoolkit deploy profile local"]


def test_a_value_that_is_tried_is_kept_by_a_change_against_the_base(staged: Site) -> None:
    base, tried = on_trial(staged)
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")
    before = base.profile["speculative"]["budget"]
    wanted = (Change("speculative.budget", before, 20),)
    budget = ["speculative.budget=20"]
    for judging in (Judging(), Judging(new_baseline=True)):
        assert swap_changes(host, tried, budget, judging)[1] == wanted
    # Beside it, a key that the server does not depend on: both are kept, by one change.
    both = swap_changes(host, tried, [*budget, f"{RATE}=9MB"], Judging())[1]
    assert [change.key for change in both] == [RATE, "speculative.budget"]
    assert swap_changes(host, tried, budget, Judging(experiment_seconds=60))[1] == ()
    topk = base.profile["speculative"]["topk_cap"]
    assert swap_changes(host, tried, [f"speculative.topk_cap={topk}"], Judging())[1] == ()
    host.store.switch(base.id)
    assert [change.new for change in swap_changes(host, base, budget, Judging())[1]] == [20]


def test_a_swap_during_an_experiment_says_what_becomes_of_its_values(staged: Site) -> None:
    base, tried = on_trial(staged)
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")

    def told(*sets: str, judging: Judging = Judging()) -> str | None:  # noqa: B008
        return overtakes(host, tried, swap_changes(host, tried, sets, judging)[1], judging)

    which = f"the experiment of a@b, which has 10 min left and would return to {base.id}"
    topk = "speculative.topk_cap=4"
    assert told(topk) == f"this ends {which}, {AGAINST}: speculative.budget=20"
    assert told("speculative.budget=24") == f"this ends {which}, {AGAINST}: none of its values"
    trying = Judging(experiment_seconds=60)
    assert (
        told(topk, judging=trying) == f"this takes the place of {which}; still tried: speculative.budget=20"
    )
    # What restarts nothing ends none.
    assert told(f"{RATE}=9MB") is None
    forget_experiment(host.paths)
    assert told(topk) is None


def test_a_swap_during_an_experiment_says_so_before_it_begins(staged: Site) -> None:
    base, _ = on_trial(staged)
    with socket.create_server(("127.0.0.1", staged.port)):  # so that it ends before a server is started
        shown = staged.run("swap", "--set", "speculative.topk_cap=4", "--yes", "--json")
    note = (
        f"this ends the experiment of a@b, which has 10 min left and would return to {base.id}, "
        f"{AGAINST}: speculative.budget=20"
    )
    assert f"  note: {note}\n" in shown.stderr
    assert shown.stderr.index(note) < shown.stderr.index("s  build ")
    answer = json.loads(shown.stdout)
    assert (answer["outcome"]["status"], answer["notices"]) == ("not_started", [note])


def test_a_host_tells_the_same_of_an_experiment_before_and_after(
    staged: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, _ = on_trial(staged)
    monkeypatch.setattr("toolkit.release.lock._identity", [])
    args = {"service": "local", "sets": ["speculative.topk_cap=4"], "who": "ann@desk", "lock_wait": 0.0}
    shown = operations.swap_preview(args, lambda _: None)
    note = (
        f"this ends the experiment of a@b, which has 10 min left and would return to {base.id}, "
        f"{AGAINST}: speculative.budget=20"
    )
    assert shown["notices"] == [note]
    show_changes("swap", "local", [HostResult("ct200", shown)])
    assert f"  ct200: note: {note}\n" in capsys.readouterr().err
    service = Deployed("local", layout_of(load_profile(str(staged.profile)).profile))
    (staged.home / "service").chmod(0o700)  # what provisioning leaves: a host is not provisioned by its agent
    with NOBODY.reserve(service, "swap"), socket.create_server(("127.0.0.1", staged.port)):
        done = operations.swap(args, lambda _: None)
    assert (done["outcome"]["status"], done["notices"]) == ("not_started", [note])


def test_the_same_experiment_again_tells_what_runs_and_for_lets_it_go_on(staged: Site) -> None:
    base, tried = on_trial(staged)
    paths = layout_of(load_profile(str(staged.profile)).profile).service("local")
    same = ("swap", "--set", "speculative.budget=20", "--experiment")
    try:
        told = staged.run(*same)
        assert told.returncode == 0, told.stderr
        assert "local: nothing to do, every key has that value already" in told.stderr
        runs = rf"speculative.budget: tried already, by an experiment that returns to {base.id} at 20\S+ \S+Z"
        assert re.search(
            rf"{runs} \(in 10 min\); the same with --for TIME lets it run so long from now, ", told.stderr
        )
        assert "ddtoolkit rollback local ends it" in told.stderr
        longer = staged.run(*same, "--for", "2h", "--yes")
        assert longer.returncode == 0, longer.stderr
        assert re.search(
            rf"no restart:\n  the experiment returns to {base.id} at \S+ \S+Z -> at ", longer.stderr
        )
        assert (
            f"record: committed: {tried.id} goes on, an experiment that returns to {base.id}" in longer.stderr
        )
        experiment = read_experiment(paths)
        assert experiment is not None
        assert 7100 < experiment.remaining <= 7200
        assert experiment.timed
        (entry,) = staged.json("history")
        assert entry["command"] == "swap --set speculative.budget=20 --experiment --for 7200s"
        assert (entry["kind"], entry["release"]) == ("record", tried.id)
        # A key that is not on trial moves no end.
        port = staged.run("swap", "--set", f"service.port={staged.port}", "--experiment", "--for", "5h")
        assert "nothing to do" in port.stderr
        assert "tried already" not in port.stderr
    finally:
        forget_experiment(paths)


def damaged(release: Release, name: str) -> str:
    path = release.path / name
    path.chmod(0o644)
    path.write_text(path.read_text()[:40])
    return str(path)


def test_nothing_is_put_on_record_beside_a_damaged_release(staged: Site) -> None:
    base, tried = on_trial(staged)
    forget = layout_of(load_profile(str(staged.profile)).profile).service("local")
    path = damaged(base, "unit.json")
    try:
        shown = staged.run("swap", "--set", f"{RATE}=9MB", "--yes")
    finally:
        forget_experiment(forget)
    assert (shown.returncode, path in shown.stderr) == (1, True), shown.stderr
    assert "provision" not in shown.stderr
    assert [release.recorded for release in (base, tried)] == [None, None]
    assert staged.json("history") == []


def test_a_history_that_cannot_be_written_keeps_a_deploy_from_recording(staged: Site) -> None:
    paths = layout_of(load_profile(str(staged.profile)).profile).service("local")
    paths.history.symlink_to("/dev/null")
    release = Store(paths).current()
    assert release is not None
    shown = staged.run("deploy", "profile", "local.yaml", "--set", f"{RATE}=9MB", "--yes")
    assert shown.returncode == 1
    assert f"error: {paths.history}: cannot record the change: " in shown.stderr
    assert "next: mend or move it; nothing was changed" in shown.stderr
    assert release.recorded is None


def test_what_was_on_record_is_so_again_where_the_second_release_cannot_have_it(
    staged: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tried = on_trial(staged)
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")
    forget_experiment(host.paths)
    change = (Change("description", None, "new"),)
    record(host, "one", [Recorded(tried, tried.profile, Swapped(("a",), {}), {"local.yaml": b"old"})], change)
    before = tried.recorded
    (base.path / "recorded.json").mkdir()
    monkeypatch.setattr("toolkit.release.store.Release.require_recordable", lambda _: None)
    wanted = [
        Recorded(tried, tried.profile, Swapped(("b",), {}), {"local.yaml": b"new"}),
        Recorded(base, base.profile, Swapped(("b",), {})),
    ]
    with pytest.raises(ToolkitError, match=r"recorded\.json: cannot be written"):
        record(host, "two", wanted, change)
    assert tried.recorded == before
    assert tried.sources()["local.yaml"] == b"old"
    monkeypatch.undo()
    with pytest.raises(ToolkitError, match=r"recorded\.json: is no file"):
        record(host, "three", wanted, change)


def test_an_experiment_is_called_one_with_the_time_of_its_return(staged: Site) -> None:
    base, _ = on_trial(staged)
    ends = f"returns to {base.id} at 20"
    planned = staged.run("plan", "local.yaml").stdout
    assert f"note: speculative.budget: an experiment, which {ends}" in planned
    assert ", and this deploy ends it" in planned
    assert "swapped since the last deploy" not in planned
    asked = staged.run("deploy", "profile", "local.yaml")
    assert asked.returncode == 2
    assert f"(an experiment, which {ends}" in asked.stderr
    service = Deployed("local", layout_of(load_profile(str(staged.profile)).profile))
    (found,) = [drift for drift in find(service, base.profile) if drift.kind == "config"]
    assert f"20 is tried by an experiment, which {ends}" in found.found
    assert found.fix == "it ends by itself; ddtoolkit rollback local ends it now"


def test_the_history_has_the_command_of_an_experiment() -> None:
    trying = Judging(new_baseline=True, experiment_seconds=7200)
    said = "swap --set a.b=1 --experiment --for 7200s --new-baseline"
    assert swap_command(["a.b=1"], trying) == said
    assert swap_command(["a.b=1"], Judging()) == "swap --set a.b=1"
    assert shlex.split(swap_command(["a.b=a b's"], Judging())) == ["swap", "--set", "a.b=a b's"]
