"""The acceptance against the embedded engine with the bundled pair, as a process of its own."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from toolkit.acceptance import Settings, compare_reports, measure, run_acceptance, with_results
from toolkit.acceptance.checks import CHECKS
from toolkit.acceptance.runner import open_session

RUN = {check.name: check.run for check in CHECKS}
PAIR = ["--model-path", "bundled", "--speculative-draft-model-path", "bundled"]
TREE = [*PAIR, "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16"]
CHAIN = [
    *PAIR, "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "7",
    "--speculative-ddtree-topk-cap", "1",
]  # fmt: skip
WITHOUT_MOVE = [str(Path(__file__).with_name("launch_without_move.py"))]


@contextmanager
def embedded(*arguments, program=("-m", "toolkit.ddtree.server")):
    """A server on a free port; gives its URL and ends it afterwards."""
    process = subprocess.Popen(
        [sys.executable, *program, *arguments, "--port", "0", "--cpu-threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, process.communicate(timeout=10)[1]
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def settings_for_tests(url, tokens=17):
    """Outputs shorter than an acceptance's, to keep the tests quick."""
    settings = Settings(url=url, requests=151, load_tokens=4, dtype="float32", time_limit=170)
    return settings.model_copy(update={"max_new_tokens": tokens})


@pytest.fixture(scope="module")
def tree():
    """A sound DDTREE server's URL, and its report."""
    with embedded(*TREE) as url:
        yield url, run_acceptance(settings_for_tests(url))


def test_a_sound_server_passes(tree):
    _, report = tree
    status = {check.name: check.status for check in report.checks}
    assert status.pop("lossless") == "inconclusive"  # 128 positions are too few to accept on
    assert set(status.values()) == {"passed"}, report.checks
    lossless = report.check("lossless").measured
    assert lossless["alone"]["positions"] == 128
    assert lossless["batch"]["positions"] == 256
    assert lossless["alone"]["differences"] <= 1
    assert lossless["isolation"] == "salt"
    assert report.accepted


def test_the_tree_is_above_the_chain(tree):
    _, report = tree
    lengths = report.acceptance_length
    assert lengths["tree"]["value"] > lengths["chain"]["value"] > 1.5
    assert sum(lengths["tree"]["histogram"]) == lengths["tree"]["steps"]


def test_the_server_is_recognised(tree):
    _, report = tree
    assert {key: report.server[key] for key in ("kind", "algorithm", "block_size", "budget", "topk_cap")} == {
        "kind": "embedded",
        "algorithm": "DDTREE",
        "block_size": 8,
        "budget": 16,
        "topk_cap": 8,
    }


def test_enough_positions_make_it_lossless(tree):
    url, _ = tree
    with open_session(settings_for_tests(url, tokens=65)) as session:
        session.endpoint.detect()
        judgement = session.decoder.judge(session.alone.outputs, delta=1e-3)
    assert judgement.positions == 512
    assert judgement.equal, judgement.differences


def test_a_server_that_does_not_move_its_kv_is_refused():
    with embedded(*TREE, program=WITHOUT_MOVE) as url, open_session(settings_for_tests(url)) as session:
        session.endpoint.detect()
        result = RUN["lossless"](session)
        assert result.status == "failed", result
        assert result.measured["isolation"] == "salt"
        salted = result.measured["alone"]["differences"]
        # Without a salt of their own the probes are answered from the wrong K/V, and agree with it.
        session.decoder._salt = None
        session.decoder._known.clear()
        unsalted = len(session.decoder.judge(session.alone.outputs, delta=1e-3).differences)
        assert unsalted < salted / 2


def test_level_full_compares_launches(tree):
    _, report = tree
    with embedded(*CHAIN) as url:
        chain = measure(settings_for_tests(url), reference=report)
    with embedded(*PAIR, "--speculative-algorithm", "DFLASH") as url:
        dflash = measure(settings_for_tests(url), reference=report)
        linear = run_only(url, "chain_control", "tree_against_chain", "real_tokens")
    results = compare_reports(report, dflash, chain)
    assert {result.status for result in results} == {"passed"}, results
    assert [result.name for result in results] == [
        "relaunched_chain", "relaunched_chain_acceptance", "linear_dflash", "linear_dflash_acceptance",
    ]  # fmt: skip
    assert with_results(report, results).accepted
    assert linear == {
        "chain_control": "not_checked",
        "tree_against_chain": "not_checked",
        "real_tokens": "passed",
    }


def test_plain_decoding_is_checked_as_far_as_it_goes():
    with embedded("--model-path", "bundled", "--speculative-algorithm", "NONE") as url:
        status = run_only(
            url,
            "real_tokens",
            "lossless",
            "chain_control",
            "batch_acceptance",
            "self_check",
            "acceptance_length",
        )
    assert status.pop("real_tokens") == "passed"
    assert set(status.values()) == {"not_checked"}


def run_only(url, *names):
    with open_session(settings_for_tests(url)) as session:
        session.endpoint.detect()
        return {name: RUN[name](session).status for name in names}
