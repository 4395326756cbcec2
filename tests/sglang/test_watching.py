"""What tells how the server does: the policy `transition`, debug lines, metrics, the self-check."""

import json
import re
import time

import pytest

from tests.sglang.conftest import DRAFT, SLOW, Server
from tests.sglang.test_serving import Reference, outputs, steps
from toolkit.ddtree.types import Algorithm, Expansion, TreeLimits

pytestmark = [pytest.mark.timeout(900), SLOW]

TOKENS = 20
TRANSITION = {"custom_params": {"ddtree": {"expansion": "transition"}}}
CHECKS = [
    "draft_block", "tree", "node_positions", "cache_rows", "ancestor_mask", "node_logits",
    "mask_perturbation", "ranks_agree", "walk", "accepted_kv",
]  # fmt: skip


@pytest.fixture(scope="module")
def debug_file(tmp_path_factory):
    return tmp_path_factory.mktemp("debug") / "debug.jsonl"


@pytest.fixture(scope="module")
def server(sglang_python, leave_moves_out, debug_file, tmp_path_factory):
    """One that offers every policy and tells what it does."""
    log = tmp_path_factory.mktemp("watched") / "server.log"
    flags = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-expansion", "transition"]
    flags += ["--speculative-ddtree-budget", "16", "--enable-metrics", "--speculative-ddtree-debug-metrics"]
    flags += ["--speculative-ddtree-debug-file", str(debug_file)]
    started = Server.start(sglang_python, log, *DRAFT, *flags, TEST_LEAVE_MOVES_OUT=str(leave_moves_out))
    try:
        yield started.wait()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def rescored(server, prompts):
    return server.together(prompts, TOKENS, [TRANSITION] * len(prompts))


def test_transition_takes_the_steps_of_the_embedded_engine(rescored, prompts):
    embedded = Reference(Algorithm.DDTREE, TreeLimits(16, 8, Expansion.TRANSITION))
    assert list(zip(outputs(rescored), steps(rescored), strict=True)) == [
        embedded.decode(prompt, TOKENS) for prompt in prompts
    ]


def test_transition_takes_fewer_steps_than_best_first(rescored, server, prompts):
    asked = {"custom_params": {"ddtree": {"expansion": "best_first"}}}
    marginal = server.together(prompts, TOKENS, [asked] * len(prompts))
    assert outputs(marginal) == outputs(rescored)
    assert sum(steps(rescored)) < sum(steps(marginal))


def test_each_step_of_each_request_writes_one_line(server, debug_file, prompts):
    settled(debug_file)
    before = len(debug_file.read_text().splitlines())
    calls = verify_calls(server)
    answers = server.together(prompts, TOKENS, [{}] * len(prompts))
    settled(debug_file)
    lines = [json.loads(line) for line in debug_file.read_text().splitlines()[before:]]
    assert len(lines) == sum(steps(answers))
    assert verify_calls(server) == calls + len(lines)
    # All but the first token of each answer were committed by a step; the last step may commit too many.
    spare = sum(line["committed"] for line in lines) - len(prompts) * (TOKENS - 1)
    assert 0 <= spare <= len(prompts) * 7
    assert {line["nodes"] for line in lines} == {16}
    assert all(line["accepted"] == len(line["ranks"]) == line["committed"] - 1 for line in lines)


def settled(path):
    """Wait until the writing thread has nothing left."""
    size = -1
    while size != path.stat().st_size:
        size = path.stat().st_size
        time.sleep(0.3)


def verify_calls(server):
    text = server.client.get(f"{server.url}/metrics").text
    return int(float(re.search(r"^sglang:spec_verify_calls_total\{.*\} (\S+)$", text, re.MULTILINE)[1]))


def check(server):
    answer = server.client.post(f"{server.url}/ddtree/self_check")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["ok"], {one["name"]: one for one in told["checks"]}


def test_the_self_check_holds(server):
    ok, checks = check(server)
    assert list(checks) == CHECKS
    assert ok, checks
    assert checks["node_logits"]["measured"] < 1e-4
    assert int(checks["accepted_kv"]["detail"].split()[0]) > 0  # rows were moved


def test_the_self_check_finds_rows_that_were_not_moved(server, leave_moves_out):
    leave_moves_out.touch()
    try:
        ok, checks = check(server)
    finally:
        leave_moves_out.unlink()
    assert not ok
    assert [name for name, one in checks.items() if not one["ok"]] == ["accepted_kv"]


def test_no_client_can_make_the_server_check_itself(server, prompts):
    before = server.client.get(f"{server.url}/server_info").json()["internal_states"][0]["ddtree"]
    server.generate(prompts[0], 4, custom_params={"ddtree": {}})
    after = server.client.get(f"{server.url}/server_info").json()["internal_states"][0]["ddtree"]
    assert after == before
    assert after["debug_lines_dropped"] == 0
