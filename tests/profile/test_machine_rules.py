"""Rules of machines, shapes and memory: each refuses or warns of its combination, and of nothing else."""

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile

RTX, B300, H200 = "rtx-pro-6000-pcie-8x", "b300-nvlink-8x", "h200-nvlink"
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
QWEN = ["qwen3-8b", "gpus-1"]


def findings(name, sets, overlays=()):
    try:
        return [], list(load_profile(name, overlays=overlays, sets=sets).warnings)
    except ConfigError as error:
        return error.problems, []


@pytest.mark.parametrize("name", [RTX, B300, H200])
@pytest.mark.parametrize(
    "overlay", [None, "linear-dflash", "chain-control", "plain", "pp8", "ep8", "ep4"], ids=str
)
def test_every_profile_and_overlay_is_sound(name, overlay):
    assert findings(name, [], [overlay] if overlay else []) == ([], [])


@pytest.mark.parametrize("gpus", ["gpus-1", "gpus-2"])
@pytest.mark.parametrize("more", [[], ["linear-dflash"], ["plain"]], ids=str)
def test_a_smaller_pair_on_fewer_gpus_is_sound(gpus, more):
    assert findings(H200, [], ["qwen3-8b", gpus, *more]) == ([], [])


@pytest.mark.parametrize(
    ("name", "sets", "key", "message"),
    [
        (RTX, ["hardware.compute_capability=10.0"], "hardware.compute_capability", "capability 12.0"),
        (RTX, ["hardware.memory_gib=80"], "hardware.memory_gib", "has 95.6 GiB, not 80"),
        (RTX, ["hardware.interconnect=nvlink", "hardware.driver=null",
               "service.environment.NCCL_P2P_LEVEL="], "hardware.interconnect", "has no NVLink"),
        (RTX, ["hardware.interconnect=none", "hardware.driver=null"],
         "hardware.interconnect", "joined by something"),
        (RTX, ["hardware.min_driver=570.26"], "hardware.min_driver", "needs 580.65.06"),
        (RTX, ["hardware.min_driver=580.65.05"], "hardware.min_driver", "does not run CUDA 13.0"),
        (RTX, ["hardware.min_driver=590.10"], "hardware.driver.branch", "no driver of 590.10 or newer"),
        (RTX, ["hardware.driver.branch=570"], "hardware.driver.branch", "no driver of 580.65.06 or newer"),
        (RTX, ["hardware.cuda=null"], "hardware.driver.cuda_toolkit", "which CUDA toolkit is not known"),
        (B300, ["hardware.driver.acs_off=true"], "hardware.driver.acs_off", "joined by PCIe"),
        (RTX, ["hardware.driver.fabric_manager=nvidia-fabricmanager"], "hardware.driver.fabric_manager",
         "only NVLink switches have a fabric manager"),
        ("local-cpu", ["hardware.driver={branch: 580}"], "hardware.driver", "it needs no driver"),
        (RTX, ["service.environment.NCCL_P2P_LEVEL=NVL"], "service.environment.NCCL_P2P_LEVEL", "lack"),
        (RTX, ["service.environment.NCCL_P2P_LEVEL=nvl"], "service.environment.NCCL_P2P_LEVEL", "lack"),
        (RTX, ["model.target.shape=kimi"], "model.target.shape", "'kimi' is not known"),
        (RTX, ["model.target.shape=kimi-k2.6-dflash"], "model.target.shape", "is a drafter, not a target"),
        (RTX, ["model.drafter.shape=qwen3-8b"], "model.drafter.shape", "is a target, not a drafter"),
        (RTX, ["model.drafter.shape=qwen3-8b-dflash-b16", "speculative.block_size=16"],
         "model.drafter.shape", "reads hidden states of 4096 and draws from 151936 tokens"),
        (RTX, ["parallelism.pp=64", "parallelism.tp=1", "speculative.algorithm=NONE",
               "engine.extra_args=[--nnodes, '8', --mm-feature-transport=cpu]"],
         "parallelism.pp", "more than the 61 layers"),
        (B300, ["parallelism.ep=5", "parallelism.tp=5"], "parallelism.tp", "divide the 64 attention heads"),
        (RTX, ["model.context_length=300000"], "model.context_length", "was made for, 262144"),
        (RTX, ["engine.quantization=modelopt_fp4"], "engine.quantization", "packed by compressed-tensors"),
        (RTX, ["engine.moe_backend=flashinfer_cutlass"], "engine.moe_backend", "not of compressed-tensors"),
        (B300, ["engine.moe_backend=flashinfer_cutlass", "parallelism.ep=4"], "parallelism.ep", "tp = 8"),
        (B300, ["engine.moe_backend=flashinfer_cutedsl", "parallelism.ep=2"], "parallelism.ep", "tp = 8"),
        (RTX, ["engine.attention_backend=trtllm_mla", "speculative.algorithm=DFLASH"],
         "engine.attention_backend", "on compute capability 10 (data-centre Blackwell) only, not on 12.0"),
        (B300, ["engine.attention_backend=trtllm_mha", "speculative.algorithm=NONE"],
         "engine.attention_backend", "is for MHA models, and kimi-k2.6-nvfp4 has MLA"),
        (B300, ["engine.attention_backend=fa3", "speculative.algorithm=NONE"],
         "engine.attention_backend", "(Hopper) only, not on 10.3"),
        (RTX, ["engine.page_size=16"], "engine.page_size", "freed one by one"),
        (RTX, ["engine.attention_backend=trtllm_mla"], "engine.attention_backend", "no tree masks"),
        (RTX, ["parallelism.tp=4", "hardware.count=4"], "parallelism.tp",
         "does not fit: target weights 141.0 + drafter weights 2.1 + K/V 9.4 = 152.5 GiB on a GPU of tp 4"),
        (RTX, ["engine.memory_fraction=0.8"], "engine.memory_fraction",
         "= 82.7 GiB on a GPU of tp 8 x pp 1 x ep 1; memory_fraction 0.800 of 94.6 GiB leaves 75.7 GiB"),
        (RTX, ["engine.memory_fraction=0.95"], "engine.memory_fraction", "no room beside weights and K/V"),
        (RTX, ["engine.prefill_chunk=8192"], "engine.memory_fraction", "activations 12.0"),
        (RTX, ["speculative.budget=128"], "engine.memory_fraction", "attention partials 8.1"),
        (RTX, ["model.context_length=262144"], "engine.memory_fraction", "K/V 18.8"),
        (RTX, ["speculative.expansion=transition"], "speculative.expansion", "has no transition table"),
    ],
)  # fmt: skip
def test_refused(name, sets, key, message):
    problems, _ = findings(name, sets)
    assert key in [problem.key for problem in problems]
    assert any(message in str(problem) for problem in problems if problem.key == key)


@pytest.mark.parametrize(
    ("sets", "key", "message"),
    [
        (["parallelism.ep=2", "parallelism.tp=2", "hardware.count=2"], "parallelism.ep", "no experts"),
        (["parallelism.tp=16", "hardware.count=16", "engine.quantization=fp8"], None, None),
        (["parallelism.tp=12", "hardware.count=12"], "parallelism.tp", "the 32 attention heads of qwen3-8b"),
        (["engine.quantization=modelopt_fp4"], "engine.quantization", "is not quantized"),
        (["engine.moe_backend=flashinfer_cutedsl"], "engine.moe_backend", "not of bf16"),
        (["engine.moe_backend=cutlass", "engine.quantization=fp8", "parallelism={tp: 2, ep: 2}",
          "hardware.count=2", "model.target.shape=null", "model.drafter.shape=null"],
         "parallelism.ep", "with fp8 takes 1"),
        (["engine.attention_backend=flashmla", "speculative.algorithm=NONE"],
         "engine.attention_backend", "is for MLA models, and qwen3-8b has MHA"),
        (["model.context_length=65536"], "model.context_length", "was made for, 40960"),
        (["speculative.budget=14"], "speculative.budget", "below block_size - 1 = 15"),
    ],
)  # fmt: skip
def test_refused_of_a_dense_pair(sets, key, message):
    problems, _ = findings(H200, sets, QWEN)
    assert {problem.key for problem in problems} == ({key} if key else set())
    assert not key or message in str(problems[0])


def test_experts_that_do_not_divide(tmp_path):
    """Seven GPUs: 384 experts, 64 heads, and an expert's width are all no multiple."""
    problems, _ = findings(B300, ["parallelism={tp: 7, ep: 7}", "hardware.count=7"])
    said = " ".join(str(problem) for problem in problems)
    assert "ep = 7 does not divide the 384 experts" in said
    problems, _ = findings(B300, ["parallelism={tp: 3, ep: 1}", "hardware.count=3"])
    assert "tp / ep = 3 does not divide the width of an expert, 2048" in " ".join(map(str, problems))


@pytest.mark.parametrize(
    ("name", "sets", "key", "message"),
    [
        (RTX, ["hardware.gpu=RTX PRO 6000", "hardware.memory_gib=96"], "hardware.gpu",
         f"did you mean {SERVER}?"),
        (B300, ["hardware.interconnect=pcie"], "hardware.interconnect", "joined by NVLink"),
        (B300, ["service.environment.NCCL_P2P_LEVEL=SYS"], "service.environment.NCCL_P2P_LEVEL", "PCIe"),
        (RTX, ["speculative.block_size=7"], "speculative.block_size", "was trained with 8"),
        (RTX, ["engine.max_graph_batch=4"], "engine.max_graph_batch", "larger batches use no graph"),
    ],
)  # fmt: skip
def test_warned(name, sets, key, message):
    problems, warnings = findings(name, sets)
    assert problems == []
    assert [warning.key for warning in warnings] == [key]
    assert message in str(warnings[0])


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        (RTX, ["hardware.memory_gib=96"]),  # what the box says
        (RTX, ["hardware.min_driver=590.10", "hardware.driver.branch=590"]),
        (RTX, ["hardware.driver=null"]),
        (RTX, ["hardware.driver={branch: 580, cuda_toolkit: false}", "hardware.cuda=null"]),
        (RTX, ["hardware.cuda=14.0", "hardware.min_driver=580.65.06"]),
        (RTX, ["service.environment.NCCL_P2P_LEVEL=PHB"]),
        (RTX, ["engine.kv_cache_dtype=fp8_e4m3", "model.context_length=160000"]),
        (B300, ["engine.quantization=null"]),
        (B300, ["engine.moe_backend=flashinfer_cutedsl", "parallelism.ep=8"]),
        (B300, ["hardware.count=1", "parallelism.tp=1", "hardware.interconnect=none",
                "model.target.shape=null", "model.drafter.shape=null"]),
        (B300, ["speculative.algorithm=NONE", "model.drafter=null", "engine.attention_backend=trtllm_mla",
                "engine.page_size=64"]),
    ],
)  # fmt: skip
def test_not_disturbed(name, sets):
    assert findings(name, sets) == ([], [])


def test_the_embedded_engine_has_none_of_sglangs_keys():
    sets = ["engine.memory_fraction=0.9", "engine.page_size=1", "engine.moe_backend=auto"]
    problems, _ = findings("local-cpu", [*sets, "hardware.cuda=13.0", "hardware.min_driver=580.65.06"])
    assert {problem.key for problem in problems} == {
        *(text.partition("=")[0] for text in sets), "hardware.cuda", "hardware.min_driver",
    }  # fmt: skip


def test_what_would_fit_is_said():
    problems, _ = findings(RTX, ["engine.memory_fraction=0.8"])
    assert problems[0].hint == "engine.memory_fraction from 0.875 to 0.904"
    problems, _ = findings(RTX, ["engine.memory_fraction=0.9", "model.context_length=262144"])
    assert any("165211 tokens would fit" in (problem.hint or "") for problem in problems)
