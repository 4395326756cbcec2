"""Plain decoding, DFLASH and DDTREE in stock SGLang on one GPU: speed, acceptance, lossless or not.

    python benchmarks/sglang_modes.py --out benchmarks/sglang_h200.json
    python benchmarks/sglang_modes.py --suite large --target DIR/target --drafter DIR/drafter \
        --token-prompts DIR/prompts.json --levels 1,4,16,64 --out benchmarks/sglang_h200_large.json

Each mode is an engine in processes of its own, with CUDA graphs and overlap scheduling unless its name says
otherwise. All start at once and then wait; they take turns on the same GPU, one mode at a time, and a speed
is the median of its turns. Greedy outputs are judged by a float32 forward of the target over prompt and
output: a token that is not its choice passes only as a near-tie, within delta = 2^(floor(log2 |z|) - 5) of
its greatest logit z, and at no more than 1% of positions. The judge has to fail an output with one token
replaced. Gains are told over the fastest linear run (DFLASH, or DDTREE 7 cap 1) that the judge passes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import ROOT, Child, pair_parser, settings, stop
from benchmarks.sglang_judge import Judge
from benchmarks.sglang_suites import LINEAR, SUITES, SYNC_CHECK, modes

PROMPTS = ROOT / "toolkit/acceptance/prompts/python.jsonl"


def main() -> None:
    args = parse()
    prompts = read_prompts(args)
    args.prompts = len(prompts)
    most = max(args.levels)
    defaults = {
        "model_path": str(args.target), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": most,
        "mem_fraction_static": 0.6, "max_total_tokens": 65536, "max_running_requests": most,
        "context_length": 2048, "random_seed": 1, "disable_radix_cache": True, "log_level": "warning",
        "sleep_on_idle": True,
        **settings(args.set),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        children = {
            name: Child(name, mode, defaults, prompts, Path(scratch), args.logs or Path(scratch) / "logs")
            for name, mode in modes(args.drafter, args.suite).items()
            if args.only in name
        }
        try:
            for child in children.values():
                child.wait("ready")
            results = measure(children, args)
        finally:
            stop(children.values())
    report(args, prompts, results)


def parse() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="small")
    parser.add_argument("--levels", type=levels, default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--token-prompts", type=Path, help="JSON list of prompts as token ids")
    parser.add_argument("--pair", type=Path, help="record of how the pair was trained, to keep")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="measure modes whose names contain this")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="engine argument")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def levels(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
    if getattr(args, "token_prompts", None) is not None:
        own: list[list[int]] = json.loads(args.token_prompts.read_text(encoding="utf-8"))
        return own
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: args.prompts]
    return [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]


def measure(children: dict[str, Child], args: argparse.Namespace) -> dict[str, Any]:
    """Turns of all modes: one to warm up, then `repeats` that count; and one at temperature 1."""
    timed = {name: child for name, child in children.items() if name != SYNC_CHECK}
    results: dict[str, Any] = {name: {} for name in timed}
    for turn in range(args.repeats + 1):
        for level, (name, child) in product(args.levels, timed.items()):
            told = child.decode(**share(level, args))
            own = results[name].setdefault(str(level), {"turns": []})
            own |= summary(told) | {"outputs": told["outputs"]}
            if turn:
                own["turns"].append(round(sum(map(len, told["outputs"])) / told["seconds"], 1))
                own["tokens_per_second"] = round(statistics.median(own["turns"]), 1)
        print(f"turn {turn} done", flush=True)
    for name, child in timed.items():
        if "without" not in name and 16 in args.levels:
            results[name]["16 at temperature 1"] = summary(child.decode(**share(16, args), temperature=1.0))
    if SYNC_CHECK in children:
        results[SYNC_CHECK] = watched(children[SYNC_CHECK], args)
    if args.logs:  # should the rest fail
        (args.logs / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return results


def share(level: int, args: argparse.Namespace) -> dict[str, int]:
    """How many prompts a level decodes, and how far."""
    requests = max(4, level if level > 4 else 2 * level)
    return {"level": level, "tokens": args.tokens, "requests": min(requests, args.prompts)}


def watched(child: Child, args: argparse.Namespace) -> dict[str, Any]:
    """Where a decode step waited for the device, greedy and sampled, with penalties and without."""
    for turn in range(args.repeats + 1):
        more = {"frequency_penalty": 0.5, "repetition_penalty": 1.2} if turn % 2 else {}
        child.decode(**share(4, args), temperature=float(turn > 1), **more)
    path = child.folder / "syncs.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {"synchronisations": lines}


def summary(told: dict[str, Any]) -> dict[str, Any]:
    outputs, steps = told["outputs"], told["verify_steps"]
    tokens = sum(map(len, outputs))
    pairs = [pair for output in outputs for pair in pairwise(output)]
    return {
        "verify_steps": steps,
        "acceptance_length": round((tokens - len(outputs)) / steps, 3) if steps else None,
        "distinct_bigrams": round(len(set(pairs)) / len(pairs), 3),
    }


def report(args: argparse.Namespace, prompts: list[list[int]], results: dict[str, Any]) -> None:
    judge = Judge(args.target)
    plain = results.get("plain", {})
    for name, result in results.items():
        for level in map(str, args.levels):
            if level not in result:
                continue
            outputs = result[level]["outputs"]
            result[level].update(judge.verdict(prompts, outputs))
            expected = plain.get(level, {}).get("outputs", [])
            equal = sum(a == b for a, b in zip(outputs, expected, strict=False))
            result[level]["same_as_plain"] = f"{equal} of {len(outputs)}"
            told = {key: value for key, value in result[level].items() if key != "outputs"}
            print(f"{name} | {level} | {json.dumps(told)}")
        if "synchronisations" in result:
            print(f"{name}: {json.dumps(result['synchronisations'])}")
    result = {
        "machine": machine(),
        "pair": json.loads(args.pair.read_text(encoding="utf-8")) if args.pair else "bundled",
        "new_tokens": args.tokens,
        "judge_fails_one_replaced_token": judge.fails_one_replaced_token(
            prompts[0], next(iter(results.values()))[str(args.levels[0])]["outputs"][0]
        ),
        "plugin_changes_dflash": plugin_changes(results),
        "over_fastest_lossless_linear": gains(results, args.levels),
        "modes": {name: without_outputs(result) for name, result in results.items()},
    }
    print(json.dumps({key: value for key, value in result.items() if key != "modes"}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def plugin_changes(results: dict[str, Any]) -> dict[str, Any] | None:
    """What differs between DFLASH with the plugin and without it."""
    without, with_it = (results.get(f"DFLASH {word} plugin", {}) for word in ("without", "with"))
    if not without or not with_it:
        return None
    return {
        level: {
            key: [without[level][key], with_it[level][key]]
            for key in ("verify_steps", "outputs")
            if without[level][key] != with_it[level][key]
        }
        for level in without
        if "outputs" in without[level]
    }


def gains(results: dict[str, Any], levels: list[int]) -> dict[str, Any]:
    """Speed over that of the fastest linear run which is lossless, for each level and lossless mode."""
    told: dict[str, Any] = {}
    for level in map(str, levels):
        passed = {name: own[level] for name, own in results.items() if own.get(level, {}).get("lossless")}
        linear = {name: own["tokens_per_second"] for name, own in passed.items() if name in LINEAR}
        if linear:
            base = max(linear, key=lambda name: linear[name])
            over = {
                name: round(own["tokens_per_second"] / linear[base], 3)
                for name, own in passed.items()
                if name not in LINEAR
            }
            told[level] = {"fastest": base, **over}
    return told


def without_outputs(result: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {name: entry for name, entry in value.items() if name != "outputs"}
        if isinstance(value, dict)
        else value
        for key, value in result.items()
    }


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    packages = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton")}
    return {"gpu": gpu, "python": platform.python_version(), **packages}


if __name__ == "__main__":
    main()
