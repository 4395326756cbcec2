"""The engine with the Triton kernels, here interpreted: what it does on a GPU, but for the device."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ddtree.conftest import build_engine, generate, request
from toolkit.ddtree.model_runner import _Kernels
from toolkit.ddtree.types import Expansion, TreeLimits


def test_kernels_give_the_same_rounds_as_their_references(lucky_pair):
    batch = [
        request("a", [1, 2, 3, 4, 5, 6, 7], max_new_tokens=8),
        request("b", [5], TreeLimits(7, 1, Expansion.CHAIN), max_new_tokens=4),
        request("c", [9, 2], TreeLimits(10, 3, Expansion.TRANSITION), max_new_tokens=8),
    ]
    engine = build_engine(lucky_pair, limits=TreeLimits(12, 4))
    expected = generate(engine, *batch)
    engine.models._kernels = _Kernels()
    assert generate(engine, *batch) == expected
    assert max(rank for stats in expected["a"].rounds for rank in stats.ranks) > 0
