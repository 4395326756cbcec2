"""Wheels for the hosts of a deploy: what the plan says, and what one host's failure is to the others."""

from pathlib import Path

import pytest

from tests.build.wheels import Site, checksums, lock_for, make_wheel
from toolkit.build.wheels.house import open_house
from toolkit.errors import ConfigError, ToolkitError
from toolkit.fleet.results import HostResult
from toolkit.fleet.send_wheels import Order
from toolkit.fleet.wheels import (
    Here,
    HouseThere,
    bring_wheels,
    check_here,
    check_wheels,
    house_of,
    order_of,
    with_house_there,
    with_wheels,
)
from toolkit.inventory.host import Host
from toolkit.profile.loading import load_profile

STEPS = [{"action": name, "reasons": ["as before"]} for name in ("provision", "libraries", "build")]
LOCAL = {"ansible_connection": "local"}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path, Host("box", LOCAL), tmp_path / "root")


def plans(*names: str, steps=STEPS) -> list[HostResult]:
    return [HostResult(name, {"plan": {"steps": steps}}) for name in names]


def hosts(*names: str) -> dict[str, Host]:
    return {name: Host(name, LOCAL) for name in names}


def test_the_plan_says_what_comes_and_that_it_is_installed_from(site):
    (planned,) = with_wheels(plans("box"), {"box": site.order()}, hosts("box"), 1)
    steps = {step["action"]: step["reasons"] for step in planned.value["plan"]["steps"]}
    assert list(steps) == ["provision", "wheels", "libraries", "build"]
    assert steps["wheels"] == [f"2 files, 3.0 MB, from {site.house} here"]
    assert steps["libraries"] == [
        f"{site.lock.folder_name}: the locked libraries of the mini engine, from {site.store}"
    ]
    site.bring()
    (planned,) = with_wheels(plans("box"), {"box": site.order()}, hosts("box"), 1)
    assert planned.value["plan"]["steps"][1]["reasons"] == [
        f"0 files, 0 B, from {site.house} here, 2 of 2 are there"
    ]


def test_where_no_libraries_are_installed_nothing_comes(site):
    before = plans("box", steps=[STEPS[0]])
    assert with_wheels(before, {"box": site.order()}, hosts("box"), 1) == before
    assert with_wheels(plans("box"), {}, hosts("box"), 1) == plans("box")
    assert bring_wheels({"box": site.order()}, hosts("box"), before, lambda *_: None, limit=1) == before


def test_what_is_damaged_here_is_told_before_any_host_is_touched(site):
    planned = with_wheels(plans("box"), {"box": site.order()}, hosts("box"), 1)
    check_wheels({"box": site.order()}, planned)
    site.small.write_bytes(site.small.read_bytes() + b"x")
    with pytest.raises(ToolkitError, match=f"{site.small} is damaged"):
        check_wheels({"box": site.order()}, planned)


def test_after_a_failure_no_other_host_is_begun(site, tmp_path):
    told: list[str] = []
    orders = dict.fromkeys(("a", "b"), site.order())
    planned = with_wheels(plans("a", "b"), orders, hosts("a", "b"), 2)
    known = {**hosts("b"), "a": Host("a", {"ansible_host": "127.0.0.1", "ansible_port": 9})}
    done = bring_wheels(orders, known, planned, lambda host, _: told.append(host), limit=2)
    failed, other = done
    assert "no SSH at 127.0.0.1 port 9" in failed.error.message
    assert other.skipped == "not begun, since wheels could not be brought to a"
    assert set(told) == {"a", "b"}


def test_on_this_machine_it_goes_without_ssh(site):
    said: list[str] = []
    here = Here(site.order())
    shown = here.planned({"steps": STEPS})
    assert [step["action"] for step in shown["steps"]] == ["provision", "wheels", "libraries", "build"]
    here.bring(lambda name, text: said.append(f"{name} {text}"), said.append)
    assert said[0] == f"wheels from {site.house}"
    assert site.whole()
    with pytest.raises(ConfigError, match=r"has no other==1\.0"):
        Here(Order(open_house(site.house), lock_for(_other(site.house)), str(site.root))).planned(
            {"steps": STEPS}
        )


def test_a_house_on_the_host_that_will_not_do_is_an_error_of_that_host(site):
    house = HouseThere(str(site.house), site.lock, str(site.root))
    houses = dict.fromkeys(("box", "other"), house)
    both = [*plans("box"), *plans("other", steps=[STEPS[0]])]
    assert with_house_there(both, houses, hosts("box", "other"), 2) == both
    assert with_house_there(both, {}, hosts("box", "other"), 2) == both
    site.small.unlink()
    failed, other = with_house_there(both, houses, hosts("box", "other"), 2)
    assert f"box: the wheelhouse {site.house} on this host has no small==1.0" in failed.error.message
    assert other == both[1]
    brought = plans("box", steps=[*STEPS, {"action": "wheels", "reasons": []}])
    assert with_house_there(brought, houses, hosts("box"), 1) == brought


def test_a_profiles_own_wheelhouse_is_looked_at_on_this_machine(tmp_path):
    profile = load_profile("systemd-cpu", sets=[f"host.wheelhouse={tmp_path}/none"]).profile
    with pytest.raises(ToolkitError, match=f"this machine: no wheelhouse {tmp_path}/none on this host"):
        check_here({"steps": STEPS}, profile)
    check_here({"steps": STEPS[:1]}, profile)
    assert house_of(load_profile("systemd-cpu").profile) is None


def _other(folder: Path) -> Path:
    wheel = make_wheel(folder.parent, "other")
    checksums(folder)
    return wheel


@pytest.mark.parametrize(
    ("name", "sets", "why"),
    [
        ("local-cpu", (), "its manager is not systemd"),
        ("systemd-cpu", ("host.python=/usr/bin/python3",), "host.python names what has them"),
    ],
)
def test_a_profile_for_which_nothing_is_installed_takes_none(site, name, sets, why):
    with pytest.raises(ConfigError, match=f"no libraries are installed for {name}: {why}"):
        order_of(load_profile(name, sets=sets).profile, site.house)


def test_a_profile_orders_the_lock_of_its_engine(site):
    order = order_of(load_profile("systemd-cpu", sets=["host.min_free_disk=2GiB"]).profile, site.house)
    assert (order.lock.engine, order.root, order.min_free) == ("embedded", None, 2 << 30)
