"""validate and profiles show for machines with GPUs, as people and programs read them."""

import json

NAME = "rtx-pro-6000-pcie-8x"


def test_a_valid_profile_says_what_it_takes(ddtoolkit):
    done = ddtoolkit("validate", NAME)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{NAME}: valid; it takes 91.8 of 94.6 GiB of each GPU\n"
    told = json.loads(ddtoolkit("validate", NAME, "--json").stdout)
    assert (told["ok"], told["memory"]["fits"], told["memory"]["layout"]) == (True, True, "tp 8")
    assert told["memory"]["static"] + told["memory"]["dynamic"] < told["memory"]["free"]


def test_what_is_not_judged_says_so(ddtoolkit):
    done = ddtoolkit("validate", NAME, "--set", "model.target.shape=null")
    assert "memory is not judged yet" in done.stdout
    assert json.loads(ddtoolkit("validate", "local-cpu", "--json").stdout)["memory"] is None
    assert ddtoolkit("validate", "local-cpu").stdout == "local-cpu: valid\n"


def test_a_refusal_has_the_sum_and_the_next_step(ddtoolkit):
    done = ddtoolkit("validate", NAME, "--set", "engine.memory_fraction=0.8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "target weights 71.9 + drafter weights 1.3 + K/V 9.4 = 82.7 GiB" in done.stderr
    assert "engine.memory_fraction from 0.875 to 0.904" in done.stderr


def test_the_sum_for_every_way_to_spread(ddtoolkit):
    done = ddtoolkit("profiles", "show", NAME, "--memory")
    assert done.returncode == 0
    lines = {line[:22].strip(): line.split() for line in done.stdout.splitlines()}
    assert lines["target weights"][-4:] == ["71.9", "76.3", "71.9", "71.9"]
    assert lines["fits"][-4:] == ["yes"] * 4
    told = json.loads(ddtoolkit("profiles", "show", NAME, "--memory", "--json").stdout)
    assert [each["layout"] for each in told] == ["tp 8", "pp 8, no speculation", "tp 8 ep 8", "tp 8 ep 4"]
    other = ddtoolkit("profiles", "show", "local-cpu", "--memory")
    assert (other.returncode, other.stdout) == (2, "")
    assert "what a GPU holds is not known" in other.stderr


def test_where_each_value_came_from(ddtoolkit):
    done = ddtoolkit("profiles", "show", NAME, "--resolved", "-f", "ep8", "--set", "service.port=31000")
    origin = {
        line.split(":")[0].strip(): line.rpartition("# ")[2]
        for line in done.stdout.splitlines()
        if "# " in line
    }
    assert origin["ep"].endswith("profiles/overlays/ep8.yaml:6:7")
    assert origin["port"] == "--set"
    assert origin["budget"].endswith(f"profiles/{NAME}.yaml:83:11")
    assert origin["keep_releases"] == "default"


def test_the_unit_and_the_arguments_are_rendered(ddtoolkit):
    argv = json.loads(ddtoolkit("render", NAME, "--format", "argv", "-f", "plain").stdout)
    assert "sglang.launch_server" in argv
    assert "--speculative-algorithm" not in argv
    process = "note: with service.manager: process no unit is written; this one systemd would have"
    assert process in ddtoolkit("render", "local-cpu").stderr
    unit = ddtoolkit("render", "b300-nvlink-8x")
    assert process not in unit.stderr
    assert unit.returncode == 0
    assert "Requires=nvidia-fabricmanager.service" in unit.stdout


def test_overlays_at_odds_are_told_by_every_command_that_lays_them_on(ddtoolkit):
    at_odds = (NAME, "--overlay", "pp8", "--overlay", "ep8")
    words = "notice: parallelism.pp: 1 of "
    done = ddtoolkit("validate", *at_odds, "--json")
    (found,) = [item for item in json.loads(done.stdout)["overrides"] if item["key"] == "parallelism.pp"]
    assert (found["value"], found["former"]) == ("1", "8")
    assert found["origin"].endswith("overlays/ep8.yaml:5:7")
    assert done.returncode == 0
    assert words in done.stderr
    done = ddtoolkit("profiles", "show", *at_odds, "--resolved")
    assert words in done.stderr
    assert words not in done.stdout
    assert len(json.loads(ddtoolkit("profiles", "show", *at_odds, "--json").stdout)["overrides"]) == 3
    done = ddtoolkit("plan", "local-cpu", "-f", "plain", "-f", "linear-dflash", "--json")
    assert "notice: speculative.algorithm: DFLASH of " in done.stderr
    assert [item["key"] for item in json.loads(done.stdout)["overrides"]] == ["speculative.algorithm"]
