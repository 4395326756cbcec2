"""Draft trees from logits: the Triton kernels against the public DDTree implementation, on one GPU.

    python benchmarks/tree_builder.py --reference CHECKOUT --out benchmarks/tree_builder.json

CHECKOUT is a clone of https://github.com/liranringel/ddtree. Every case first checks that both give the same
trees: the same set of prefixes, but for prefixes whose scores are within 1e-5 of the tree's last (the public
implementation adds scores in float64), and, for the kernels, the plain reference's tree bit for bit. Both
start from float32 logits on the GPU and end with tree and ancestor mask: the kernels' on the GPU, the public
implementation's on the host, where its tree lives. It has no top-k cap (a budget of B takes the best B tokens
of each slot) and builds one request at a time, so the time of R requests is that of R calls.

Times are medians: "replay" is the kernels in a CUDA graph by events, over input sets that together exceed the
L2 cache, and "topk" and "tree" its two halves alone; "torch_topk" is torch.topk and logsumexp in a graph of
the same kind; "eager" and "reference" are host time from call to completion, which on a virtual
machine varied twofold between runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from toolkit.ddtree import tree
from toolkit.ddtree.kernels import topk, tree_builder
from toolkit.ddtree.tree import BatchLimits, DraftTrees
from toolkit.ddtree.types import TreeLimits

SLOTS = 7
NEAR = 1e-5
L2_BYTES = 96 * 2**20

Path_ = tuple[int, ...]


def load_reference(checkout: Path) -> Callable[[Tensor, int], Any]:
    """The public tree builder; the modules of its models and logging, unused here, are empty."""
    for name, attributes in {
        "loguru": ["logger"],
        "model": ["DFlashDraftModel", "sample", "extract_context_feature"],
    }.items():
        module = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, object)
        sys.modules[name] = module
    sys.path.insert(0, str(checkout))
    import ddtree

    return ddtree.build_ddtree_tree


def draw_logits(sets: int, requests: int, vocabulary: int, device: str) -> Tensor:
    """Float32 logits [sets, R, S, V]: a Zipf-like head over noise, about as peaked as a drafter's."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (sets, requests, SLOTS, vocabulary)
    logits = torch.randn(shape, device=device, generator=generator)
    head = min(4096, vocabulary)
    ranks = torch.arange(1, head + 1, device=device, dtype=torch.float32)
    noise = torch.randn((*shape[:-1], head), device=device, generator=generator)
    places = torch.rand(shape, device=device, generator=generator).topk(head, dim=-1).indices
    return logits.scatter_(-1, places, 14 - 1.7 * ranks.log() + 0.5 * noise)


def build(
    logits: Tensor, roots: Tensor, limits: BatchLimits, budget: int, ranks: int
) -> tuple[DraftTrees, tree_builder.TreeLinks, Tensor, Tensor]:
    logprobs, tokens = topk.topk_logprobs(logits, ranks)
    trees, links = tree_builder.build_trees(logprobs, tokens, roots, limits, budget)
    return trees, links, logprobs, tokens


def paths(tokens: list[int], parents: list[int]) -> list[Path_]:
    """The token path of every node, root excluded; entry 0 of `parents` is the root's."""
    found: list[Path_] = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def check_plain(
    result: tuple[DraftTrees, tree_builder.TreeLinks, Tensor, Tensor], budget: int, cap: int
) -> None:
    """The kernels' trees are the plain reference's, bit for bit."""
    trees, links, logprobs, tokens = result
    limits = BatchLimits.of([TreeLimits(budget, cap)] * tokens.shape[0])
    expected = tree.build_trees(logprobs, tokens, trees.tokens[:, 0], limits, budget)
    for name in ("tokens", "parents", "depths", "ranks", "scores", "valid", "counts"):
        if not torch.equal(getattr(trees, name), getattr(expected, name)):
            raise SystemExit(f"budget {budget} cap {cap}: {name} differ from the plain reference")
    if not torch.equal(links.ancestors, tree_builder.tree_links(expected).ancestors):
        raise SystemExit(f"budget {budget} cap {cap}: ancestors differ from the plain reference")


def check_public(
    trees: DraftTrees, logits: Tensor, budget: int, reference: Callable[[Tensor, int], Any]
) -> int:
    """Compare with the public implementation; gives the number of prefixes that only near-ties tell apart."""
    near = 0
    logprobs = torch.log_softmax(logits.double(), -1)
    for row in range(logits.shape[0]):
        tokens, _, parents, _, visibility, _ = reference(logits[row], budget)
        count = int(trees.counts[row])
        own = paths(trees.tokens[row, 1 : count + 1].tolist(), trees.parents[row, : count + 1].tolist())
        theirs = paths(tokens.tolist(), parents)
        if len(own) != len(theirs) or int(visibility.sum()) != 1 + sum(len(path) + 1 for path in theirs):
            raise SystemExit(f"budget {budget}: {len(own)} nodes against {len(theirs)}")
        last = float(trees.scores[row, count])
        for path in set(own) ^ set(theirs):
            score = sum(logprobs[row, depth, token].item() for depth, token in enumerate(path))
            if abs(score - last) > NEAR:
                raise SystemExit(f"budget {budget}: prefix {path} of score {score} is in one tree only")
            near += 1
    return near // 2


def median_us(run: Callable[[], object], repeats: int) -> float:
    """Host time from call to completion, microseconds."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def replay_us(run: Callable[[int], object], sets: int, repeats: int) -> float:
    """Device time of one call in a CUDA graph of one call an input set, microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            run(index)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)


def measure(
    requests: int,
    budget: int,
    cap: int,
    vocabulary: int,
    repeats: int,
    reference: Callable[[Tensor, int], Any],
) -> dict[str, Any]:
    sets = max(2, -(-L2_BYTES // (requests * SLOTS * vocabulary * 4)))
    logits = draw_logits(sets, requests, vocabulary, "cuda")
    roots = torch.arange(requests, device="cuda")
    limits = BatchLimits.of([TreeLimits(budget, cap)] * requests, "cuda")

    def run(index: int) -> tuple[DraftTrees, tree_builder.TreeLinks, Tensor, Tensor]:
        return build(logits[index], roots, limits, budget, cap)

    result = run(0)
    check_plain(result, budget, cap)
    case: dict[str, Any] = {"requests": requests, "budget": budget, "cap": cap}
    if cap == budget:
        case["near_ties"] = check_public(result[0], logits[0], budget, reference)
    logprobs, tokens = result[2:]
    case["replay_us"] = replay_us(run, sets, repeats)
    case["topk_us"] = replay_us(lambda index: topk.topk_logprobs(logits[index], cap), sets, repeats)
    case["tree_us"] = replay_us(
        lambda _: tree_builder.build_trees(logprobs, tokens, roots, limits, budget), sets, repeats
    )
    case["eager_us"] = median_us(lambda: run(0), repeats)
    case["torch_topk_us"] = replay_us(
        lambda index: (torch.topk(logits[index], cap), torch.logsumexp(logits[index], -1)), sets, repeats
    )
    case["reference_us"] = median_us(
        lambda: [reference(logits[0, row], budget) for row in range(requests)], max(10, repeats // requests)
    )
    case["reference_over_replay"] = case["reference_us"] / case["replay_us"]
    case["reference_over_eager"] = case["reference_us"] / case["eager_us"]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in case.items()}


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True, help="checkout of the public implementation")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocabulary", type=int, default=163_840)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    reference = load_reference(arguments.reference)
    results = []
    for requests in arguments.requests:
        for budget in arguments.budgets:
            for cap in sorted({8, budget}):
                case = measure(requests, budget, cap, arguments.vocabulary, arguments.repeats, reference)
                print(json.dumps(case), flush=True)
                results.append(case)
    report = {
        "benchmark": "tree_builder",
        "machine": machine(),
        "vocabulary": arguments.vocabulary,
        "slots": SLOTS,
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
