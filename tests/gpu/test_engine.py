"""The embedded engine on one GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(reason="no CUDA GPU on this machine", allow_module_level=True)

from tests.ddtree.conftest import BUNDLED, build_engine, generate, request
from toolkit.ddtree import build
from toolkit.ddtree.self_check import self_check
from toolkit.ddtree.types import Algorithm, Expansion, TreeLimits

pytestmark = pytest.mark.gpu

TEXTS = ["def add(a, b):\n    return", "import os\n\n\nclass Reader:\n", "for i in range(10):\n", "#"]


def requests(encode, **sampling):
    return [
        request(str(i), encode(text), max_new_tokens=64, sampling_seed=i, **sampling)
        for i, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_mode_gives_the_plain_text(temperature):
    plain = build_engine(BUNDLED, Algorithm.NONE, device="cuda")
    batch = requests(plain.encode, temperature=temperature)
    expected = {rid: result.told for rid, result in generate(plain, *batch).items()}
    for algorithm, limits in (
        (Algorithm.DFLASH, TreeLimits(16, 8)),
        (Algorithm.DDTREE, TreeLimits(32, 8)),
        (Algorithm.DDTREE, TreeLimits(64, 4, Expansion.CHAIN_SEEDED)),
        (Algorithm.DDTREE, TreeLimits(24, 8, Expansion.TRANSITION)),
    ):
        engine = build_engine(BUNDLED, algorithm, device="cuda", limits=limits)
        results = generate(engine, *batch)
        assert {rid: result.told for rid, result in results.items()} == expected
    assert max(stats.accepted for result in results.values() for stats in result.rounds) > 1


def test_gpu_and_cpu_agree():
    texts = []
    for device in ("cpu", "cuda"):
        engine = build_engine(BUNDLED, device=device)
        results = generate(engine, *requests(engine.encode))
        texts.append({rid: result.told for rid, result in results.items()})
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_passes(dtype):
    checks = self_check(build_engine(BUNDLED, device="cuda", dtype=dtype))
    assert [check for check in checks if not check["ok"]] == []


def test_build_warms_the_kernels_up(tmp_path):
    arguments = ["--model-path", "bundled", "--speculative-draft-model-path", "bundled", "--device", "cuda"]
    assert build.main([*arguments, "--out", str(tmp_path / "manifest.json")]) == 0
