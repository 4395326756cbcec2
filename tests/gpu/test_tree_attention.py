"""Attention of a verification on a GPU, at the sizes it is made for, against plain softmax attention."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(reason="no CUDA GPU on this machine", allow_module_level=True)

from tests.ddtree.attention_cases import Batch
from toolkit.ddtree.kernels import tree_attention
from toolkit.ddtree.kernels.tree_attention import Sees
from toolkit.ddtree.kernels.verify_plan import plan_verification

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 4100, 67, 256, 31]
WITHIN = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = {
    "7B": (32, 8, 128, 128, 33), "7B, a chain": (32, 8, 128, 128, 8), "small heads": (16, 4, 64, 64, 65),
    "latent": (16, 1, 576, 512, 33), "odd": (6, 2, 80, 96, 17),
}  # fmt: skip


@pytest.mark.parametrize("dtype", list(WITHIN), ids=str)
@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
def test_it_is_softmax_attention(size, dtype):
    compare(size, dtype, Sees.MASKED)


def compare(size, dtype, sees, cached=None, splits=(1, 7), *, latent=False):
    made = Batch.drawn(LENGTHS, size, sees, dtype=dtype, cached=cached, latent=latent, device="cuda")
    wanted, within = made.expected(0.1), WITHIN[dtype]
    for count in splits:
        torch.testing.assert_close(made.attended(0.1, count).double(), wanted, rtol=within, atol=within)


@pytest.mark.parametrize("sees", [Sees.ALL, Sees.EARLIER], ids=["a block", "a chain"])
def test_rows_without_a_mask(sees):
    compare(SIZES["7B, a chain"], torch.bfloat16, sees)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", list(WITHIN), ids=str)
def test_latent_rows_are_keys_and_values(dtype, once, monkeypatch):
    if not once:
        monkeypatch.setattr(tree_attention, "_are_one", lambda prefix: False)
    compare(SIZES["latent"], dtype, Sees.MASKED, latent=True)


@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cache_of_eight_bits(cached):
    compare(SIZES["7B"], torch.bfloat16, Sees.MASKED, cached, splits=(None,))


def test_the_plan_of_a_verification():
    lengths, width = torch.tensor([700, 1, 1, 9000, 512, 0, 40_000], device="cuda"), 33
    requests, generator = len(lengths), torch.Generator("cuda").manual_seed(2)
    table = torch.randperm(8 * 41_000, device="cuda", generator=generator).to(torch.int32).view(8, -1)
    own = torch.randperm(8, device="cuda", generator=generator)[:requests]
    starts = [torch.full((requests + 2,), 7, dtype=x, device="cuda") for x in (torch.int64, torch.int32)]
    starts.append(torch.full_like(starts[0], 7))
    rows = torch.full((int(lengths.sum()) + 4,), -1, device="cuda")
    plan_verification(lengths, own, table, width, *starts, rows)
    after = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    steps = torch.arange(requests + 1, device="cuda") * width
    for start, wanted in zip(starts, (steps, after, (after + steps) * width), strict=True):
        assert start.tolist() == [*wanted.tolist(), 7]
    told = [table[i, :n] for i, n in zip(own, lengths.tolist(), strict=True)]
    assert torch.equal(rows[:-4].int(), torch.cat(told))
    assert (rows[-4:] == -1).all()
