"""The sum of memory of one GPU, against figures worked out by hand."""

import pytest

from toolkit.profile.memory.estimate import GIB, estimate
from toolkit.profile.memory.layouts import as_json, layouts, table
from toolkit.profile.memory.shapes import shapes
from toolkit.profile.schema import Parallelism, Profile

B300 = "NVIDIA B300 SXM6 AC"


def profile(**sections):
    given = {
        "hardware": {"device": "cuda", "gpu": B300, "count": 8, "interconnect": "nvlink"},
        "engine": {"kind": "sglang", "version": "0.5.17", "memory_fraction": 0.8},
        "model": {
            "target": {"source": "/t", "shape": "kimi-k2.6-int4"},
            "drafter": {"source": "/d", "shape": "kimi-k2.6-dflash"},
            "context_length": 262144,
        },
        "parallelism": {"tp": 8},
        "speculative": {"budget": 32},
        "service": {"max_running_requests": 48},
    }
    for name, values in sections.items():
        given[name] = given[name] | values
    return Profile.model_validate({"schema": 1, "name": "a", **given})


def terms(**sections):
    found = estimate(profile(**sections))
    return {term.name: term.bytes for term in (*found.static, *found.dynamic)}


def test_buffers_of_a_wide_verification():
    """3.3 GB of indices at 48 x 33 x 262,144, and the drafter's at its block of 8."""
    found = terms()
    assert found["K/V indices"] == 48 * 33 * 262144 * 8 + 48 * 8 * 262144 * 8
    assert found["verify mask"] == 48 * 33 * (262144 + 33)
    assert found["verify logits"] == 48 * 33 * 163840 * 4
    # 148 processors: 256 splits; 64 heads over 8 GPUs; 512 values of the latent.
    assert found["attention partials"] == 48 * 33 * 8 * 256 * 512 * 4


def test_plain_and_linear_decoding_are_narrow():
    plain, linear = terms(speculative={"algorithm": "NONE"}), terms(speculative={"algorithm": "DFLASH"})
    assert plain["verify logits"] * 8 == linear["verify logits"]
    assert plain["K/V indices"] == 48 * 262144 * 8
    assert linear["K/V indices"] == 48 * 16 * 262144 * 8
    assert "drafter weights" not in plain
    assert "verify mask" not in plain


def test_a_short_context_has_fewer_splits():
    found = terms(model={"context_length": 1024})
    assert found["attention partials"] == 48 * 33 * 8 * 32 * 512 * 4


@pytest.mark.parametrize(
    ("dtype", "token"), [(None, 67 * 1152), ("bfloat16", 67 * 1152), ("fp8_e4m3", 67 * 576)]
)
def test_a_token_of_latent(dtype, token):
    """576 values a layer; the drafter's six layers are counted as the target's."""
    found = estimate(profile(engine={"kv_cache_dtype": dtype}))
    assert found.token_bytes == token
    assert found.least_tokens == 262144 + 2 * 33


def test_a_drafter_with_more_heads_a_gpu_takes_more():
    """On one GPU 8 K/V heads of 128, keys and values: 4 KiB a layer in place of a latent's 1152 bytes."""
    assert estimate(profile(parallelism={"tp": 1})).token_bytes == 61 * 1152 + 6 * 4096


def test_both_sides_of_the_fraction():
    found = estimate(profile())
    assert found.free == 275040 * 1024**2 - GIB
    assert found.static_room + found.dynamic_room == found.free
    weights = sum(term.bytes for term in found.static[:-1])
    assert found.pool_tokens == (found.static_room - weights) // found.token_bytes
    assert found.fits
    assert not estimate(profile(engine={"memory_fraction": 0.99})).fits
    assert not estimate(profile(engine={"memory_fraction": 0.3})).fits


def test_without_a_fraction_sglang_leaves_what_it_thinks_is_needed():
    """Its formula: 512 MiB + 1.5 a token + 1 GiB + 2 a request + 1.5 GiB, and 9% less for a vision tower."""
    found = estimate(profile(engine={"memory_fraction": None, "prefill_chunk": 16384}))
    reserve = 512 + 16384 * 1.5 + 1024 + 48 * 2 + 1536
    assert found.fraction == pytest.approx((1 - reserve / 275040) * 0.91)
    small = estimate(profile(engine={"memory_fraction": None, "prefill_chunk": 2048}))
    assert small.fraction == pytest.approx((1 - 10 * 1024 / 275040) * 0.91)


def test_image_features_are_counted_unless_they_stay_on_the_host():
    assert "image features" in terms()
    for words in (["--mm-feature-transport=cpu"], ["--mm-feature-transport", "cpu"]):
        assert "image features" not in terms(engine={"extra_args": words})


def test_graphs_are_for_the_requests_that_run():
    assert terms(engine={"max_graph_batch": 12})["verify logits"] * 4 == terms()["verify logits"]


@pytest.mark.parametrize(
    "sections",
    [
        {"hardware": {"gpu": "NVIDIA Unheard Of"}},
        {"model": {"target": {"source": "/t"}}},
        {"model": {"drafter": {"source": "/d"}}},
        {"engine": {"kind": "embedded"}},
        {"parallelism": {"tp": 8, "dp_attention": True}},
    ],
)
def test_what_is_not_known_is_not_judged(sections):
    assert estimate(profile(**sections)) is None
    assert layouts(profile(**sections)) == []


def test_memory_of_a_gpu_outside_the_catalogue():
    found = estimate(profile(hardware={"gpu": "NVIDIA Unheard Of", "memory_gib": 300}))
    assert found.free == 299 * GIB


def test_shapes_read_from_a_checkpoint_take_the_place_of_names():
    given = profile(model={"target": {"source": "/t"}})
    assert estimate(given, target=shapes()["kimi-k2.6-int4"]) == estimate(profile())


def test_ways_to_spread():
    found = dict(layouts(profile()))
    assert list(found) == ["tp 8", "pp 8, no speculation", "tp 8 ep 8", "tp 8 ep 4"]
    assert found["tp 8"].static == found["tp 8 ep 8"].static
    assert found["pp 8, no speculation"].spread == Parallelism(pp=8)
    own = layouts(profile(parallelism={"tp": 4}))
    assert [name for name, _ in own][:2] == ["tp 4", "tp 8"]
    header, rows = table(list(found.items()))
    assert len({len(row) for row in (header, *rows)}) == 1
    assert rows[-1] == ["fits", "yes", "yes", "yes", "yes"]
    assert as_json("tp 8", found["tp 8"])["terms"]["K/V"]["bytes"] == found["tp 8"].static[-1].bytes
