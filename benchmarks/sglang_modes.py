"""Plain decoding, DFLASH and DDTREE in stock SGLang on one GPU: speed, acceptance, lossless or not.

    python benchmarks/sglang_modes.py --out benchmarks/sglang_h200.json

Each mode is an engine in processes of its own, with CUDA graphs and overlap scheduling unless its name says
otherwise. All start at once and then wait; they are measured one after the other on the same GPU. Greedy
outputs are judged by a float32 forward of the target over prompt and output: a token that is not its choice
passes only as a near-tie, within delta = 2^(floor(log2 |z|) - 5) of its greatest logit z, and at no more than
1% of positions. The judge has to fail an output with one token replaced.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "toolkit/acceptance/prompts/python.jsonl"
LEVELS = (1, 4, 16)
SYNC_CHECK = "synchronisations"


@dataclass(frozen=True)
class Mode:
    """One engine: SGLang's arguments, the tree's, and whether the plugin is installed."""

    arguments: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] | None = None
    plugin: bool = False
    sync_check: bool = False


def modes(drafter: Path) -> dict[str, Mode]:
    draft = {"speculative_draft_model_path": str(drafter)}
    chain = {**draft, "speculative_algorithm": "DFLASH"}
    tree = {**draft, "speculative_algorithm": "DDTREE"}
    eager = {"cuda_graph_backend_decode": "disabled"}

    def limits(budget: int, cap: int) -> dict[str, int]:
        return {"budget": budget, "topk_cap": cap}

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


def main() -> None:
    sys.path.insert(0, str(ROOT))  # the judge needs the package, also where it is not installed
    args = parse()
    if args.child:
        serve(args)
        return
    prompts = read_prompts(args)
    chosen = {name: mode for name, mode in modes(args.drafter).items() if args.only in name}
    with tempfile.TemporaryDirectory() as scratch:
        install(Path(scratch))
        children = {name: Child(name, mode, Path(scratch), args) for name, mode in chosen.items()}
        try:
            for child in children.values():
                child.wait("ready")
            results = {}
            for name, child in children.items():
                results[name] = child.measure()
                keep(args, results)
        finally:
            for child in children.values():
                child.stop()
    report(args, prompts, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    bundled = ROOT / "toolkit/ddtree/bundled"
    parser.add_argument("--target", type=Path, default=bundled / "target")
    parser.add_argument("--drafter", type=Path, default=bundled / "drafter")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="measure modes whose names contain this")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="engine argument")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
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
        order = {
            "mode": name,
            "port": Child._port,
            "arguments": mode.arguments,
            "sync_check": mode.sync_check,
        }
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
                print(f"{self.name}: {word} after {time.monotonic() - self.started:.0f} s", flush=True)
                value: dict[str, Any] = json.loads(line)[word]
                return value
        print(f"{self.name}: died\n" + self.log.read_text(encoding="utf-8", errors="replace")[-3000:])
        return {"error": "died"}

    def measure(self) -> dict[str, Any]:
        """Let it decode, end it, and give its results."""
        if self.process.poll() is None and self.process.stdin is not None:
            print("go", file=self.process.stdin, flush=True)
        result = self.wait("result")
        if self.syncs.exists() and self.name == SYNC_CHECK:
            result["synchronisations"] = self.syncs.read_text(encoding="utf-8").splitlines()
        self.stop()
        return result

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
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": max(LEVELS),
        "mem_fraction_static": 0.6, "max_total_tokens": 65536, "max_running_requests": max(LEVELS),
        "context_length": 2048, "random_seed": 1, "disable_radix_cache": True, "log_level": "warning",
        "sleep_on_idle": True,
        "port": order["port"], "nccl_port": order["port"] + 50,
        **{key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)},
        **order["arguments"],
    }  # fmt: skip
    engine = Engine(**arguments)
    plugins = sorted(entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"))
    print(json.dumps({"ready": {}}), flush=True)
    sys.stdin.readline()
    levels = [4] if order["sync_check"] else LEVELS
    result: dict[str, Any] = {"plugins": plugins}
    for level in levels:
        result[str(level)] = decode(engine, prompts, level, args)
    print(json.dumps({"result": result}), flush=True)
    engine.shutdown()


def decode(engine: Any, prompts: list[list[int]], level: int, args: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts, `level` at a time; once to warm up, then measured."""
    sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    taken = prompts[: max(4, level if level > 4 else 2 * level)]
    speeds = []
    for _ in range(args.repeats + 1):
        outputs: list[dict[str, Any]] = []
        started = time.perf_counter()
        for first in range(0, len(taken), level):
            outputs += engine.generate(input_ids=taken[first : first + level], sampling_params=sampling)
        speeds.append(sum(len(x["output_ids"]) for x in outputs) / (time.perf_counter() - started))
    meta = [x["meta_info"] for x in outputs]
    steps = sum(x.get("spec_verify_ct") or 0 for x in meta)
    tokens = sum(len(x["output_ids"]) for x in outputs)
    return {
        "outputs": [x["output_ids"] for x in outputs],
        "tokens_per_second": round(statistics.median(speeds[1:]), 1),
        "verify_steps": steps,
        "acceptance_length": round((tokens - len(outputs)) / steps, 3) if steps else None,
    }


class Judge:
    """Tells whether greedy outputs are those of plain decoding, by a float32 forward of the target."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from safetensors.torch import load_file

        from toolkit.ddtree.models.config import read_target_config

        self.config = read_target_config(args.target)
        weights = load_file(args.target / "model.safetensors")
        self.weights = {name: value.to(torch.float32) for name, value in weights.items()}

    def differences(self, prompt: list[int], output: list[int]) -> tuple[int, int]:
        """Positions where the output is not the target's choice, and those of them that are no near-ties."""
        import torch

        from toolkit.ddtree.models.reference import target_forward

        with torch.inference_mode():
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


def keep(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Keep what was measured so far, outputs included, should the rest fail."""
    if args.logs:
        (args.logs / "results.json").write_text(json.dumps(results), encoding="utf-8")


def report(args: argparse.Namespace, prompts: list[list[int]], results: dict[str, Any]) -> None:
    judge = Judge(args)
    plain = results.get("plain", {})
    for name, result in results.items():
        for level in map(str, LEVELS):
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
        "new_tokens": args.tokens,
        "judge_fails_one_replaced_token": judge_fails(judge, prompts, results),
        "plugin_changes_dflash": plugin_changes(results),
        "modes": {name: without_outputs(result) for name, result in results.items()},
    }
    print(json.dumps({key: value for key, value in result.items() if key != "modes"}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def judge_fails(judge: Judge, prompts: list[list[int]], results: dict[str, Any]) -> bool | None:
    """Whether the judge sees one replaced token; None without an output to replace it in."""
    outputs = [x["4"]["outputs"][0] for x in results.values() if "4" in x]
    if not outputs:
        return None
    output = list(outputs[0])
    output[len(output) // 2] = (output[len(output) // 2] + 1) % judge.config.vocab_size
    return not judge.verdict(prompts[:1], [output])["lossless"]


def plugin_changes(results: dict[str, Any]) -> dict[str, Any] | None:
    """What differs between DFLASH with the plugin and without it."""
    pair = [results.get(f"DFLASH {word} plugin", {}) for word in ("without", "with")]
    if not all("1" in result for result in pair):
        return None
    return {
        level: {
            key: [result[level][key] for result in pair]
            for key in ("verify_steps", "outputs")
            if pair[0][level][key] != pair[1][level][key]
        }
        for level in map(str, LEVELS)
    }


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
