"""Tokens a second of the embedded engine on a CPU, by decoding mode, beside transformers' cached `generate`.

    python benchmarks/embedded_engine.py --out benchmarks/embedded_engine.json

Every mode continues the same prompts, greedily, by the same number of tokens, one request at a time and then
all at once, with the same number of threads. The modes take turns within each repeat, and ratios are taken
within a repeat, so that a change of the machine's load meets all of them. "tokens_per_second" counts output
tokens over the whole time, prefill included; medians over the repeats. Greedy texts are compared with
those of plain decoding before anything is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import toolkit.ddtree  # noqa: F401  # isort: skip  # before torch: sets how its threads wait
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, Request, SamplingParams, TreeLimits

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "toolkit/acceptance/prompts/python.jsonl"
BUDGETS = (7, 8, 15, 16, 32, 64)
INFORMED_BUDGETS = (7, 8, 11, 15, 16, 32)  # of the policy transition
CONCURRENT = 8
OFF = TreeLimits(16, 8)  # where nothing grows trees

Texts = list[list[int]]
Decode = Callable[[Texts], Texts]


class EngineMode:
    """One engine, and what it accepted."""

    def __init__(self, args: argparse.Namespace, algorithm: Algorithm, limits: TreeLimits = OFF) -> None:
        self.engine = Engine(
            EngineConfig(
                model_path=args.target,
                draft_model_path=args.drafter,
                algorithm=algorithm,
                limits=limits,
                max_running_requests=CONCURRENT,
                prefix_cache_tokens=0,
                threads=args.threads,
            )
        )
        self.args = args

    def decode(self, prompts: Texts) -> Texts:
        """Continue all prompts in one batch."""
        sampling = SamplingParams(max_new_tokens=self.args.tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self.engine.add(Request(str(index), tuple(prompt), sampling))
        outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        while self.engine.has_work:
            for output in self.engine.step():
                outputs[output.rid] += output.token_ids
        return list(outputs.values())

    def acceptance_length(self) -> float | None:
        """Tokens a verify step, the bonus token included, since the engine started."""
        stats = self.engine.stats
        accepted = sum(count * rounds for count, rounds in enumerate(stats.accepted_histogram))
        return round(1 + accepted / stats.rounds, 3) if stats.rounds else None


class Transformers:
    """The target in transformers, with its K/V cache."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
        self.model.generation_config = GenerationConfig(
            do_sample=False, min_new_tokens=args.tokens, max_new_tokens=args.tokens, pad_token_id=0
        )

    @torch.inference_mode()
    def decode(self, prompts: Texts) -> Texts:
        """Continue all prompts in one batch, padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return self.model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    before = os.getloadavg()
    engines = {
        "plain": EngineMode(args, Algorithm.NONE),
        "DFLASH": EngineMode(args, Algorithm.DFLASH),
        **{f"DDTREE {n}": EngineMode(args, Algorithm.DDTREE, TreeLimits(n, 8)) for n in args.budgets},
        **{
            f"DDTREE transition {n}": EngineMode(
                args, Algorithm.DDTREE, TreeLimits(n, 8, Expansion.TRANSITION)
            )
            for n in args.informed_budgets
        },
    }
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:CONCURRENT]
    prompts = [engines["plain"].engine.encode(json.loads(line)["prompt"]) for line in lines]
    modes: dict[str, Decode] = {name: mode.decode for name, mode in engines.items()}
    modes["transformers"] = Transformers(args).decode

    texts = check(modes, prompts)
    result = {
        "machine": machine(args, before),
        "prompts": {"count": len(prompts), "tokens": [len(prompt) for prompt in prompts]},
        "new_tokens": args.tokens,
        "distinct_bigrams": distinct_bigrams(texts),
        "acceptance_length": {
            name: length for name, mode in engines.items() if (length := mode.acceptance_length()) is not None
        },
        "one_request": measure(modes, [[prompt] for prompt in prompts], args),
        "eight_requests": measure(modes, [prompts], args),
    }
    result["machine"]["load_after"] = os.getloadavg()
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, default=ROOT / "toolkit/ddtree/bundled/target")
    parser.add_argument("--drafter", type=Path, default=ROOT / "toolkit/ddtree/bundled/drafter")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS, help="of best-first trees")
    parser.add_argument(
        "--informed-budgets", type=int, nargs="*", default=INFORMED_BUDGETS, help="of the policy transition"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def check(modes: dict[str, Decode], prompts: Texts) -> Texts:
    """Decode once in every mode, which also warms up; every text must be that of plain decoding."""
    expected = [modes["plain"]([prompt])[0] for prompt in prompts]
    for name, decode in modes.items():
        texts = decode(prompts)
        if name == "transformers":  # batched otherwise: near-ties may fall otherwise
            same = sum(a == b for a, b in zip(texts, expected, strict=True))
            assert same >= len(expected) - 1, f"transformers agrees on {same} of {len(expected)} texts"
        else:
            assert texts == expected, name
    return expected


def measure(modes: dict[str, Decode], batches: list[Texts], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of every mode, and its ratio to plain decoding and to transformers."""
    count = args.tokens * sum(map(len, batches))
    rates: dict[str, list[float]] = {name: [] for name in modes}
    for repeat in range(args.repeats):
        names = list(modes)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            for batch in batches:
                modes[name](batch)
            rates[name].append(count / (time.perf_counter() - start))
    return {
        name: {
            "tokens_per_second": round(statistics.median(found), 1),
            "times_plain": ratio(found, rates["plain"]),
            "times_transformers": ratio(found, rates["transformers"]),
        }
        for name, found in rates.items()
    }


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median, lowest and highest ratio over the repeats."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(found), 3),
        "low": round(min(found), 3),
        "high": round(max(found), 3),
    }


def distinct_bigrams(texts: Texts) -> float:
    """Share of different adjacent token pairs: repetition flatters acceptance lengths."""
    pairs = [set(itertools.pairwise(text)) for text in texts]
    return round(sum(map(len, pairs)) / sum(len(text) - 1 for text in texts), 3)


def machine(args: argparse.Namespace, load: tuple[float, float, float]) -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0],
        "cores": len(os.sched_getaffinity(0)),
        "threads": args.threads,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_before": load,
    }


if __name__ == "__main__":
    main()
