"""What the profiles render, read by SGLang 0.5.17's own parser and argument resolution, the plugin loaded.

There is no GPU: SGLang's questions for one get the answers of the catalogue. Every handler of its
`ServerArgs` runs; what needs a process on a GPU (kernels, free memory, NCCL) does not.
"""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.service.golden import CASES, PYTHON, RELEASE
from tests.sglang import checkpoints
from tests.sglang.conftest import answer_of
from toolkit.errors import ConfigError
from toolkit.hardware.catalogue import find_gpu
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.profile.memory.shapes import shape_from_config, shapes
from toolkit.profile.shape import profile_shape
from toolkit.service.command import unit_for

pytestmark = pytest.mark.timeout(600)

LAYOUT = Layout(None)
GENERATED = int(os.environ.get("DDTOOLKIT_PROFILE_CASES", "150"))
SHIPPED = [
    "+".join((profile, *overlays))
    for profile, ways in CASES.items()
    for overlays in ways
    if profile != "systemd-cpu"
]
# That this parser does refuse: the reason, and what is added to the arguments of a sound profile.
REFUSED = {
    "--pp-size is 2": ["--pp-size", "2", "--tp-size", "4"],
    "--enable-dp-attention is True": ["--enable-dp-attention", "--dp-size", "8"],
    "--page-size is 16": ["--page-size", "16"],
    "cannot verify trees with MLA": ["--attention-backend", "trtllm_mla"],
    "tree budget 6 is below 7": ["--speculative-ddtree-budget", "6"],
    "--speculative-num-draft-tokens is 9": ["--speculative-num-draft-tokens", "9"],
    "SystemExit": ["--no-such-flag"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("checkpoints"))


def resolve(name, folders, *sets):
    """The profile with folders of this machine as checkpoints; ConfigError where a rule refuses."""
    profile, *overlays = name.split("+")
    overlays = [Path(item) for item in overlays]
    model = load_profile(profile, overlays=overlays).profile.model
    places = [
        f"model.{role}={{source: {folders[one.shape]}, shape: {one.shape}, revision: pinned}}"
        for role, one in (("target", model.target), ("drafter", model.drafter))
    ]
    return load_profile(profile, overlays=overlays, sets=[*places, *sets]).profile


def case(profile, *more):
    gpu = find_gpu(profile.hardware.gpu)
    release = LAYOUT.service(profile.name).releases / RELEASE
    unit = unit_for(profile, release_dir=release, layout=LAYOUT, python=PYTHON)
    argv = [*unit.argv[3:], *more]
    return {"argv": argv, "capability": gpu.compute_capability, "memory_mib": gpu.memory_mib}


def told_by(python, cases):
    return answer_of(python, "parse_profiles.py", cases)


@pytest.fixture(scope="module")
def told(sglang_python, folders, tmp_path_factory):
    secrets = tmp_path_factory.mktemp("secrets") / "config.yaml"
    secrets.write_text('api-key: "pa$1 wor$D"\nadmin-api-key: "other"\n')
    cases = [case(resolve(name, folders)) for name in SHIPPED]
    base = resolve("rtx-pro-6000-pcie-8x", folders)
    cases += [case(base, *flags) for flags in REFUSED.values()]
    return told_by(sglang_python, [*cases, case(base, "--config", str(secrets))])


@pytest.mark.parametrize("name", SHIPPED)
def test_sglang_takes_what_is_rendered_as_it_is_meant(told, folders, name):
    found, profile = told["cases"][SHIPPED.index(name)], resolve(name, folders)
    assert found.get("refused") is None
    resolved, spec = found["resolved"], profile.speculative
    engine, spread = profile.engine, profile.parallelism
    algorithm = None if spec.algorithm == "NONE" else spec.algorithm
    rows = {"NONE": None, "DFLASH": spec.block_size, "DDTREE": spec.budget + 1}[spec.algorithm]
    assert (resolved["speculative_algorithm"], resolved["speculative_num_draft_tokens"]) == (algorithm, rows)
    assert [resolved[f"{key}_size"] for key in ("tp", "pp", "ep")] == [spread.tp, spread.pp, spread.ep]
    assert (resolved["attention_backend"], resolved["page_size"]) == ("triton", 1)
    for key, flag in (
        ("mem_fraction_static", engine.memory_fraction),
        ("chunked_prefill_size", engine.prefill_chunk),
        ("max_running_requests", profile.service.max_running_requests),
        ("context_length", profile.model.context_length),
    ):
        assert resolved[key] == flag
    assert resolved["kv_cache_dtype"] == "bf16"
    assert resolved["graph"] == [engine.max_graph_batch, engine.max_graph_batch]
    tree = None if found["tree"] is None else json.loads(found["tree"])
    if algorithm != "DDTREE":
        assert tree is None
        return
    wanted = {"budget": spec.budget, "topk_cap": spec.topk_cap, "expansion": spec.expansion}
    assert {key: tree[key] for key in wanted} == wanted
    assert tree["debug_file"] is None  # no profile asks for one


@pytest.mark.parametrize("reason", REFUSED)
def test_the_parser_does_refuse(told, reason):
    assert reason in told["cases"][len(SHIPPED) + list(REFUSED).index(reason)]["refused"]


def test_keys_are_read_from_the_file(told):
    resolved = told["cases"][-1]["resolved"]
    assert (resolved["api_key"], resolved["admin_api_key"]) == ("pa$1 wor$D", "other")


def test_the_memory_is_counted_as_sglang_counts_it(told):
    from toolkit.profile.memory.estimate import estimate
    from toolkit.profile.memory.weights import stage_layers

    sizes = told["sizes"]
    b300 = estimate(load_profile("b300-nvlink-8x").profile)
    terms = {term.name: term for term in b300.dynamic}
    assert terms["verify mask"].bytes == sizes["mask"]
    assert b300.token_bytes == sizes["cell"]
    assert sizes["stages"] == [stage_layers(61, pp) for pp in (1, 2, 3, 4, 8)]
    rtx = estimate(load_profile("rtx-pro-6000-pcie-8x").profile)
    partials = next(term for term in rtx.dynamic if term.name == "attention partials")
    assert partials.bytes == 16 * 33 * 8 * sizes["splits"][0] * 512 * 4


def test_the_configs_are_of_the_shapes():
    for name, config in checkpoints.CONFIGS.items():
        known, read = shapes()[name], shape_from_config(config, name)
        for key in ("attention", "layers", "hidden", "heads", "experts", "expert_bytes", "quantization",
                    "vocabulary",
                    "context", "kv_rank", "kv_heads", "head_dim", "block_size", "captured_layers",
                    "intermediate", "dense_layers", "value_bytes", "tied"):  # fmt: skip
            assert getattr(read, key) == getattr(known, key), (name, key)


def choices(section, key):
    """The values that the schema lists, and null."""
    return ("null", *profile_shape().keys[section].keys[key].choices)


@pytest.mark.parametrize("key", ["attention_backend", "kv_cache_dtype", "moe_backend", "quantization"])
def test_every_name_of_the_schema_is_sglangs(told, key):
    ours = {name for name in choices("engine", key) if name != "null"}
    assert ours <= set(told["choices"][key])


NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 61, 64)
SETS = {
    "parallelism.tp": st.sampled_from(NUMBERS),
    "parallelism.pp": st.sampled_from((1, 1, 1, 2, 4, 8)),
    "parallelism.ep": st.sampled_from((1, 1, 2, 3, 4, 8)),
    "parallelism.dp_attention": st.sampled_from(("true", "false", "false")),
    "hardware.count": st.sampled_from((1, 2, 4, 8)),
    "speculative.algorithm": st.sampled_from(("NONE", "DFLASH", "DDTREE", "DDTREE")),
    "speculative.budget": st.integers(1, 1024),
    "speculative.topk_cap": st.integers(1, 64),
    "speculative.block_size": st.sampled_from((2, 7, 8, 16, 64)),
    "speculative.expansion": st.sampled_from(("chain", "best_first", "chain_seeded", "transition")),
    "engine.attention_backend": st.sampled_from(choices("engine", "attention_backend")),
    "engine.kv_cache_dtype": st.sampled_from(choices("engine", "kv_cache_dtype")),
    "engine.page_size": st.sampled_from(("null", "1", "16", "32", "64")),
    "engine.memory_fraction": st.sampled_from(("null", "0.5", "0.8", "0.9", "0.99")),
    "engine.prefill_chunk": st.sampled_from(("null", "512", "2048", "16384")),
    "engine.max_graph_batch": st.sampled_from(("null", "1", "5", "48", "1000")),
    "engine.moe_backend": st.sampled_from(choices("engine", "moe_backend")),
    "engine.quantization": st.sampled_from(choices("engine", "quantization")),
    "engine.dtype": st.sampled_from(("bfloat16", "float32")),
    "model.context_length": st.sampled_from(("null", "512", "40960", "131072", "262144", "1000000")),
    "model.trust_remote_code": st.sampled_from(("true", "false")),
    "service.max_running_requests": st.sampled_from((1, 2, 16, 48, 300)),
    "service.bind": st.sampled_from(("127.0.0.1", "::1", "10.0.0.1")),
    "service.port": st.integers(1, 65535),
}  # fmt: skip


@st.composite
def changes(draw):
    """Some keys of a shipped profile and overlay changed."""
    name = draw(st.sampled_from(SHIPPED))
    keys = draw(st.lists(st.sampled_from(sorted(SETS)), max_size=4, unique=True))
    return name, tuple(f"{key}={draw(SETS[key])}" for key in keys)


def test_what_the_rules_accept_sglang_does_not_refuse(sglang_python, folders):
    """Generated profiles: the rules answer each with a profile or its problems, and never crash."""
    accepted: dict[tuple, dict] = {}
    refused: list[list] = []

    @settings(
        max_examples=4 * GENERATED, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changes())
    def generate(change):
        if len(accepted) >= GENERATED:
            return
        name, sets = change
        try:
            accepted[change] = case(resolve(name, folders, *sets))
        except ConfigError as error:
            refused.append(error.problems)

    generate()
    assert all(problem.message and problem.key for problems in refused for problem in problems)
    assert len(accepted) == GENERATED
    assert len(refused) > GENERATED / 4
    found = told_by(sglang_python, list(accepted.values()))["cases"]
    wrong = [
        f"{name} {' '.join(sets)}: {answer['refused']}"
        for (name, sets), answer in zip(accepted, found, strict=True)
        if "refused" in answer
    ]
    assert not wrong, f"{len(wrong)} of {GENERATED}:\n" + "\n".join(wrong[:40])
