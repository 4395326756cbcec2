"""DDTREE on two tensor-parallel ranks: the same trees and commits on both, the tokens of one.

    python benchmarks/sglang_ranks.py --logs logs --out benchmarks/sglang_h200_tp2.json

Each rank has a GPU of its own; with `--one-gpu` they are two nodes that share one, so that all but the GPUs'
own links is as it is on two.

Greedy tokens are judged as in sglang_modes.py. Each rank writes a digest of its trees and commits at every
step, for greedy requests, drawn ones and penalised ones; the ranks' files must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import Child, Mode, pair_parser, parsed, settings, stop
from benchmarks.sglang_judge import Judge
from benchmarks.sglang_modes import levels, machine, read_prompts

KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
}


def main() -> None:
    args = parse()
    prompts = read_prompts(args)
    defaults = {
        "model_path": str(args.target), "speculative_draft_model_path": str(args.drafter),
        "speculative_algorithm": "DDTREE", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 16, "max_running_requests": 16,
        "mem_fraction_static": 0.85, "max_total_tokens": 65536, "context_length": 2048, "random_seed": 1,
        "disable_radix_cache": True, "log_level": "warning",
        "disable_custom_all_reduce": True, **settings(args.set),
    }  # fmt: skip
    tree, plugins = {"budget": 32, "topk_cap": 8}, ("ddtree", "ddtree_rank_trace")
    with tempfile.TemporaryDirectory() as scratch:
        children = {
            size: Child(
                f"tp {size}",
                Mode({"tp_size": size, "nnodes": size if args.one_gpu else 1}, tree, plugins),
                defaults,
                prompts,
                Path(scratch),
                args.logs,
            )
            for size in args.sizes
        }
        try:
            for child in children.values():
                child.wait("ready")
            told = {size: decoded(child, len(prompts), args.tokens) for size, child in children.items()}
        finally:
            stop(children.values())
    report(args, prompts, told)


def decoded(child: Child, requests: int, tokens: int) -> dict[str, Any]:
    """What one engine decodes of each kind, and what its ranks wrote meanwhile."""
    kinds = {}
    for kind, sampling in KINDS.items():
        before = traces(child)
        result = child.decode(level=16, tokens=tokens, requests=requests, **sampling)
        after = traces(child)
        lines = {rank: own[len(before.get(rank, [])) :] for rank, own in after.items()}
        ranks, differing = ranks_differ(lines)
        kinds[kind] = {
            "outputs": result["outputs"],
            "verify_steps": result["verify_steps"],
            "batches": len(lines["rank0"]),
            "ranks": ranks,
            "batches_that_differ": differing,
        }
    return kinds


def ranks_differ(lines: dict[str, list[str]]) -> tuple[int, int]:
    """How many ranks there are, and in how many batches they did not do the same."""
    return len(lines), sum(
        len({own[step] if step < len(own) else None for own in lines.values()}) > 1
        for step in range(max(map(len, lines.values())))
    )


def traces(child: Child) -> dict[str, list[str]]:
    """What each rank wrote; one that lags behind the answer is waited for, at most ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        told = {path.stem: path.read_text().splitlines() for path in child.folder.glob("rank*.txt")}
        if len({len(lines) for lines in told.values()}) <= 1 or time.monotonic() > deadline:
            return told
        time.sleep(0.1)


def report(args: argparse.Namespace, prompts: list[list[int]], told: dict[int, dict[str, Any]]) -> None:
    judge = Judge(args.target)
    one, two = (told[size]["greedy"]["outputs"] for size in (args.sizes[0], args.sizes[-1]))
    result: dict[str, Any] = {
        "machine": machine(),
        "gpus": 1 if args.one_gpu else max(args.sizes),
        "new_tokens": args.tokens,
        "judge_fails_one_replaced_token": judge.fails_one_replaced_token(prompts[0], two[0]),
        "same_greedy_outputs": f"{sum(a == b for a, b in zip(one, two, strict=True))} of {len(one)}",
    }
    for size, kinds in told.items():
        for kind, own in list(kinds.items()):
            outputs = own.pop("outputs")
            if kind == "greedy":
                kinds[kind] = own | judge.verdict(prompts, outputs)
        result[f"tp {size}"] = kinds
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sizes", type=levels, default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU, as nodes")
    return parsed(parser)


if __name__ == "__main__":
    main()
