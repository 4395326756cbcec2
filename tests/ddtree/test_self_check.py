"""The self-check passes on a sound engine, in every mode, and names each fault that is put into one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.ddtree.conftest import BUNDLED, Pair, build_engine, collect, generate, request, write_json
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.model_runner import ModelRunner
from toolkit.ddtree.models.dflash import DFlashDrafter
from toolkit.ddtree.models.linear import Linear
from toolkit.ddtree.models.qwen3 import Qwen3Target
from toolkit.ddtree.self_check import self_check
from toolkit.ddtree.types import Algorithm, TreeLimits


def failed(engine):
    return {check["name"] for check in self_check(engine) if not check["ok"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_sound_engines_pass(lucky_pair, algorithm, dtype):
    checks = self_check(build_engine(lucky_pair, algorithm, dtype=dtype))
    assert [check for check in checks if not check["ok"]] == []
    assert len(checks) == (2 if algorithm is Algorithm.NONE else 13)
    assert set(checks[0]) == {"name", "ok", "measured", "limit", "detail"}
    json.dumps(checks)


def test_bundled_pair_passes():
    checks = {check["name"]: check for check in self_check(build_engine(BUNDLED))}
    assert [check for check in checks.values() if not check["ok"]] == []
    assert checks["node_logits"]["measured"] < 1e-4


def test_short_contexts_pass(lucky_pair):
    assert failed(build_engine(lucky_pair, context_length=20)) == set()


def test_requests_in_flight_are_checked_and_left_alone(lucky_pair):
    batch = [request("a", [1, 2, 3], max_new_tokens=40), request("b", [4], max_new_tokens=40)]
    engine = build_engine(lucky_pair)
    expected = {rid: result.told for rid, result in generate(engine, *batch).items()}
    results = {}
    for one in batch:
        engine.add(one)
    for _ in range(6):
        collect(results, engine.step())
    checks = self_check(engine)
    assert all(check["ok"] for check in checks)
    assert checks[0]["detail"] == "2 requests recomputed"
    assert checks[0]["measured"] > 0
    while engine.has_work:
        collect(results, engine.step())
    assert {rid: result.told for rid, result in results.items()} == expected


def test_spoilt_kv_of_a_request_in_flight_is_found(lucky_pair, monkeypatch):
    engine = build_engine(lucky_pair, limits=TreeLimits(16, 8))
    engine.add(request("a", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=60))
    results = {}
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_compact", lambda self, paths: None)
        collect(results, engine.step())
        while not any(any(stats.ranks) for stats in results["a"].rounds):
            collect(results, engine.step())
    assert failed(engine) == {"requests_in_flight"}


def swap(method, change):
    """A method that does what it did and then `change`s the result."""
    return lambda self, *args: change(method(self, *args))


FAULTS = {
    "MASK in slot 0": (
        DFlashDrafter, "block", swap(DFlashDrafter.block, lambda block: torch.full_like(block, 1)),
        {"draft_block"},
    ),
    "as many masks as the budget": (
        DFlashDrafter, "block", swap(DFlashDrafter.block, lambda block: torch.cat([block, block[1:]])),
        {"draft_block"},
    ),
    "captured layers off by one": (
        Qwen3Target, "forward",
        lambda self, tokens, rows, cache, capture=(), forward=Qwen3Target.forward: forward(
            self, tokens, rows, cache, [layer + 1 for layer in capture]
        ),
        {"captured_layers", "draft_logits"},
    ),
    "positions in tree order": (
        ModelRunner, "rows",
        lambda self, first, lengths, offsets, seen, rows=ModelRunner.rows: rows(
            self, first, lengths, torch.arange(offsets.shape[1]).expand_as(offsets), seen
        ),
        {"node_positions", "node_logits"},
    ),
    "positions off by one": (
        ModelRunner, "rows",
        swap(ModelRunner.rows, lambda rows: replace(rows, positions=rows.positions + (rows.visible > 20))),
        {"node_positions"},
    ),
    "K/V move left out": (Engine, "_compact", lambda self, paths: None, {"accepted_kv"}),
    "K/V moved by one row too far": (
        Engine, "_compact",
        lambda self, paths: self.models.compact([running.length + 1 for running in self._running], paths),
        {"accepted_kv"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(lucky_pair, monkeypatch, fault):
    owner, name, broken, expected = FAULTS[fault]
    engine = build_engine(lucky_pair)
    monkeypatch.setattr(owner, name, broken)
    assert failed(engine) >= expected


MASKS = {
    "everything seen": torch.ones_like,
    "causal, not tree": lambda seen: torch.ones_like(seen).tril(),
    "parent hidden": lambda seen: seen & ~torch.diag(seen[0, 1:, 1:].new_ones(len(seen[0]) - 1), -1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_wrong_masks_are_named(lucky_pair, monkeypatch, mask):
    from toolkit.ddtree.tree import ancestor_mask

    engine = build_engine(lucky_pair)
    monkeypatch.setattr(
        "toolkit.ddtree.engine.ancestor_mask", lambda trees: MASKS[mask](ancestor_mask(trees))
    )
    assert failed(engine) >= {"ancestor_mask", "node_logits"}


def test_a_mask_that_is_dropped_is_named(lucky_pair, monkeypatch):
    rows = ModelRunner.rows
    engine = build_engine(lucky_pair)
    monkeypatch.setattr(ModelRunner, "rows", swap(rows, lambda found: replace(found, mask=None)))
    assert failed(engine) >= {"ancestor_mask", "node_logits", "mask_perturbation"}


def test_a_head_of_the_drafters_own_is_named(lucky_pair):
    engine = build_engine(lucky_pair)
    engine.models.drafter.head = Linear(torch.randn(16, 64))
    assert failed(engine) == {"shared_head", "draft_logits"}


def test_an_embedding_of_the_drafters_own_is_named(lucky_pair, monkeypatch):
    engine = build_engine(lucky_pair)
    engine.models.drafter._target = Qwen3Target.load(
        lucky_pair.target, 512, torch.float32, torch.device("cpu")
    )
    engine.models.drafter._target.embedding = torch.randn(16, 64)
    assert failed(engine) == {"draft_logits"}


def test_layer_ids_that_are_off_by_one_in_the_config_are_named(tmp_path):
    """Nothing but the drafter's own success can tell: the checkpoint is consistent."""
    shutil.copytree(BUNDLED.drafter, tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    layers = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [layer - 1 for layer in layers]
    write_json(path, config)
    checks = {
        check["name"]: check for check in self_check(build_engine(Pair(BUNDLED.target, tmp_path / "drafter")))
    }
    assert {name for name, check in checks.items() if not check["ok"]} == {"target_layer_ids"}
    assert "with each moved by +1: the config is off by one" in checks["target_layer_ids"]["detail"]


def test_an_engine_that_cannot_decode_fails_the_check(lucky_pair, monkeypatch):
    engine = build_engine(lucky_pair)
    monkeypatch.setattr(Qwen3Target, "logits", lambda self, hidden: 1 / 0)
    assert failed(engine) == {"decode"}
