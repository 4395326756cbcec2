"""A seeded sample of the fault matrix on a real host: with the contract stub, and with the embedded engine.

`DDTOOLKIT_FAULT_SEED` picks another sample; scripts/fault_matrix.py runs everything.
"""

import os
import random

import pytest

from tests.faults.bench import Bench, warm
from tests.faults.scenarios import SCENARIOS, count, prepare
from tests.faults.strike import strike

pytestmark = pytest.mark.timeout(300)

SEED = int(os.environ.get("DDTOOLKIT_FAULT_SEED", "1"))
# Besides those of the matrix: the process that works is killed, or one of its operations finds the disk full.
FAULTS = ("controller", "network", "reboot", "disk", "process", "enospc")
STUBBED, REAL = 20, 6


@pytest.fixture(scope="module")
def bench(make_host, tmp_path_factory):
    warm()
    made = Bench(make_host("bookworm", engine=True, disk="300M"), tmp_path_factory.mktemp("faults"), limit=40)
    prepare(made)
    return made


@pytest.fixture(scope="module")
def sample(bench):
    """Changes, moments and faults: each fault as often as every other, at moments anywhere."""
    points = {name: count(bench, SCENARIOS[name]) for name in ("swap", "refused", "deploy")}
    chosen = random.Random(SEED)
    found = []
    for number in range(STUBBED + REAL):
        fault = FAULTS[number % len(FAULTS)]
        name = chosen.choices(["swap", "refused", "deploy"], [3, 2, 2 if number < STUBBED else 0])[0]
        moment = chosen.choice([moment for moment in points[name] if moment.takes(fault)])
        found.append((SCENARIOS[name], moment, fault))
    return found


@pytest.mark.parametrize("number", range(STUBBED))
def test_with_the_contract_stub(bench, sample, number):
    run = strike(bench, *sample[number], cli=number % 5 == 0)
    assert run.problems == [], run


@pytest.mark.parametrize("number", range(STUBBED, STUBBED + REAL))
def test_with_the_embedded_engine(bench, sample, number):
    bench.stub("build", "accept")
    try:
        run = strike(bench, *sample[number])
    finally:
        bench.stub("serve", "build", "accept")
    assert run.problems == [], run
