"""Attention of a verification beside plain softmax attention; interpreted here, run by tests/gpu there."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ddtree.attention_cases import Batch
from toolkit.ddtree.kernels import tree_attention as kernels
from toolkit.ddtree.kernels.tree_attention import Prefix, Sees, _tile, tree_attention
from toolkit.ddtree.kernels.verify_plan import plan_verification

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted here, run by tests/gpu there")

LENGTHS = [0, 1, 130, 67]


def compare(made, scale, splits, within=1e-5):
    wanted = made.expected(scale)
    torch.testing.assert_close(made.attended(scale, splits).double(), wanted, rtol=within, atol=within)


@pytest.mark.parametrize("splits", [None, 1, 2, 5])
@pytest.mark.parametrize("sees", list(Sees), ids=lambda sees: sees.name.lower())
def test_it_is_softmax_attention_over_prefix_and_tree(sees, splits):
    compare(Batch.drawn(LENGTHS, (6, 2, 32, 32, 9), sees), 0.2, splits)


@pytest.mark.parametrize(
    "size",
    [(8, 1, 576, 512, 5), (6, 1, 80, 64, 33), (8, 1, 160, 128, 12), (4, 4, 48, 32, 70)],
    ids=["latent", "odd head", "rest of a head", "wider than a tile"],
)
def test_heads_of_any_size(size):
    compare(Batch.drawn(LENGTHS, size, Sees.MASKED), 0.1, 2, within=1e-4)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("cached", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_latent_rows_are_keys_and_values(cached, once, monkeypatch):
    if not once:
        monkeypatch.setattr(kernels, "_are_one", lambda prefix: False)
    made = Batch.drawn(LENGTHS, (8, 1, 160, 128, 5), Sees.MASKED, latent=True, cached=cached)
    compare(made, 0.1, 2, within=1e-4)


@pytest.mark.parametrize(
    ("place", "size", "expected"), [("values", 128, True), ("values", 64, False), ("others", 128, False)]
)
def test_only_latent_rows_are_read_once(place, size, expected, monkeypatch):
    """Those whose values are not all of the first part of the keys, or lie elsewhere, are not."""
    made = Batch.drawn(LENGTHS, (8, 1, 160, size, 5), Sees.MASKED, latent=True)
    if place == "others":
        made.prefix = replace(made.prefix, values=(made.prefix.keys + 1)[..., :size])
    asked = []
    kernel = kernels._split_kernel
    monkeypatch.setattr(kernels, "_split_kernel", Noted(kernel, asked))
    compare(made, 0.1, 2, within=1e-4)
    assert asked == [expected]


class Noted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, asked):
        self.kernel, self.asked = kernel, asked

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.asked.append(constants["ONCE"])
            self.kernel[grid](*args, **constants)

        return launch


def test_a_cache_of_eight_bits():
    compare(Batch.drawn(LENGTHS, (4, 2, 32, 32, 6), Sees.MASKED, cached=torch.float8_e4m3fn), 0.2, 2)


def test_rows_that_do_not_fit_are_refused():
    made = Batch.drawn(LENGTHS, (4, 2, 32, 32, 6), Sees.ALL)
    query, key, value, prefix = made.query, made.key, made.value, made.prefix
    with pytest.raises(ValueError, match="23 rows of 4 heads do not fit 4 requests"):
        tree_attention(query[:23], key, value, query[:23].clone(), prefix, 0.2, Sees.ALL)
    with pytest.raises(ValueError, match="there is no mask"):
        tree_attention(query, key, value, query.clone(), prefix, 0.2, Sees.MASKED)


@pytest.mark.parametrize("lengths", [[1], [0, 5, 1200], [700, 1, 1, 9000, 512]])
def test_the_plan_of_a_verification(lengths):
    width, requests = 33, len(lengths)
    table = torch.randperm(8 * 9100).to(torch.int32).view(8, 9100)
    own = torch.randperm(8)[:requests]
    starts = [
        torch.full((requests + 2,), 7, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int64)
    ]
    rows = torch.full((sum(lengths) + 4,), -1)
    plan_verification(torch.tensor(lengths), own, table, width, *starts, rows)
    after = torch.tensor([0, *lengths]).cumsum(0)
    steps = torch.arange(requests + 1) * width
    for start, wanted in zip(starts, (steps, after, (after + steps) * width), strict=True):
        assert start[:-1].tolist() == wanted.tolist()
        assert start[-1] == 7
    assert rows[:-4].tolist() == torch.cat([table[i, :n] for i, n in zip(own, lengths, strict=True)]).tolist()
    assert (rows[-4:] == -1).all()


@pytest.mark.parametrize(
    ("rows", "key_dim", "value_dim", "item", "shared", "once", "expected"),
    [
        (132, 128, 128, 2, 227 << 10, False, (64, 64, 3)),
        (132, 64, 64, 2, 227 << 10, False, (64, 64, 2)),
        (20, 128, 128, 2, 99 << 10, False, (32, 64, 2)),  # one of workstation Blackwell
        (528, 576, 512, 2, 227 << 10, True, (64, 32, 3)),
        (528, 576, 512, 2, 227 << 10, False, (64, 32, 2)),
        (528, 576, 512, 2, 99 << 10, True, (16, 32, 2)),
        (528, 576, 512, 2, 99 << 10, False, (16, 32, 1)),
        (132, 128, 128, 4, 99 << 10, False, (32, 32, 2)),
    ],
)
def test_tiles_fit_the_shared_memory(rows, key_dim, value_dim, item, shared, once, expected):
    tile = _tile(rows, key_dim, value_dim, item, shared, once=once)
    assert (tile.rows, tile.columns, tile.stages) == expected


@pytest.mark.parametrize(
    ("programs", "abreast", "expected"),
    [
        (1, 1, 1),
        (9, 132, 14),  # one wave of short programs
        (68, 132, 3),  # two waves of thirds, not one of wholes
        (144, 132, 3),
        (264, 264, 1),
        (6336, 264, 1),
        (3, 264, 16),
    ],
)
def test_a_prefix_is_cut_so_that_the_last_wave_is_full(programs, abreast, expected):
    assert kernels._splits(programs, abreast) == expected


def test_heads_that_fit_nowhere_are_refused():
    with pytest.raises(ValueError, match="keys of 4096 and values of 4096 do not fit 101376 bytes"):
        _tile(16, 4096, 4096, 4, 99 << 10)


def test_kernels_compile_for_gpus_and_fit_them(tmp_path):
    """The interpreter takes what a compiler does not, and has all the memory that there is."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("compiled_attention.py")], check=False,
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-3000:]
    cases = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(cases) == 12
    for case in cases:
        assert 0 <= case["shared"] <= case["limit"], case


def test_no_rows_are_nothing_to_do_and_no_requests_are_refused():
    made = Batch.drawn(LENGTHS, (4, 2, 32, 32, 6), Sees.ALL)
    query, key, value, prefix = made.query, made.key, made.value, made.prefix
    none = query[:0]
    tree_attention(none, key[:0], value[:0], none.clone(), prefix, 0.2, Sees.ALL)
    nobody = Prefix(prefix.keys, prefix.values, prefix.starts[:1], prefix.rows)
    with pytest.raises(ValueError, match="24 rows of 4 heads do not fit 0 requests"):
        tree_attention(query, key, value, query.clone(), nobody, 0.2, Sees.ALL)
