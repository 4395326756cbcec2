"""DDTREE's attention of a verification beside that of SGLang's Triton backend, on one GPU.

    python benchmarks/tree_attention.py --out benchmarks/tree_attention_h200.json [--tune]

Microseconds of one layer in bfloat16, medians of CUDA graph replays that take turns, and the greatest
difference of the results. `--tune` also times other splits and tiles of DDTREE's kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_modes import machine
from toolkit.ddtree.kernels import tree_attention as own
from toolkit.ddtree.kernels.tree_attention import Mask, Prefix, Sees, tree_attention

# heads, K/V heads, size of a key, of a value
SHAPES = {"pair of 173M": (16, 4, 64, 64), "7B": (32, 8, 128, 128), "latent, 16 heads": (16, 1, 576, 512)}
CASES = [  # requests, rows a request, prefix
    (1, 33, 320), (1, 33, 16384), (1, 8, 700), (4, 33, 700), (16, 8, 700), (16, 33, 700), (16, 33, 4096),
    (48, 33, 4096),
]  # fmt: skip
TUNED = [(16, 33, 4096), (1, 33, 16384), (16, 8, 700), (4, 33, 700), (1, 33, 320)]
CHANGES: tuple[dict[str, int], ...] = (
    {"warps": 8}, {"stages": 1}, {"stages": 3}, {"columns": 32, "stages": 4}, {"columns": 128},
    {"columns": 128, "warps": 8}, {"rows": 32}, {"rows": 128}, {"rows": 128, "warps": 8},
    {"rows": 128, "warps": 8, "stages": 3}, {"rows": 128, "columns": 128, "warps": 8},
)  # fmt: skip
LATENT: tuple[dict[str, int], ...] = (
    {"warps": 4}, {"stages": 2}, {"stages": 4}, {"rows": 32}, {"rows": 32, "warps": 4}, {"rows": 16},
    {"columns": 64, "stages": 2}, {"rows": 32, "columns": 64}, {"rows": 16, "columns": 64, "stages": 2},
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 11, 16)
REPLAYS, CALLS, TURNS = 10, 8, 5


def main() -> None:
    args = parse()
    told: dict[str, Any] = {"machine": machine(), "microseconds": {}}
    for name, shape in SHAPES.items():
        if args.only not in name:
            continue
        for number, case in enumerate(TUNED if args.tune else CASES):
            if args.case not in (None, number):
                continue
            label = f"{name}: {case[0]} x {case[1]} rows, prefix {case[2]}"
            told["microseconds"][label] = compared(shape, case, tune=args.tune)
            print(label, json.dumps(told["microseconds"][label]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
            if args.seconds and time.perf_counter() - STARTED > args.seconds:
                raise SystemExit("out of time: the rest was not measured")


def compared(shape: tuple[int, ...], case: tuple[int, ...], *, tune: bool) -> dict[str, Any]:
    """Both kernels over the same rows."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    heads, kv_heads, key_dim, value_dim = shape
    requests, width, length = case
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(requests * width, heads, key_dim, **make)
    key = torch.randn(requests * width, kv_heads, key_dim, **make)
    value = torch.randn(requests * width, kv_heads, value_dim, **make)
    cached = torch.randn(requests * length + 64, kv_heads, key_dim, **make)
    values = cached[..., :value_dim] if key_dim != value_dim else torch.randn_like(cached)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * length
    row_starts = torch.arange(requests + 1, device="cuda") * width
    rows = torch.randperm(requests * length, device="cuda")
    seen = (torch.rand(requests, width, width, device="cuda") < 0.3).tril()
    seen |= torch.eye(width, device="cuda", dtype=torch.bool)
    cells = torch.ones(requests, width, length + width, device="cuda", dtype=torch.bool)
    cells[:, :, length:] = seen
    mask_starts = torch.arange(requests + 1, device="cuda") * width * (length + width)
    mask = Mask(cells.flatten(), mask_starts)
    out = query.new_empty(requests * width, heads, value_dim)
    stock = torch.empty_like(out)
    prefix, scale = Prefix(cached, values, starts, rows), key_dim**-0.5

    def ours(splits: int | None = None) -> None:
        tree_attention(query, key, value, out, prefix, scale, Sees.MASKED, mask, splits)

    def theirs() -> None:
        extend_attention_fwd(
            query, key, value, stock, cached, values, row_starts, starts, rows, mask.cells, True,
            mask_starts, width, 1.0, 1.0, scale,
        )  # fmt: skip

    functions = {"stock": theirs, "own": ours}
    told: dict[str, Any] = timed(functions)
    told["ratio"] = round(told["own"] / told["stock"], 3)
    told["difference"] = round(float((out.float() - stock.float()).abs().max()), 4)
    if tune:
        told |= tuned(ours, width * heads // kv_heads, key_dim, value_dim)
    return told


def tuned(ours: Callable[..., None], rows: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Times of other splits and tiles."""
    kept = own._tile
    shared = own._shared_memory(torch.device("cuda"))
    base = kept(rows, key_dim, value_dim, 2, shared, once=key_dim != value_dim)
    told: dict[str, Any] = {"splits": timed({str(n): lambda n=n: ours(n) for n in SPLITS})}
    tiles = {}
    for changes in LATENT if key_dim != value_dim else CHANGES:
        tile = replace(base, **changes)
        if tile == base:
            continue
        own._tile = lambda *_, tile=tile, **__: tile
        try:
            tiles[str(changes)] = timed({"own": ours})["own"]
        except Exception as error:  # a tile that does not fit the device is an answer too
            tiles[str(changes)] = type(error).__name__
        finally:
            own._tile = kept
    return told | {"tile": str(base), "tiles": tiles}


def timed(functions: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Microseconds of a call of each, in turns."""
    graphs = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                function()
    turns: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            first.record()
            for _ in range(REPLAYS):
                graph.replay()
            last.record()
            torch.cuda.synchronize()
            turns[name].append(first.elapsed_time(last) * 1000 / REPLAYS / CALLS)
    return {name: round(statistics.median(times), 2) for name, times in turns.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", default="", help="heads whose name contains this")
    parser.add_argument("--case", type=int, help="this case alone, by its number")
    parser.add_argument("--seconds", type=float, help="stop after the case that begins before this")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


STARTED = time.perf_counter()

if __name__ == "__main__":
    main()
