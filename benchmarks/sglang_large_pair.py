"""Train a target of 173M parameters and its drafter, and write prompts for sglang_modes.py, on one GPU.

    python -m benchmarks.sglang_large_pair --out DIR [--target-seconds 200] [--drafter-seconds 120]

The text and the method are those of training/train_pair.py: Python files of this interpreter's packages and
standard library, held-out packages apart. Drafter and transition table see no row that shares 16 tokens in a
row with the prompts or with what the target writes after them. Writes DIR/target, DIR/drafter,
DIR/prompts.json (held-out windows, as token ids) and DIR/record.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from training import data, export
from training.drafting import BLOCK_SIZE, train_drafter
from training.generate import continue_rows
from training.modules import Target, rope_table
from training.overlap import known_grams
from training.run import Run
from training.train_pair import describe, keep_apart, prepare_text, token_loss, train_target

PROMPTS, PROMPT, NEW_TOKENS = 64, 192, 256
STRENGTH = 0.8  # of the transition table; where tuning put the bundled pair's


def main() -> None:
    run = Run(parse())
    torch.manual_seed(run.options.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True
    enlarge(run)
    folder: Path = run.options.out
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, tokens, corpus = prepare_text(run)
    export.save_target(folder / "target", train_target(run, tokens), tokenizer)
    target = export.load_target(folder / "target", run.device)
    layers = target.dims.layers
    capture = tuple(sorted({1, layers // 3, layers * 2 // 3, layers - 2}))

    prompt, new = (24, 16) if run.options.dry_run else (PROMPT, NEW_TOKENS)
    prompts = data.prompt_rows(tokenizer, corpus.held_out, PROMPTS, prompt, 1).to(run.device)
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()) + "\n")
    written = continuations(run, target, prompts, prompt + new)
    text = data.encode(tokenizer, corpus.held_out[:200]).long().to(run.device)
    windows = text[: len(text) // 513 * 513].view(-1, 513)[:256]
    table = rope_table(target.dims, run.device)
    with torch.inference_mode():
        losses = [token_loss(target, target(w[:, :-1], table)[0], w[:, 1:]).item() for w in windows.split(32)]
    run.record["target"] |= describe(target.dims, target) | {
        "held_out_loss": round(sum(losses) / len(losses), 4)
    }
    run.say("held-out loss", run.record["target"]["held_out_loss"])

    apart = Known(known_grams([written]), [prompts])
    trained, steps = train_drafter(run, target, keep_apart(run, tokens, apart), capture, apart.known)
    export.save_drafter(folder / "drafter", trained.drafter, run.drafter_dims, BLOCK_SIZE, capture, layers)
    factors = {name: value.cpu() for name, value in trained.table.exported().items()}
    export.save_transition(folder / "drafter", factors, STRENGTH)
    run.record["drafter"] = describe(run.drafter_dims, trained.drafter) | {"steps": steps, "capture": capture}
    run.record["seconds"]["total"] = round(time.monotonic() - run.started, 1)
    (folder / "record.json").write_text(json.dumps(run.record, indent=2) + "\n")
    run.say("done")


class Known:
    """Runs of tokens that no training text of the drafter may hold, as `keep_apart` takes them."""

    def __init__(self, known: torch.Tensor, benchmark: list[torch.Tensor]) -> None:
        self.known = known
        self.benchmark = benchmark


def enlarge(run: Run) -> None:
    """Sizes of the larger pair, in place of the bundled one's."""
    if run.options.dry_run:
        return
    sizes = {"vocab": 4096, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 4}
    run.target_dims = replace(run.target_dims, layers=14, **sizes)
    run.drafter_dims = replace(run.drafter_dims, layers=3, **sizes)
    run.batch_rows, run.generated_rows = 24, 1024


@torch.inference_mode()
def continuations(run: Run, target: Target, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """Prompts and what the target writes after them, greedily: int64 [n, length]."""
    table, generator = rope_table(target.dims, run.device), torch.Generator(run.device).manual_seed(0)
    lengths = torch.full((len(prompts),), prompts.shape[1], device=run.device)
    return continue_rows(target, prompts, lengths, length, 0.0, table, generator).clone()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target-seconds", type=float, default=200)
    parser.add_argument("--drafter-seconds", type=float, default=120)
    parser.add_argument("--target-lr", type=float, default=0.02)
    parser.add_argument("--drafter-lr", type=float, default=0.02)
    parser.add_argument("--limit-files", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="tiny models and batches, on a CPU")
    parser.set_defaults(target=None, drafter=None, record=None, time_limit=math.inf)
    return parser.parse_args()


if __name__ == "__main__":
    main()
