"""Overlays and `--set` of a deploy: kept with the release, in the next steps, and missed where they lack."""

import json
import os
import pty
import subprocess
from dataclasses import replace

import pytest
import yaml

from tests.deploy.conftest import PROGRAM, Site
from toolkit.cli.plans import confirm_undone
from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.given import Given
from toolkit.profile.loading import load_profile
from toolkit.release.host import ServiceHost
from toolkit.release.locate import layout_of
from toolkit.release.store import Release
from toolkit.resources import bundled

RATE = "host.download_rate"
WIDER = ("--overlay", "wider.yaml", "--set", f"{RATE}=9MB")


@pytest.fixture
def wider(staged: Site) -> Site:
    """What is staged, deployed with an overlay and a `--set`, stopped."""
    (staged.home / "wider.yaml").write_text("speculative: {budget: 20}\n")
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")
    base = host.store.current()
    assert base is not None
    made = load_profile(str(staged.profile), overlays=[staged.home / "wider.yaml"], sets=[f"{RATE}=9MB"])
    name = host.store.new_id("a" * 64)
    release = host.store.stage(
        name,
        profile=made.data,
        unit=replace(base.unit, release=name),
        manifest=base.manifest,
        given=Given("local.yaml", ("wider.yaml",), (f"{RATE}=9MB",)),
    )
    (release.path / "acceptance.json").write_bytes((base.path / "acceptance.json").read_bytes())
    host.store.switch(name)
    return staged


def current(site: Site) -> tuple[ServiceHost, Release]:
    host = ServiceHost(layout_of(load_profile(str(site.profile)).profile), "local")
    release = host.store.current()
    assert release is not None
    return host, release


def test_a_drift_is_told_from_what_was_deployed_and_its_next_step_keeps_that(wider: Site) -> None:
    assert not [item for item in wider.json("drift", "local") if item["kind"] == "config"]
    wider.profile.write_text(wider.profile.read_text() + "description: other\n")
    shown = wider.run("drift", "local", "--json")
    again = f"ddtoolkit deploy profile local.yaml --overlay wider.yaml --set {RATE}=9MB"
    found = [item for item in json.loads(shown.stdout) if item["kind"] == "config"]
    assert [(item["subject"], item["fix"]) for item in found] == [("description", again)]
    assert f"local: the profile with --overlay wider.yaml --set {RATE}=9MB, as its " in shown.stderr
    # What is given here counts instead, in the next step, too.
    given = wider.json("drift", "local", "--set", "speculative.budget=18")
    (fix,) = [item["fix"] for item in given if item["subject"] == "speculative.budget"]
    assert fix == "ddtoolkit deploy profile local.yaml --set speculative.budget=18"
    # A file of the same name that is another service's is not taken for it.
    wider.profile.write_text(wider.profile.read_text().replace("name: local", "name: other"))
    assert "no profile 'local' with --overlay wider.yaml" in wider.run("drift", "local").stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Given("local.yaml", ("gone.yaml",)), "(gone.yaml: cannot be read: "),
        (Given("local.yaml", ("gone",)), "(no overlay 'gone', and no file of that name)"),
        (Given("local.yaml", sets=("speculative.gone=3",)), "(--set: speculative.gone: "),
        (Given(f"{'x' * 5000}.yaml"), "no profile 'local' is found here"),
        (Given("a\0b.yaml", ("a\0b",)), "no profile 'local' with --overlay"),
        (Given("/dev/zero", ("/dev/zero",)), "no profile 'local' with --overlay /dev/zero is found here"),
    ],
    ids=["overlay", "name of an overlay", "key", "long", "null byte", "device"],
)
def test_what_a_record_names_and_is_not_here_is_told_with_why(wider: Site, given: Given, told: str) -> None:
    """Overlays move, keys are renamed, and a record may be damaged."""
    _, release = current(wider)
    release.record(release.profile, swapped=(), sources={}, given=given)
    shown = wider.run("drift", "local")
    assert shown.returncode == 7, shown.stderr
    assert told in shown.stderr
    assert shown.stderr.endswith(": comparing with what was deployed alone\n"), shown.stderr


def test_a_release_that_hands_changed_is_mended_with_what_it_was_deployed_with(wider: Site) -> None:
    _, release = current(wider)
    path = release.path / "profile.json"
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"budget": 20', '"budget": 21'))
    again = f"ddtoolkit deploy profile local.yaml --overlay wider.yaml --set {RATE}=9MB"
    with pytest.raises(ToolkitError) as told:
        release.require_unaltered("local")
    assert told.value.hint is not None
    assert told.value.hint.startswith(f"{again} makes a sound release; ")
    assert wider.json("status")[0]["warnings"][0].endswith(f"({told.value.hint})")


def test_the_status_tells_what_the_deploy_laid_on_the_profile(wider: Site) -> None:
    (line,) = [line for line in wider.run("status").stdout.splitlines() if "deployed with" in line]
    assert line.partition("deployed with")[2].strip() == f"local.yaml --overlay wider.yaml --set {RATE}=9MB"
    _, release = current(wider)
    release.record(release.profile, swapped=(), sources={}, given=Given())
    assert "deployed with" not in wider.run("status").stdout


def test_a_deploy_without_the_overlay_says_so_and_asks(wider: Site) -> None:
    note = (
        f"note: the current release was deployed with --overlay wider.yaml --set {RATE}=9MB, this one is not"
    )
    assert note in wider.run("plan", "local.yaml").stdout
    kept = wider.run("plan", "local.yaml", *WIDER, "--set", "speculative.topk_cap=2").stdout
    assert "speculative.topk_cap" in kept
    assert "was deployed with" not in kept
    shown = wider.run("deploy", "profile", "local.yaml")
    assert shown.returncode == 2
    assert shown.stderr.index(note) < shown.stderr.index("error: ")
    assert f"next: add --overlay wider.yaml --set {RATE}=9MB to keep it, or --yes to deploy without it" in (
        shown.stderr
    )
    assert current(wider)[1].profile["speculative"]["budget"] == 20


def test_no_is_answered_with_what_it_came_to(wider: Site) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "w") as terminal:
        asked = subprocess.Popen(
            [PROGRAM, "deploy", "profile", "local.yaml", "--set", f"{RATE}=9MB"],
            env=wider.environment, cwd=wider.home, text=True, stdin=theirs, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(theirs)
        terminal.write("n\n")
        terminal.flush()
        said = asked.communicate(timeout=60)[1]
    assert (asked.returncode, said.endswith("]:nothing was changed\n")) == (1, True), said
    assert "deploy without --overlay wider.yaml? [y/N]" in said


def test_a_swap_keeps_on_record_what_the_deploy_was_given(wider: Site) -> None:
    before = current(wider)[1].given
    assert wider.run("swap", "--set", f"{RATE}=8MB").returncode == 0
    assert current(wider)[1].swapped == (RATE,)
    assert current(wider)[1].given == before


def test_what_is_lost_is_told_where_it_shows() -> None:
    before = Given("", ("ep8", "site/mine.yaml"), ("a.b=1", "c=2"))
    assert before.lost(Given(), ()) == ()
    assert before.lost(Given(), ["c"]) == ("--overlay ep8", "--overlay site/mine.yaml", "--set c=2")
    # A file that a name finds is the same overlay; another value of a key is a choice.
    now = Given("", ("profiles/overlays/ep8.yaml", "mine"), ("a.b=3",))
    assert before.lost(now, ["a.b", "c.d"]) == ("--set c=2",)
    dotted = Given("", ("ep8.v2",))
    assert dotted.lost(Given("", ("ep8.v3",)), ["c"]) == ("--overlay ep8.v2",)
    assert dotted.lost(Given("", ("profiles/overlays/ep8.v2.yml",)), ["c"]) == ()
    reference = Given(sets=("service.api_key.env=KEY",))
    assert reference.lost(Given(), ["service.api_key"]) == ("--set service.api_key.env=KEY",)
    assert reference.lost(Given(), ["service.api_key_file"]) == ()


def test_an_overlay_by_name_and_by_file_is_the_same() -> None:
    """Else two people who give it each in a way of their own would find work at every look."""
    before = Given("", ("a/ep8.yaml", "b"), ("b=1", "c=2"))
    assert Given("x.yaml", ("ep8", "b.yml"), ("c=2", "b=1")).lays_the_same(before)
    for other in (Given("", ("b", "ep8"), before.sets), Given("", ("ep8", "b"), ("b=1",)), Given()):
        assert not other.lays_the_same(before)


def test_overlays_that_a_deploy_lacks_are_named_in_their_order() -> None:
    """They are merged in it, and the next step is pasted."""
    lost = {"a": ("--overlay wide", "--overlay fast", "--set c=1"), "b": ("--overlay wide", "--set d=2")}
    with pytest.raises(ConfigError) as told:
        confirm_undone({}, lost, yes=False)
    assert told.value.hint is not None
    assert told.value.hint.startswith("add --overlay wide --overlay fast --set c=1 --set d=2 to keep it")


def test_playbooks_plan_before_a_deploy_what_the_deploy_is_asked_for() -> None:
    """Else the look at a host finds work, and asks the doctor, where the deploy has none."""
    tasks = [
        next(task["ddtoolkit"] for task in play["tasks"] if "ddtoolkit" in task)
        for name in ("preflight", "install")
        for play in yaml.safe_load((bundled("playbooks") / f"{name}.yml").read_text())
        if "tasks" in play
    ]
    keys = ("service", "profile", "sources", "given", "secrets", "ignored", "who")
    first, second = ({key: task.get(key) for key in keys} for task in tasks)
    assert first == second
    assert None not in first.values()


def test_words_that_a_shell_would_split_are_quoted() -> None:
    given = Given("", ("my file.yaml",), ("model.served_name=a b",))
    again = "ddtoolkit deploy profile llm --overlay 'my file.yaml' --set 'model.served_name=a b'"
    assert given.deploy("llm") == again
    assert Given.from_json(json.loads(json.dumps(given.to_json()))) == given
    for damaged in (None, [], {"overlays": "x", "sets": [1], "profile": 2}):
        assert Given.from_json(damaged) == Given()
