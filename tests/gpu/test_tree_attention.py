"""Attention of a verification on a GPU, at the sizes it is made for, against plain softmax attention."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(reason="no CUDA GPU on this machine", allow_module_level=True)

from toolkit.ddtree.kernels.tree_attention import Mask, Prefix, Sees, tree_attention
from toolkit.ddtree.kernels.verify_plan import plan_verification

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 4100, 67, 256, 31]
WITHIN = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = {
    "7B": (32, 8, 128, 128, 33), "7B, a chain": (32, 8, 128, 128, 8), "small heads": (16, 4, 64, 64, 65),
    "latent": (16, 1, 576, 512, 33), "odd": (6, 2, 80, 96, 17),
}  # fmt: skip


def batch(size, dtype, sees, cached_dtype):
    heads, kv_heads, key_dim, value_dim, width = size
    generator = torch.Generator("cuda").manual_seed(width)
    requests, slots = len(LENGTHS), sum(LENGTHS) + 100

    def drawn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    query = drawn(requests * width, heads, key_dim).to(dtype)
    key = drawn(requests * width, kv_heads, key_dim).to(dtype)
    value = drawn(requests * width, kv_heads, value_dim).to(dtype)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    rows = torch.randperm(slots, device="cuda", generator=generator)[: sum(LENGTHS)]
    keys = drawn(slots, kv_heads, key_dim).to(cached_dtype)
    prefix = Prefix(keys, drawn(slots, kv_heads, value_dim).to(cached_dtype), starts, rows, 0.5, 2.0)
    seen = torch.ones(requests, width, width, dtype=torch.bool, device="cuda")
    mask = None
    if sees is Sees.EARLIER:
        seen = seen.tril()
    if sees is Sees.MASKED:
        seen = (drawn(requests, width, width) > 0.4) | torch.eye(width, dtype=torch.bool, device="cuda")
        pairs = zip(LENGTHS, seen, strict=True)
        cells = [torch.cat([torch.zeros(width, n, device="cuda").bool(), own], 1) for n, own in pairs]
        places = torch.tensor([0, *(width * (n + width) for n in LENGTHS)], device="cuda").cumsum(0)
        mask = Mask(torch.cat([cell.flatten() for cell in cells]), places)
    return query, key, value, prefix, seen, mask


def expected(query, key, value, prefix, seen, scale):
    width, group = seen.shape[1], query.shape[1] // key.shape[1]
    outs = []
    for request, length in enumerate(LENGTHS):
        rows = prefix.rows[prefix.starts[request] : prefix.starts[request + 1]]
        own = slice(request * width, (request + 1) * width)
        keys = torch.cat([prefix.keys[rows].double() * prefix.key_scale, key[own].double()])
        values = torch.cat([prefix.values[rows].double() * prefix.value_scale, value[own].double()])
        keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
        past = torch.ones(width, length, dtype=torch.bool, device="cuda")
        scores = (query[own].double().transpose(0, 1) @ keys.transpose(1, 2)) * scale
        scores = scores.masked_fill(~torch.cat([past, seen[request]], 1), float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", list(WITHIN), ids=str)
@pytest.mark.parametrize("size", list(SIZES.values()), ids=list(SIZES))
def test_it_is_softmax_attention(size, dtype):
    compare(size, dtype, Sees.MASKED)


def compare(size, dtype, sees):
    query, key, value, prefix, seen, mask = batch(size, dtype, sees, dtype)
    wanted = expected(query, key, value, prefix, seen, 0.1)
    for splits in (1, 7):
        out = query.new_full((len(query), size[0], size[3]), float("nan"))
        tree_attention(query, key, value, out, prefix, 0.1, sees, mask, splits)
        torch.testing.assert_close(out.double(), wanted, rtol=WITHIN[dtype], atol=WITHIN[dtype])


@pytest.mark.parametrize("sees", [Sees.ALL, Sees.EARLIER], ids=["a block", "a chain"])
def test_rows_without_a_mask(sees):
    compare(SIZES["7B, a chain"], torch.bfloat16, sees)


@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cache_of_eight_bits(cached):
    query, key, value, prefix, seen, mask = batch(SIZES["7B"], torch.bfloat16, Sees.MASKED, cached)
    out = torch.empty_like(query)
    tree_attention(query, key, value, out, prefix, 0.1, Sees.MASKED, mask)
    wanted = expected(query, key, value, prefix, seen, 0.1)
    torch.testing.assert_close(out.double(), wanted, rtol=3e-2, atol=3e-2)


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
