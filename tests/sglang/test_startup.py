"""What SGLang's own argument resolution does with DDTREE's flags, and whether a missing hook is found."""

import json
from pathlib import Path

import pytest

from tests.sglang.conftest import BUNDLED, DRAFT, FLAGS, answer_of

pytestmark = pytest.mark.timeout(600)

TREE = [*DRAFT, "--speculative-algorithm", "DDTREE"]
ACCEPTED = {
    "defaults": TREE,
    "flags": [*TREE, "--speculative-ddtree-budget", "32", "--speculative-ddtree-topk-cap", "4"],
    "lower case": [*DRAFT, "--speculative-algorithm", "ddtree"],
    "transition": [*TREE, "--speculative-ddtree-expansion", "transition"],
    "plain": [],
}
REFUSED = {
    "tree budget 6 is below 7": [*TREE, "--speculative-ddtree-budget", "6"],
    "budget is 0": [*TREE, "--speculative-ddtree-budget", "0"],
    "needs --speculative-algorithm DDTREE": ["--speculative-ddtree-topk-cap", "8"],
    "--speculative-num-draft-tokens is 9, DDTREE sets it to 17": [
        *TREE,
        "--speculative-num-draft-tokens",
        "9",
    ],
    "--speculative-draft-model-path is not set": ["--speculative-algorithm", "DDTREE"],
    "cannot verify trees with MHA": [*TREE, "--attention-backend", "torch_native"],
    "--speculative-draft-window-size": [*TREE, "--speculative-draft-window-size", "64"],
    "--speculative-accept-threshold-single": [*TREE, "--speculative-accept-threshold-single", "0.5"],
    "--enable-custom-logit-processor": [*TREE, "--enable-custom-logit-processor"],
    "--page-size is 16": [*TREE, "--page-size", "16"],
    "--grammar-backend is 'llguidance'": [*TREE, "--grammar-backend", "llguidance"],
    "--speculative-ddtree-debug-metrics needs": [*TREE, "--speculative-ddtree-debug-metrics"],
    "--speculative-ddtree-debug-file /nowhere/debug.jsonl: No such file": [
        *TREE,
        "--speculative-ddtree-debug-metrics",
        "--speculative-ddtree-debug-file",
        "/nowhere/debug.jsonl",
    ],
    "has none: its config.json lacks transition_config": [
        "--speculative-draft-model-path",
        "TABLELESS",
        *TREE[2:],
        "--speculative-ddtree-expansion",
        "transition",
    ],
}


@pytest.fixture(scope="module")
def told(sglang_python: Path, tmp_path_factory):
    drafter = tmp_path_factory.mktemp("tableless")
    config = json.loads((BUNDLED / "drafter/config.json").read_text())
    del config["transition_config"]
    (drafter / "config.json").write_text(json.dumps(config))
    named = {"TABLELESS": str(drafter)}
    cases = [
        [*FLAGS, *(named.get(flag, flag) for flag in argv)]
        for argv in (*ACCEPTED.values(), *REFUSED.values())
    ]
    return answer_of(sglang_python, "inside.py", cases)


def case(told, name):
    return told["cases"][[*ACCEPTED, *REFUSED].index(name)]


def test_the_width_follows_from_the_budget(told):
    resolved = case(told, "flags")["resolved"]
    assert resolved["speculative_num_draft_tokens"] == 33
    assert resolved["speculative_eagle_topk"] == 4
    assert resolved["speculative_dflash_block_size"] == 8
    assert resolved["speculative_num_steps"] == 1


@pytest.mark.parametrize(("name", "budget"), [("defaults", 16), ("flags", 32), ("lower case", 16)])
def test_schedulers_are_left_the_options(told, name, budget):
    assert json.loads(case(told, name)["environment"])["budget"] == budget


def test_without_ddtree_nothing_is_set(told):
    plain = case(told, "plain")
    assert plain["environment"] is None
    assert plain["resolved"]["speculative_num_draft_tokens"] is None
    assert not told["hooks"]["idle"]


def test_the_servers_own_requests_have_a_secret_name(told):
    """New for each server; the self-check's route is there with DDTREE only."""
    prefixes = [json.loads(case(told, name)["environment"])["check_prefix"] for name in ("defaults", "flags")]
    assert all(len(prefix) == 16 for prefix in prefixes)
    assert prefixes[0] != prefixes[1]
    assert case(told, "defaults")["route"]
    assert told["before"]["route"] is False


def test_transition_is_accepted_with_a_table(told):
    assert json.loads(case(told, "transition")["environment"])["expansion"] == "transition"


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused(told, reason):
    assert reason in case(told, reason)["refused"]


def test_the_mask_is_asked_for_with_ddtree_only(told):
    assert told["hooks"]["selected"] == ["TritonAttnBackend", True]
    assert told["hooks"]["not_selected"] == ["TritonAttnBackend", False]


def test_a_missing_hook_is_found(told):
    assert told["hooks"]["hooked"] is None
    assert "resolve_dflash_verify_mask_policy is not in place" in told["hooks"]["unhooked"]
    assert "resolve_dflash_verify_mask_policy is not in place" in told["hooks"]["lost"]
    assert "validate_dflash_request is not in place" in told["hooks"]["copy_lost"]
    assert "Scheduler.get_internal_state is not in place" in told["hooks"]["state_lost"]


def test_rows_have_room_for_what_is_reserved(told):
    """SGLang reserves two verify widths behind the committed tokens, and leaves room for one."""
    assert told["hooks"]["headroom DDTREE"] >= 2 * 33
    assert told["hooks"]["headroom DFLASH"] == 4 + 33


def test_another_sglang_is_refused(told):
    assert told["hooks"]["version"] == "DDTREE needs sglang 0.5.17, this is 0.5.18"


def test_simulated_acceptance_is_refused(told):
    assert "SGLANG_SIMULATE_ACC_LEN is 3" in told["simulated"]["refused"]


def test_a_graph_of_another_width_or_without_a_mask_is_refused(told):
    right, narrow, unmasked = told["captured"]
    assert right is None
    assert narrow == "verification was captured for 8 rows, not 17"
    assert unmasked == "verification was captured without a tree mask"


def test_without_memory_for_a_steps_end_it_serves_all_the_same(told):
    """Recording it saves time; SGLang has taken what it wanted of the device before."""
    assert told["without memory"]


def test_the_attention_twin_is_sglangs(told):
    assert told["twin_error"] < 2e-6


def test_the_plan_of_a_verification_is_sglangs(told):
    """The same buffers from one launch, with a mask that the graph reads and without one."""
    for stock, own in told["planned"]:
        assert own == stock
        assert stock[3] == [0, 9 * 14, 9 * (14 + 9), 9 * (14 + 9 + 40)]


def test_its_own_attention_is_what_the_backend_computes(told):
    """Through the backend's own method, which asks DDTREE's kernel first."""
    found = told["attended"]
    assert found["True"] < 1e-5
    assert found["False"] < 1e-5
    assert found["True rows"] > 0.9
    assert found["refuses a cap"]
    assert found["refuses rows out of the cache"]
    assert found["refuses it again"]
    left = "DDTREE leaves attention of verifications to the backend's kernel: "
    dtypes = "float32, float8_e5m2, float32, float32, float32, float32"
    assert found["said"] == [  # once each
        f"{left}its own knows no logit_cap",
        f"{left}query, key, value, result, cached keys and values are {dtypes}",
    ]
