"""What a DDTREE step costs beside a DFLASH step that does equal work, on one GPU.

    python benchmarks/sglang_overhead.py --out benchmarks/sglang_h200_overhead.json

A target of the shape of a 7B model and a drafter of five such layers, both with dummy weights, so tokens mean
nothing: every step commits the same number of tokens. DFLASH is forced by SGLang's own
SGLANG_SIMULATE_ACC_LEN, DDTREE by sglang_forced.py, over rows that are no chain, so that K/V rows are moved.
Both verify 8 rows a request (block 8; budget 7). A step's time is the difference of a long and a short
decoding of the same prompts over the difference of their steps; modes take turns, and medians are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import Child, Mode, parsed, settings, stop
from benchmarks.sglang_modes import levels, machine

COMMIT, BLOCK, PROMPT = 4, 8, 512
SHORT, LONG = 21, 277  # tokens: the first is the prefill's, the rest whole steps
SHAPE: dict[str, Any] = {
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 4096, "model_type": "qwen3", "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target, drafter = checkpoints(folder)
        prompts = [
            [(7 * place + 131 * request) % 400 + 1 for place in range(PROMPT)] for request in range(16)
        ]
        defaults = {
            "model_path": str(target), "speculative_draft_model_path": str(drafter), "load_format": "dummy",
            "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "triton",
            "sampling_backend": "pytorch", "grammar_backend": "none",
            "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 16,
            "max_running_requests": 16, "mem_fraction_static": 0.8,
            "max_total_tokens": 16384, "context_length": 2048, "random_seed": 1, "disable_radix_cache": True,
            "log_level": "warning", "sleep_on_idle": True, **settings(args.set),
        }  # fmt: skip
        children = {
            name: Child(name, mode, defaults, prompts, folder, args.logs) for name, mode in modes().items()
        }
        try:
            for child in children.values():
                child.wait("ready")
            result = measure(children, args)
            print(json.dumps(result), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        finally:
            stop(children.values())


def modes() -> dict[str, Mode]:
    simulated = {"SGLANG_SIMULATE_ACC_LEN": str(COMMIT), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
    forced = {"DDTREE_FORCED_COMMIT": str(COMMIT)}
    tree, plugins = {"speculative_algorithm": "DDTREE"}, ("ddtree", "ddtree_forced")
    return {
        "DFLASH": Mode({"speculative_algorithm": "DFLASH"}, environment=simulated),
        "DDTREE 7 cap 8": Mode(tree, {"budget": 7, "topk_cap": 8}, plugins, forced),
        "DDTREE 32 cap 8": Mode(tree, {"budget": 32, "topk_cap": 8}, plugins, forced),
    }


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """Configurations of a target and its drafter; the weights are dummies."""
    target = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 32}
    drafter = SHAPE | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "block_size": BLOCK,
        "num_target_layers": 32,
        "dflash_config": {"mask_token_id": 151935, "target_layer_ids": [1, 8, 15, 22, 29]},
    }
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "target", folder / "drafter"


def measure(children: dict[str, Child], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step of each mode and level, and the trees' over DFLASH's."""
    turns: dict[str, dict[int, list[float]]] = {
        name: {level: [] for level in args.levels} for name in children
    }
    for turn in range(args.repeats + 1):
        for level, (name, child) in product(args.levels, children.items()):
            short, long = (
                child.decode(level=level, tokens=tokens, requests=level) for tokens in (SHORT, LONG)
            )
            steps = (long["verify_steps"] - short["verify_steps"]) / level
            expected = (LONG - SHORT) / COMMIT
            if abs(steps - expected) > 1:  # a step may be under way when a request ends
                raise SystemExit(f"{name}: {steps} steps for {LONG - SHORT} tokens, not {expected}")
            if turn:
                turns[name][level].append((long["seconds"] - short["seconds"]) / steps * 1e3)
        print(f"turn {turn} done", flush=True)
    medians = {
        name: {level: statistics.median(own) for level, own in levels_.items()}
        for name, levels_ in turns.items()
    }
    return {
        "machine": machine(),
        "commit": COMMIT,
        "block": BLOCK,
        "prompt": PROMPT,
        "milliseconds_a_step": {
            name: {str(level): round(value, 3) for level, value in own.items()}
            for name, own in medians.items()
        },
        "turns": {
            name: {str(level): [round(x, 3) for x in own] for level, own in levels_.items()}
            for name, levels_ in turns.items()
        },
        "over_dflash": {
            name: {str(level): round(value / medians["DFLASH"][level], 3) for level, value in own.items()}
            for name, own in medians.items()
            if name != "DFLASH"
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--levels", type=levels, default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=5)
    return parsed(parser)


if __name__ == "__main__":
    main()
