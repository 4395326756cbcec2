"""What is made of measurements: a healthy host passes, and each fault is found by its own check alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.doctor import profiles
from tests.doctor.load_faults import B300, FAST, FAULTS, PCIE, WELL, some
from tests.doctor.raw import raw
from tests.doctor.recorded import Site, b300, pcie
from toolkit.doctor.finding import Finding
from toolkit.doctor.load.record import figures
from toolkit.doctor.load_result import Copy, LinkSeen, Load, Reduced
from toolkit.doctor.report import Report, judge
from toolkit.doctor.wanted import Wanted


def judged(load: Load | None, site: Site | None = None, profile: Wanted = PCIE) -> Report:
    return judge(raw(site or pcie(), load=load), profile)


def of(report: Report, check: str) -> Finding:
    (found,) = [item for item in report.findings if item.check == check]
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_check_alone(name: str) -> None:
    fault = FAULTS[name]
    report = judged(fault.load, fault.site, fault.profile)
    found = report.of("warn", "fail")
    assert [(item.check, item.level) for item in found] == [(fault.check, fault.level)], found
    assert fault.words in found[0].seen
    assert found[0].expected
    assert found[0].fix


def test_what_was_measured_is_told() -> None:
    report = judged(WELL)
    assert of(report, "pcie-bandwidth").seen == (
        "GPUs 0, 1, 2, 3, 4, 5, 6, 7 alone: 55.6 to 56.3 GB/s to, 54.2 from; at once: 27.5 to, 26.1 from; "
        "generation 5 x16 under load; every byte right"
    )
    assert of(report, "p2p-bandwidth").seen == "39.0 GB/s on 56 ways, 56 of them direct; every byte arrived"
    assert of(report, "all-reduce").seen == (
        "GPUs 0, 1, 2, 3, 4, 5, 6, 7: 41 us at 8 KiB, 96 us at 462 KiB (8.6 GB/s), 3200 us at 64 MiB "
        "(36.7 GB/s); NCCL by P2P; every sum right"
    )
    assert report.to_json()["load"]["alone"][0] == {"gpu": 0, "to": 55.6, "back": 54.2, "wrong": 0}


def test_nothing_is_said_of_load_that_nobody_asked_for() -> None:
    report = judged(None)
    silent = [item.check for item in report.of("skip") if item.seen == "it is measured with --load alone"]
    assert silent == ["pcie-bandwidth", "p2p-bandwidth", "all-reduce"]
    assert report.to_json()["load"] is None


def test_a_gpu_in_use_is_left_alone_and_told() -> None:
    free = tuple(gpu for gpu in WELL.gpus if gpu != 2)
    load = replace(
        WELL, gpus=free, groups=(free,), whole=False, busy={2: "process 4242 (python3) of deploy"},
        together=tuple(item for item in WELL.together if item.gpu != 2),
    )  # fmt: skip
    report = judged(load)
    assert report.exit_code == 0
    (left,) = [item for item in report.of("skip") if item.check == "pcie-bandwidth"]
    assert (
        left.seen == "GPU 2 in use by process 4242 (python3) of deploy (--disruptive loads it all the same)"
    )
    assert "not in the profile's own groups" in of(report, "all-reduce").seen


@pytest.mark.parametrize(("well", "site", "profile"), [(WELL, pcie(), PCIE), (FAST, b300(), B300)])
def test_speed_is_not_judged_beside_others(well: Load, site: Site, profile: Wanted) -> None:
    load = replace(
        well, busy={2: "the service itself, process 7"},
        alone=tuple(replace(item, to=3.0) for item in well.alone),
        peers=tuple(replace(item, rate=3.0) for item in well.peers),
        reduced=tuple(replace(item, seconds=1.0) for item in well.reduced),
    )  # fmt: skip
    report = judged(load, site, profile)
    assert report.of("warn", "fail") == []
    assert "beside others that compute there" in of(report, "pcie-bandwidth").seen
    assert "beside others that compute there" in of(report, "all-reduce").seen
    wrong = replace(load, peers=some(load.peers, 0, wrong=1))
    assert [item.check for item in judged(wrong, site, profile).of("fail")] == ["p2p-bandwidth"]


def test_a_peer_that_the_profile_does_not_use_is_warned_of() -> None:
    profile = profiles.profile(profiles.PCIE, "service.environment.NCCL_P2P_DISABLE=1")
    load = replace(WELL, peers=some(WELL.peers, 1, wrong=1, access=False), ways={"SHM": 16})
    report = judged(load, profile=profile)
    assert of(report, "p2p-bandwidth").level == "warn"
    assert of(report, "all-reduce").level == "pass"


def test_a_small_fall_is_noise() -> None:
    before = {name: value * (0.8 if name.endswith(" s") else 1.15) for name, value in figures(WELL).items()}
    assert judged(replace(WELL, earlier=before)).of("warn", "fail") == []


def test_a_figure_that_others_have_is_not_compared() -> None:
    assert judged(replace(WELL, earlier={"copy to GPU 9": 100.0, "nonsense": 1.0})).of("warn") == []


def test_an_all_reduce_that_not_all_ranks_ended_has_no_figure() -> None:
    part = replace(WELL, reduced=(Reduced(0, 8192, 1e-5, 0),))
    assert not [name for name in figures(part) if name.startswith("all-reduce")]


def test_bus_bandwidth_counts_what_a_link_carries() -> None:
    two = Load(gpus=(0, 1), groups=((0, 1),), reduced=(
        Reduced(0, 8, 1e-6, 0), Reduced(1, 8, 2e-6, 0), Reduced(0, 10**9, 0.5, 0), Reduced(1, 10**9, 0.4, 0),
    ))  # fmt: skip
    assert figures(two) == {"all-reduce 0,1, 8 bytes s": 2e-6, "all-reduce 0,1, 1000000000 bytes": 2.0}


def test_a_link_that_the_driver_does_not_tell_is_not_judged() -> None:
    load = replace(WELL, links=tuple(LinkSeen(gpu, None, None) for gpu in WELL.gpus))
    assert judged(load).of("warn", "fail") == []


def test_a_trial_on_a_cpu_says_nothing_of_links() -> None:
    slow = tuple(Copy(gpu, 3.0, 3.0, 0) for gpu in WELL.gpus)
    assert judged(replace(WELL, device="cpu", alone=slow, links=(), ways={})).of("warn", "fail") == []


def test_a_rate_is_not_judged_where_the_way_to_the_gpu_is_not_known() -> None:
    slow = replace(WELL, alone=some(WELL.alone, 2, back=3.0))
    hidden = {"out": "", "err": "", "status": 1, "why": "missing"}
    report = judge(raw(pcie(), load=slow, command_lspci=hidden), PCIE)
    assert of(report, "pcie-bandwidth").level == "pass"
