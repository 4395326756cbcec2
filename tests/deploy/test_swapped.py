"""Which keys count as swapped: those that differ from what the last deploy gave them."""

from tests.deploy.conftest import Site, on_trial
from toolkit.deploy.swapped import Swapped
from toolkit.profile.changes import Change

RATE = "host.download_rate"


def test_a_key_with_its_deployed_value_again_is_no_swapped_one(staged: Site) -> None:
    def swapped(value: str) -> list[str]:
        assert staged.run("swap", "--set", f"{RATE}={value}").returncode == 0
        return list(staged.status["config"]["swapped"])

    assert [swapped(value) for value in ("9MB", "8MB", "null", "7MB")] == [[RATE], [RATE], [], [RATE]]
    # Nor is one to which the profile has come meanwhile, once that was deployed.
    text = staged.profile.read_text().replace("host: {", "host: {download_rate: 7MB, ")
    staged.profile.write_text(text)
    planned = staged.json("plan", "local.yaml")
    assert [step["action"] for step in planned["steps"]] == ["record", "start"]
    assert planned["changes"] == []
    assert planned["steps"][0]["reasons"] == [f"{RATE}: swapped before, and deployed now"]


def test_a_key_is_held_against_the_last_deploy_through_a_trial(staged: Site) -> None:
    base, tried = on_trial(staged)
    budget, before = "speculative.budget", base.profile["speculative"]["budget"]
    changed = {**tried.profile, "service": {**tried.profile["service"], "stop_timeout": "5s"}}
    stop = Change("service.stop_timeout", base.profile["service"]["stop_timeout"], "5s")
    # As a swap sees them that ends the experiment: against what it returns to.
    once = Swapped.after(tried, (Change(budget, before, 20), stop), changed)
    assert once == Swapped((stop.key, budget), {stop.key: stop.old, budget: before})
    tried.record(changed, swapped=once.keys, deployed=once.deployed, sources={})
    changed["speculative"] = base.profile["speculative"]
    assert Swapped.of(tried) == once
    assert Swapped.after(tried, (stop,), changed) == Swapped((stop.key,), {stop.key: stop.old})


def test_of_a_release_that_tells_no_deployed_values_every_swapped_key_is_told(staged: Site) -> None:
    base, release = on_trial(staged)
    release.record(base.profile, swapped=["speculative.budget"], sources={})
    assert (release.swapped, release.deployed) == (("speculative.budget",), {})
    assert Swapped.after(release, (), release.profile).keys == release.swapped
