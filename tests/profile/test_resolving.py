"""Names, overlays, origins, stored profiles and what changes between two."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import (
    Change,
    change_profile,
    differences,
    list_profiles,
    load_profile,
    profile_from_data,
)


def problems(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return [str(problem) for problem in caught.value.problems]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


SMALL = "name: {}\nmodel: {{drafter: {{source: bundled}}}}\n"


def test_the_shipped_profile_is_valid_without_warnings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = load_profile("local-cpu")
    assert resolved.profile.name == "local-cpu"
    assert resolved.warnings == ()


SHIPPED = {"b300-nvlink-8x", "h200-nvlink", "local-cpu", "rtx-pro-6000-pcie-8x", "systemd-cpu"}


def test_names_are_found_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDTOOLKIT_PROFILES", str(tmp_path / "mine"))
    write(tmp_path / "mine" / "one.yaml", SMALL.format("one") + "description: mine\n")
    write(tmp_path / "mine" / "local-cpu.yaml", SMALL.format("local-cpu") + "description: mine\n")
    assert load_profile("one").profile.description == "mine"
    assert load_profile("local-cpu").profile.description == "mine"
    write(tmp_path / "profiles" / "one.yml", SMALL.format("one") + "description: here\n")
    assert load_profile("one").profile.description == "here"
    assert str(load_profile("one").origins["name"]) == "profiles/one.yml:1:7"
    found = [(item.name, item.description) for item in list_profiles()]
    own = [item for item in found if item[0] in ("local-cpu", "one")]
    assert own == [("local-cpu", "mine"), ("one", "here")]
    assert [name for name, _ in found] == sorted({*SHIPPED, "one"})


def test_an_unknown_name_gets_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no profile 'local-cup' in ") as caught:
        load_profile("local-cup")
    assert caught.value.hint == "did you mean local-cpu?"


def test_a_name_must_be_that_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "profiles" / "one.yaml", SMALL.format("two"))
    assert problems(load_profile, "one") == [
        "profiles/one.yaml:1:7: name: is 'two' in a file called one.yaml (write `name: one`)"
    ]
    assert load_profile("profiles/one.yaml").profile.name == "two"


def test_a_wrong_folder_variable_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTOOLKIT_PROFILES", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="DDTOOLKIT_PROFILES"):
        load_profile("local-cpu")


def test_broken_profiles_are_listed_as_broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "profiles" / "bad.yaml", "name: bad\nbudget: 7\n")
    write(tmp_path / "profiles" / "notes.txt", "no profile")
    listed = {item.name: item for item in list_profiles()}
    assert {name for name, item in listed.items() if item.problem is None} == SHIPPED
    bad = listed["bad"]
    assert "profiles/bad.yaml:2:1: budget: no such key" in bad.problem


def test_sources_have_their_hashes(small, tmp_path):
    overlay = write(tmp_path / "over.yaml", "speculative: {budget: 9}\n")
    resolved = load_profile(str(small), overlays=[overlay])
    assert [(source.path, source.sha256) for source in resolved.sources] == [
        (path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in (small, overlay)
    ]


def test_overlays_merge_maps_and_replace_the_rest(tmp_path):
    base = write(
        tmp_path / "base.yaml",
        SMALL.format("a")
        + "engine: {extra_args: [--one, --two]}\nservice: {environment: {A: 1, B: 2}, port: 1000}\n",
    )
    first = write(
        tmp_path / "first.yaml",
        "engine:\n  extra_args: [--three]\nservice:\n  environment: {B: 3, C: 4}\n",
    )
    second = write(tmp_path / "second.yaml", "service: {environment: {C: 5}}\n")
    resolved = load_profile(str(base), overlays=[first, second])
    assert resolved.data["engine"]["extra_args"] == ["--three"]
    assert resolved.data["service"]["environment"] == {"A": "1", "B": "3", "C": "5"}
    assert resolved.data["service"]["port"] == 1000
    assert str(resolved.origins["engine.extra_args"]) == f"{first}:2:15"
    assert str(resolved.origins["service.environment.A"]) == f"{base}:4:28"
    assert str(resolved.origins["service.environment.B"]) == f"{first}:4:20"
    assert str(resolved.origins["service.environment.C"]) == f"{second}:1:28"


def test_overlays_that_say_otherwise_are_told_and_the_later_counts(small, tmp_path):
    first = write(tmp_path / "first.yaml", "parallelism: {tp: 1}\nspeculative: {budget: 9, topk_cap: 4}\n")
    second = write(tmp_path / "second.yaml", "speculative:\n  budget: 20\n  topk_cap: 4\n")
    third = write(tmp_path / "third.yaml", "speculative: {budget: 30}\nservice: {port: 31000}\n")
    resolved = load_profile(str(small), overlays=[first, second, third], sets=["service.port=32000"])
    assert resolved.profile.speculative.budget == 30
    # What agrees, what the base had, and what `--set` says on top are no conflicts of overlays.
    assert [str(item) for item in resolved.overrides] == [
        f"speculative.budget: 20 of {second}:2:11 counts; {first}:2:23 had 9",
        f"speculative.budget: 30 of {third}:1:23 counts; {second}:2:11 had 20",
    ]
    assert resolved.overrides[0].to_json() == {
        "key": "speculative.budget",
        "value": "20",
        "former": "9",
        "origin": f"{second}:2:11",
        "former_origin": f"{first}:2:23",
    }
    assert load_profile(str(small), overlays=[first]).overrides == ()


def test_an_overlay_that_unsets_what_another_set_below_is_told(tmp_path):
    base = write(tmp_path / "base.yaml", SMALL.format("a"))
    first = write(tmp_path / "first.yaml", "service: {api_key: {env: KEY}}\n")
    second = write(tmp_path / "second.yaml", "service: {api_key: null}\n")
    resolved = load_profile(str(base), overlays=[first, second])
    (found,) = resolved.overrides
    assert (found.key, found.value, found.former) == ("service.api_key.env", None, "KEY")
    assert resolved.profile.service.api_key is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is an empty overlay: it would change nothing (write the keys that are to differ, such as"),
        ("# later\n", "is an empty overlay: it would change nothing"),
        ("- a\n", "must be a map of keys: `service: {port: 30001}`"),
    ],
)
def test_an_overlay_without_keys_says_what_an_overlay_is(small, tmp_path, text, said):
    (found,) = problems(load_profile, str(small), overlays=[write(tmp_path / "over.yaml", text)])
    assert f"over.yaml{':1:1' if text[:1] == '-' else ''}: {said}" in found


def test_problems_of_overlays_point_into_them(small, tmp_path):
    overlay = write(tmp_path / "over.yaml", "name: other\nspeculative: {buget: 9, budget: 2, topk_cap: x}\n")
    assert problems(load_profile, str(small), overlays=[overlay]) == [
        f"{overlay}:1:1: name: an overlay cannot change the name (take it out)",
        f"{overlay}:2:15: speculative.buget: no such key (did you mean budget?)",
        f"{overlay}:2:46: speculative.topk_cap: must be an integer from 1 to 1024, not 'x'",
    ]


def test_a_broken_overlay_and_a_broken_base_are_both_reported(tmp_path):
    base = write(tmp_path / "base.yaml", "name: a\n\tx\n")
    overlay = write(tmp_path / "over.yaml", "")
    found = problems(load_profile, str(base), overlays=[overlay, tmp_path / "none.yaml"])
    assert [line.split(": ")[0].removeprefix(f"{tmp_path}/") for line in found] == [
        "base.yaml:2:1",
        "over.yaml",
        "none.yaml",
    ]


def test_a_rule_broken_by_an_overlay_points_at_the_key(small, tmp_path):
    overlay = write(tmp_path / "over.yaml", "speculative:\n  block_size: 32\n")
    (found,) = problems(load_profile, str(small), overlays=[overlay])
    assert found.startswith(f"{small}:4:3: speculative.budget: 16 is below block_size - 1 = 31")


def test_the_resolved_form_is_itself_a_profile(small, tmp_path):
    resolved = load_profile(str(small), sets=["service.environment.A=on", "service.load_timeout=1.5s"])
    again = write(tmp_path / "again.yaml", json.dumps(resolved.data))
    assert load_profile(str(again)).data == resolved.data
    assert profile_from_data(json.loads(json.dumps(resolved.data))) == resolved.profile


def test_every_value_has_an_origin(small):
    resolved = load_profile(str(small))
    assert str(resolved.origins["speculative.budget"]) == f"{small}:4:11"
    assert str(resolved.origins["service.environment"]) == "default"
    assert len(resolved.origins) > 50


def test_change_profile_gives_the_changes(small):
    data = load_profile(str(small)).data
    profile, changes = change_profile(data, ["speculative.budget=7", "speculative.topk_cap=1"])
    assert changes == [Change("speculative.budget", 16, 7), Change("speculative.topk_cap", 8, 1)]
    assert (profile.speculative.budget, profile.speculative.topk_cap) == (7, 1)
    assert change_profile(data, ["speculative.budget=16"])[1] == []


def test_change_profile_refuses_as_files_do(small):
    data = load_profile(str(small)).data
    assert problems(change_profile, data, ["speculative.buget=7", "service.port=0"]) == [
        "--set: speculative.buget: no such key (did you mean budget?)",
        "--set: service.port: must be an integer from 1 to 65535, not '0'",
    ]
    # The key that was set is named, though the rule is about another.
    (found,) = problems(change_profile, data, ["speculative.block_size=32"])
    assert found.startswith(
        "--set speculative.block_size: speculative.budget: 16 is below block_size - 1 = 31"
    )
    data["speculative"]["budget"] = 3
    (found,) = problems(change_profile, data, ["service.port=30001"])
    assert found.startswith("the stored profile: speculative.budget: 3 is below block_size - 1 = 7")


def test_differences_of_a_secret_s_command_tell_no_arguments(small):
    """They are shown, and stay in the history."""
    key = "service.api_key.command"
    commands = [
        {"service": {"api_key": {"command": words}}} for words in (["vault", "-t", "one"], ["vault", "two"])
    ]
    assert differences(*commands) == [Change(key, ["vault", "..."], ["vault", "..."])]
    alone = {"service": {"api_key": {"command": ["/usr/bin/key"]}}}
    assert differences(alone, commands[0]) == [Change(key, ["/usr/bin/key"], ["vault", "..."])]


def test_differences_see_sections_lists_and_new_keys(small):
    base = load_profile(str(small)).profile
    other = load_profile(
        str(small),
        sets=["engine.extra_args=[--x]", "service.environment.A=1", "service.api_key.env=K", "host.root=/x"],
    ).profile
    assert differences(base, other) == [
        Change("engine.extra_args", [], ["--x"]),
        Change("host.root", None, "/x"),
        Change("service.api_key.env", None, "K"),
        Change("service.environment.A", None, "1"),
    ]
    assert differences(other, base)[2] == Change("service.api_key.env", "K", None)
    assert differences(base, base) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"schema": 2, "colour": "blue"}, "is schema 2; this ddtoolkit reads up to schema 1"),
        ({"colour": "blue"}, "the stored profile: colour: no such key"),
        ({"name": 7}, "the stored profile: name: must be"),
        ({"service": []}, "the stored profile: service: must be a map"),
        ({"speculative": {"budget": "7"}}, "speculative.budget: must be an integer"),
        (
            {"speculative": {"budget": True}},
            "speculative.budget: must be an integer from 1 to 1024, not 'true'",
        ),
        ({"model": {"served_name": "\ud800"}}, "model.served_name: holds U+D800"),
    ],
)
def test_damaged_stored_profiles(small, damage, message):
    data = load_profile(str(small)).data | damage
    assert message in problems(profile_from_data, data)[0]


def test_rules_do_not_bar_a_stored_profile(small):
    data = load_profile(str(small)).data
    data["speculative"]["budget"] = 2
    assert profile_from_data(data).speculative.budget == 2


def test_warnings_have_their_place(small):
    small.write_text(small.read_text() + "service:\n  environment:\n    HF_TOKEN: hf_x\n")
    (warning,) = load_profile(str(small)).warnings
    assert str(warning).startswith(f"{small}:7:5: service.environment.HF_TOKEN: looks like a secret")
    assert "hf_x" not in str(warning)


def test_loading_needs_no_engine(small):
    code = (
        "import sys; from toolkit.profile.loading import load_profile; load_profile(sys.argv[1]); "
        "sys.exit(bool({'torch', 'fastapi', 'ansible', 'transformers', 'httpx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(small)], check=False).returncode == 0


def test_overlays_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("linear-dflash")])
    assert shipped.profile.speculative.algorithm == "DFLASH"
    assert shipped.origins["speculative.algorithm"].source.endswith("profiles/overlays/linear-dflash.yaml")
    own = write(tmp_path / "profiles/overlays/linear-dflash.yaml", "speculative: {budget: 9}\n")
    mine = load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("linear-dflash")])
    assert (mine.profile.speculative.algorithm, mine.profile.speculative.budget) == ("DDTREE", 9)
    own.rename(tmp_path / "linear-dflash")  # a file of that name, as it was always given
    file = load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("linear-dflash")])
    assert str(file.origins["speculative.budget"]) == "linear-dflash:1:23"


def test_an_unknown_overlay_gets_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no overlay 'ep9'") as caught:
        load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("ep9")])
    assert caught.value.hint == "did you mean ep8?"
    with pytest.raises(ConfigError) as caught:
        load_profile("rtx-pro-6000-pcie-8x", overlays=[Path("zzzzzz")])
    assert "there is: chain-control, ep4, ep8, gpus-1" in caught.value.hint


def test_overlays_and_sets_compose_and_tell_where_from(tmp_path):
    over = write(tmp_path / "over.yaml", "speculative: {topk_cap: 4}\nservice: {port: 31000}\n")
    found = load_profile(
        "b300-nvlink-8x", overlays=[Path("chain-control"), over], sets=["speculative.budget=9"]
    )
    spec = found.profile.speculative
    assert (spec.expansion, spec.budget, spec.topk_cap, found.profile.service.port) == ("chain", 9, 4, 31000)
    origins = {key: found.origins[f"speculative.{key}"].source for key in ("expansion", "budget", "topk_cap")}
    assert origins["expansion"].endswith("overlays/chain-control.yaml")
    assert origins["budget"] == "--set"
    assert origins["topk_cap"] == str(over)
    assert found.origins["speculative.block_size"].source.endswith("profiles/b300-nvlink-8x.yaml")
    assert found.origins["host.download_files"].source == "default"
