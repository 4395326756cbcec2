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
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "toolkit/acceptance/prompts/python.jsonl"
LINEAR = ("DFLASH", "DFLASH without plugin", "DFLASH with plugin", "DDTREE 7 cap 1")
SYNC_CHECK = "synchronisations"


@dataclass(frozen=True)
class Mode:
    """One engine: SGLang's arguments, the tree's, and whether the plugin is installed."""

    arguments: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] | None = None
    plugin: bool = False
    sync_check: bool = False


def modes(drafter: Path, suite: str) -> dict[str, Mode]:
    draft = {"speculative_draft_model_path": str(drafter)}
    chain = {**draft, "speculative_algorithm": "DFLASH"}
    tree = {**draft, "speculative_algorithm": "DDTREE"}
    eager = {"cuda_graph_backend_decode": "disabled"}
    serial = {"disable_overlap_schedule": True}

    def limits(budget: int, cap: int, **more: str) -> dict[str, Any]:
        return {"budget": budget, "topk_cap": cap, **more}

    if suite == "small":
        return {
            "plain": Mode(),
            "DFLASH without plugin": Mode(chain),
            "DFLASH with plugin": Mode(chain, plugin=True),
            "DDTREE 7 cap 1": Mode(tree, limits(7, 1), plugin=True),
            "DDTREE 16 cap 8": Mode(tree, limits(16, 8), plugin=True),
            "DDTREE 32 cap 8": Mode(tree, limits(32, 8), plugin=True),
            "DDTREE 32 cap 8 without graphs": Mode({**tree, **eager}, limits(32, 8), plugin=True),
            SYNC_CHECK: Mode(tree, limits(32, 8), plugin=True, sync_check=True),
        }
    return {
        "plain": Mode(),
        "DFLASH": Mode(chain, plugin=True),
        "DDTREE 7 cap 1": Mode(tree, limits(7, 1), plugin=True),
        "DDTREE 16 cap 8": Mode(tree, limits(16, 8), plugin=True),
        "DDTREE 32 cap 8": Mode(tree, limits(32, 8), plugin=True),
        "DDTREE 64 cap 8": Mode(tree, limits(64, 8), plugin=True),
        "DDTREE 32 cap 8 transition": Mode(tree, limits(32, 8, expansion="transition"), plugin=True),
        "plain without overlap": Mode(serial),
        "DFLASH without overlap": Mode({**chain, **serial}, plugin=True),
        "DDTREE 32 cap 8 without overlap": Mode({**tree, **serial}, limits(32, 8), plugin=True),
        "DFLASH without graphs": Mode({**chain, **eager}, plugin=True),
        "DDTREE 32 cap 8 without graphs": Mode({**tree, **eager}, limits(32, 8), plugin=True),
        SYNC_CHECK: Mode(tree, limits(32, 8), plugin=True, sync_check=True),
    }


def main() -> None:
    sys.path.insert(0, str(ROOT))  # the judge needs the package, also where it is not installed
    args = parse()
    if args.child:
        serve(args)
        return
    prompts = read_prompts(args)
    every = modes(args.drafter, args.suite)
    chosen = {name: mode for name, mode in every.items() if args.only in name}
    with tempfile.TemporaryDirectory() as scratch:
        install(Path(scratch))
        children = {name: Child(name, mode, Path(scratch), args) for name, mode in chosen.items()}
        try:
            for child in children.values():
                child.wait("ready")
            results = measure(children, args)
        finally:
            for child in children.values():
                child.stop()
    report(args, prompts, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    bundled = ROOT / "toolkit/ddtree/bundled"
    parser.add_argument("--target", type=Path, default=bundled / "target")
    parser.add_argument("--drafter", type=Path, default=bundled / "drafter")
    parser.add_argument("--suite", choices=["small", "large"], default="small")
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
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


def install(folder: Path) -> None:
    """Make the plugin's entry points visible to a Python that has `folder` on its path."""
    for name, entries in (
        ("plugin", "ddtree = toolkit.ddtree.sglang.plugin:register"),
        ("check", "ddtree_sync_check = sglang_sync_check:register"),
    ):
        info = folder / name / f"{name}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entries}\n")


class Child:
    """One mode's process; it prints one JSON line when it is ready, and one with its results."""

    _port = 31000

    def __init__(self, name: str, mode: Mode, scratch: Path, args: argparse.Namespace) -> None:
        Child._port += 300
        self.name = name
        logs = args.logs or scratch
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name.replace(' ', '_')}.log"
        self.syncs = scratch / "syncs.txt"
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        paths += [str(scratch / "plugin")] if mode.plugin else []
        paths += [str(scratch / "check")] if mode.sync_check else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment["SGLANG_PLUGINS"] = "ddtree,ddtree_sync_check" if mode.plugin else "none"
        if mode.tree is not None:
            environment["SGLANG_DDTREE"] = json.dumps(mode.tree)
        if mode.sync_check:
            environment["DDTREE_SYNC_CHECK_FILE"] = str(self.syncs)
        order = {"port": Child._port, "arguments": mode.arguments}
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(order)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self.log.open("w", encoding="utf-8"),
        )  # fmt: skip

    def wait(self, word: str) -> dict[str, Any]:
        """The child's next JSON line of this kind; its log's end is shown if it dies."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"' + word):
                if word == "ready":
                    print(f"{self.name}: ready after {time.monotonic() - self.started:.0f} s", flush=True)
                value: dict[str, Any] = json.loads(line)[word]
                return value
        text = self.log.read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{self.name}: died\n{text[-3000:]}")

    def decode(self, **order: Any) -> dict[str, Any]:
        """Let it decode once, and give what it says."""
        if self.process.poll() is None and self.process.stdin is not None:
            print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.wait("result")

    def synchronisations(self) -> list[str]:
        """What the plugin of sglang_sync_check.py wrote."""
        return self.syncs.read_text(encoding="utf-8").splitlines() if self.syncs.exists() else []

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def serve(args: argparse.Namespace) -> None:
    """The child: start an engine, wait for the word, decode, tell."""
    order = json.loads(args.child)
    prompts = read_prompts(args)
    from sglang.srt.entrypoints.engine import Engine

    arguments = {
        "model_path": str(args.target), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": max(args.levels),
        "mem_fraction_static": 0.6, "max_total_tokens": 65536, "max_running_requests": max(args.levels),
        "context_length": 2048, "random_seed": 1, "disable_radix_cache": True, "log_level": "warning",
        "sleep_on_idle": True,
        "port": order["port"], "nccl_port": order["port"] + 50,
        **{key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)},
        **order["arguments"],
    }  # fmt: skip
    engine = Engine(**arguments)
    plugins = sorted(entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"))
    print(json.dumps({"ready": {"plugins": plugins}}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"result": decode(engine, prompts, args.tokens, **json.loads(line))}), flush=True)
    engine.shutdown()


def decode(
    engine: Any, prompts: list[list[int]], tokens: int, level: int, temperature: float, **more: float
) -> dict[str, Any]:
    """Decode some prompts, `level` at a time."""
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, **more}
    taken = prompts[: max(4, level if level > 4 else 2 * level)]
    answers: list[dict[str, Any]] = []
    started = time.perf_counter()
    for first in range(0, len(taken), level):
        answers += engine.generate(input_ids=taken[first : first + level], sampling_params=sampling)
    seconds = time.perf_counter() - started
    return {
        "outputs": [x["output_ids"] for x in answers],
        "verify_steps": sum(x["meta_info"].get("spec_verify_ct") or 0 for x in answers),
        "tokens_per_second": sum(len(x["output_ids"]) for x in answers) / seconds,
    }


def measure(children: dict[str, Child], args: argparse.Namespace) -> dict[str, Any]:
    """Turns of all modes: one to warm up, then `repeats` that count; and one at temperature 1."""
    timed = {name: child for name, child in children.items() if name != SYNC_CHECK}
    results: dict[str, Any] = {name: {} for name in timed}
    for turn in range(args.repeats + 1):
        for level, (name, child) in product(args.levels, timed.items()):
            told = child.decode(level=level, temperature=0)
            own = results[name].setdefault(str(level), {"turns": []})
            own |= summary(told) | {"outputs": told["outputs"]}
            if turn:
                own["turns"].append(round(told["tokens_per_second"], 1))
                own["tokens_per_second"] = round(statistics.median(own["turns"]), 1)
        print(f"turn {turn} done", flush=True)
    for name, child in timed.items():
        if "without" not in name and 16 in args.levels:
            results[name]["16 at temperature 1"] = summary(child.decode(level=16, temperature=1.0))
    if SYNC_CHECK in children:
        results[SYNC_CHECK] = watched(children[SYNC_CHECK], args.repeats)
    if args.logs:  # should the rest fail
        (args.logs / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return results


def watched(child: Child, turns: int) -> dict[str, Any]:
    """Where a decode step waited for the device, greedy and sampled, with penalties and without."""
    for turn in range(turns + 1):
        more = {"frequency_penalty": 0.5, "repetition_penalty": 1.2} if turn % 2 else {}
        child.decode(level=4, temperature=float(turn > 1), **more)
    return {"synchronisations": child.synchronisations()}


def summary(told: dict[str, Any]) -> dict[str, Any]:
    outputs, steps = told["outputs"], told["verify_steps"]
    tokens = sum(map(len, outputs))
    pairs = [pair for output in outputs for pair in pairwise(output)]
    return {
        "verify_steps": steps,
        "acceptance_length": round((tokens - len(outputs)) / steps, 3) if steps else None,
        "distinct_bigrams": round(len(set(pairs)) / len(pairs), 3),
    }


class Judge:
    """Tells whether greedy outputs are those of plain decoding, by a float32 forward of the target."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from safetensors.torch import load_file

        from toolkit.ddtree.models.config import read_target_config

        self.config = read_target_config(args.target)
        weights = load_file(args.target / "model.safetensors")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weights = {name: value.to(self.device, torch.float32) for name, value in weights.items()}

    def differences(self, prompt: list[int], output: list[int]) -> tuple[int, int]:
        """Positions where the output is not the target's choice, and those of them that are no near-ties."""
        import torch

        from toolkit.ddtree.models.reference import target_forward

        with torch.inference_mode(), torch.device(self.device):
            logits, _ = target_forward(self.config, self.weights, [*prompt, *output])
            rows = logits[len(prompt) - 1 : -1]
            best = rows.max(-1).values
            gaps = best - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        deltas = torch.exp2(torch.floor(torch.log2(best.abs().clamp(min=1e-6))) - 5)
        return int((gaps > 0).sum()), int((gaps > deltas).sum())

    def verdict(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
        """Judge outputs: positions, near-ties, wrong tokens, and whether they count as lossless."""
        found = [self.differences(prompt, output) for prompt, output in zip(prompts, outputs, strict=False)]
        positions = sum(map(len, outputs))
        near, wrong = sum(near for near, _ in found), sum(wrong for _, wrong in found)
        return {
            "positions": positions,
            "near_ties": near - wrong,
            "wrong": wrong,
            "lossless": wrong == 0 and near <= math.ceil(positions / 100),
        }


def report(args: argparse.Namespace, prompts: list[list[int]], results: dict[str, Any]) -> None:
    judge = Judge(args)
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
        "judge_fails_one_replaced_token": judge_fails(judge, prompts, results),
        "plugin_changes_dflash": plugin_changes(results),
        "over_fastest_lossless_linear": gains(results, args.levels),
        "modes": {name: without_outputs(result) for name, result in results.items()},
    }
    print(json.dumps({key: value for key, value in result.items() if key != "modes"}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def judge_fails(judge: Judge, prompts: list[list[int]], results: dict[str, Any]) -> bool | None:
    """Whether the judge sees one replaced token; None without an output to replace it in."""
    outputs = [own["outputs"][0] for x in results.values() for own in x.values() if "outputs" in own]
    if not outputs:
        return None
    output = list(outputs[0])
    output[len(output) // 2] = (output[len(output) // 2] + 1) % judge.config.vocab_size
    return not judge.verdict(prompts[:1], [output])["lossless"]


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
