"""Where the time of a decode step of few requests goes: DFLASH beside DDTREE, on one GPU.

    python benchmarks/sglang_profile.py --logs logs --target DIR/target --drafter DIR/drafter \
        --token-prompts DIR/prompts.json --level 4

Writes logs/NAME.profile.txt, 300 steps of the scheduler's thread by cProfile, and logs/NAME.kernels.txt, 40
steps by torch's profiler. Profiling slows calls down, so the figures tell where to look, not how long a step
takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_engines import CPU_ARGUMENTS, ON_CPU, Child, Mode, pair_parser, parsed, settings, stop
from benchmarks.sglang_modes import read_prompts
from benchmarks.sglang_profiled import DEVICE, HOST, LAST

TOKENS = 1900  # enough for nearly 400 steps of five tokens


def main() -> None:
    args = parse()
    if args.cpu:
        os.environ[ON_CPU] = "1"
    args.prompts = args.level
    prompts = read_prompts(args)[: args.level]
    defaults = {
        "model_path": str(args.target), "speculative_draft_model_path": str(args.drafter),
        "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "triton",
        "sampling_backend": "pytorch", "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 4, "max_running_requests": 4,
        "mem_fraction_static": 0.6, "max_total_tokens": 16384, "context_length": 2048, "random_seed": 1,
        "disable_radix_cache": True, "log_level": "warning",
        **(CPU_ARGUMENTS | {"dtype": "float32"} if args.cpu else {}), **settings(args.set),
    }  # fmt: skip
    plugins = ("ddtree", "profiled")
    tree = {"speculative_algorithm": "DDTREE"}
    modes = {
        "DFLASH": Mode({"speculative_algorithm": "DFLASH"}, plugins=plugins),
        "DDTREE 7 cap 1": Mode(tree, {"budget": 7, "topk_cap": 1}, plugins),
        "DDTREE 32 cap 8": Mode(tree, {"budget": 32, "topk_cap": 8, "expansion": args.expansion}, plugins),
    }
    if args.cpu:  # where DFLASH does not run
        del modes["DFLASH"]
    with tempfile.TemporaryDirectory() as scratch:
        children = {
            name: Child(name, mode, defaults, prompts, Path(scratch), args.logs)
            for name, mode in modes.items()
        }
        try:
            for name, child in children.items():
                child.wait("ready")
                steps = 0
                while steps < LAST + 5:
                    steps += child.decode(level=args.level, tokens=args.tokens, requests=args.level)[
                        "verify_steps"
                    ]
                for told in (HOST, DEVICE):
                    shutil.copy(child.folder / told, args.logs / f"{name.replace(' ', '_')}.{told}")
        finally:
            stop(children.values())


def parse() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each decoding")
    parser.add_argument("--level", type=int, default=1, help="requests at a time")
    parser.add_argument("--token-prompts", type=Path, help="JSON list of prompts as token ids")
    parser.add_argument("--expansion", default="best_first", help="of budget 32")
    parser.add_argument("--cpu", action="store_true", help="in the environment of scripts/sglang_env.sh")
    return parsed(parser)


if __name__ == "__main__":
    main()
