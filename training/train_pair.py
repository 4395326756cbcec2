"""Train the bundled target and drafter on this machine's Python sources.

    python -m training.train_pair --out DIR [--target-seconds 240] [--drafter-seconds 300]

Writes ``DIR/bundled.tar`` (the two checkpoints and the model card; unpack it as ``toolkit/ddtree/bundled``),
``DIR/bundled_pair.json`` (every number of the run; it belongs in ``benchmarks/``) and ``DIR/bigrams.npz``
(token pair counts of the training text). Phases are bounded by wall clock, so the machine decides how many
steps they hold; one H200 was used. ``--target FOLDER`` keeps an exported target and trains only a drafter for
it (``--record FILE`` then carries over the numbers of the run that made the target), and ``--drafter FOLDER``
starts that from an exported drafter. ``--dry-run`` goes through everything with tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from training import card, data, evaluate, export
from training.drafting import BLOCK_SIZE, train_drafter
from training.generate import continue_rows
from training.modules import Dimensions, Target, rope_table
from training.run import Run

PROMPT, NEW_TOKENS, LONG_PROMPT = 192, 256, 1536


def prepare_text(run: Run) -> tuple[Tokenizer, Tensor, data.Corpus]:
    """Collect, split and encode the sources; record what they were."""
    options = run.options
    corpus = data.collect(limit=options.limit_files, seed=options.seed)
    run.say("files", len(corpus.train), "held out", len(corpus.held_out), "dropped", corpus.dropped)
    if options.target is None:
        tokenizer = data.train_tokenizer(corpus.train[:3000], run.target_dims.vocab)
    else:
        tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    tokens = data.encode(tokenizer, corpus.train)
    run.say("million tokens", round(len(tokens) / 1e6, 1))
    run.record["text"] = {
        "train_files": len(corpus.train),
        "train_tokens": len(tokens),
        "train_characters": sum(map(len, corpus.train)),
        "train_digest": corpus.digest,
        "held_out_files": len(corpus.held_out),
        "held_out_packages": list(data.HELD_OUT_PACKAGES),
        "dropped": corpus.dropped,
    }
    return tokenizer, tokens.to(run.device), corpus


def train_target(run: Run, tokens: Tensor) -> Target:
    """Next-token training over random windows of the token stream."""
    target = Target(run.target_dims).to(run.device)
    table = rope_table(run.target_dims, run.device)
    run.compiled(target)

    def loss_of(_step: int) -> Tensor:
        rows = data.random_rows(tokens, run.batch_rows, run.row_length + 1, run.generator)
        return token_loss(target, target(rows[:, :-1], table)[0], rows[:, 1:])

    steps = run.train("target", target, loss_of, run.options.target_seconds, run.options.target_lr)
    run.record["target"] = {"steps": steps, "tokens_seen": steps * run.batch_rows * run.row_length}
    return target


def token_loss(target: Target, hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return functional.cross_entropy(target.logits(hidden).flatten(0, 1), labels.flatten())


def evaluate_pair(
    run: Run, folder: Path, corpus: data.Corpus, tokenizer: Tokenizer, capture: tuple[int, ...]
) -> None:
    """Measure the pair as it was exported, in float32."""
    target = export.load_target(folder / "target", run.device).eval()
    drafter = export.load_drafter(folder / "drafter", run.device).eval()
    table = rope_table(target.dims, run.device)
    pair = evaluate.Pair(target, drafter, capture, BLOCK_SIZE, data.MASK, table)
    scale = 8 if run.options.dry_run else 1
    prompt, new_tokens, long_prompt = PROMPT // scale, NEW_TOKENS // scale, LONG_PROMPT // scale
    rows = 4 if run.options.dry_run else 64
    run.record["text"] |= {"prompt": prompt, "long_prompt": long_prompt, "new_tokens": new_tokens}

    held_out = data.prompt_rows(tokenizer, corpus.held_out, rows, prompt, seed=1).to(run.device)
    held_out_long = data.prompt_rows(tokenizer, corpus.held_out, rows // 4, long_prompt, seed=2).to(
        run.device
    )
    trained_on = data.prompt_rows(tokenizer, corpus.train, rows, prompt, seed=3).to(run.device)
    results = {
        "held_out_greedy": evaluate.measure(pair, held_out, new_tokens, 0.0, 0),
        "held_out_temperature_1": evaluate.measure(pair, held_out, new_tokens, 1.0, 0),
        "held_out_long_greedy": evaluate.measure(pair, held_out_long, new_tokens, 0.0, 0),
        "trained_on_greedy": evaluate.measure(pair, trained_on, new_tokens, 0.0, 0),
    }
    run.record["acceptance_length"] = results
    text = data.encode(tokenizer, corpus.held_out[:200]).long().to(run.device)
    windows = text[: len(text) // 513 * 513].view(-1, 513)[:512]
    with torch.inference_mode():
        losses = [token_loss(target, target(w[:, :-1], table)[0], w[:, 1:]).item() for w in windows.split(64)]
    run.record["target"]["held_out_loss"] = round(sum(losses) / len(losses), 4)
    for name, result in results.items():
        run.say(name, result)
    for temperature in (0.0, 1.0):
        lengths = torch.full((2,), prompt, device=run.device)
        shown = continue_rows(
            target, held_out[:2], lengths, prompt + new_tokens, temperature, table, run.generator
        )
        for row in shown.tolist():
            run.say(f"sample at temperature {temperature}:\n" + tokenizer.decode(row[prompt - 24 :])[:900])


def keep_record(run: Run, record: Path | None) -> None:
    """Carry over how a kept target was trained; zeros where nobody says."""
    old = json.loads(record.read_text()) if record else {}
    run.record["target"] = {key: old.get("target", {}).get(key, 0) for key in ("steps", "tokens_seen")}
    for key in ("seconds", "training_loss"):
        run.record.setdefault(key, {})["target"] = old.get(key, {}).get("target", 0)


def describe(dims: Dimensions, model: nn.Module) -> dict[str, Any]:
    """Sizes of a model for the record."""
    return {"parameters": sum(p.numel() for p in model.parameters()), **vars(dims)}


def save_bigrams(path: Path, tokens: Tensor, vocab: int) -> None:
    """Write the counts of adjacent token pairs seen at least four times."""
    pairs = tokens[:-1].long() * vocab + tokens[1:].long()
    counts = torch.bincount(pairs, minlength=vocab * vocab)
    kept = (counts >= 4).nonzero()[:, 0]
    np.savez_compressed(
        path,
        first=(kept // vocab).cpu().numpy().astype(np.int16),
        second=(kept % vocab).cpu().numpy().astype(np.int16),
        count=counts[kept].cpu().numpy().astype(np.int32),
        unigram=torch.bincount(tokens.long(), minlength=vocab).cpu().numpy().astype(np.int32),
    )


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--target", type=Path, help="exported target to keep")
    parser.add_argument("--record", type=Path, help="bundled_pair.json of the run that made --target")
    parser.add_argument("--drafter", type=Path, help="exported drafter to start from")
    parser.add_argument("--target-seconds", type=float, default=240)
    parser.add_argument("--drafter-seconds", type=float, default=300)
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, help="training ends by then, in seconds"
    )
    parser.add_argument("--target-lr", type=float, default=0.02)
    parser.add_argument("--drafter-lr", type=float, default=0.02)
    parser.add_argument("--limit-files", type=int, help="read at most this many files a side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="tiny models and batches")
    return parser.parse_args()


def main() -> None:
    """Run all phases."""
    run = Run(parse_options())
    options = run.options
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # a layer that cannot be compiled runs as it is
    folder = options.out / "bundled"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, tokens, corpus = prepare_text(run)

    if options.target is None:
        trained = train_target(run, tokens)
        export.save_target(folder / "target", trained, tokenizer)
    else:
        export.save_target(folder / "target", export.load_target(options.target, run.device), tokenizer)
        keep_record(run, options.record)
    target = export.load_target(folder / "target", run.device)
    layers = target.dims.layers
    capture = (1, layers // 2 - 2, layers * 2 // 3 - 1, layers - 2) if layers > 6 else (1, layers - 2)
    run.record["target"] |= describe(target.dims, target)

    drafter, steps = train_drafter(run, target, tokens, capture)
    export.save_drafter(folder / "drafter", drafter, run.drafter_dims, BLOCK_SIZE, capture, layers)
    run.record["drafter"] = describe(run.drafter_dims, drafter) | {
        "steps": steps,
        "capture": list(capture),
        "block_size": BLOCK_SIZE,
    }
    evaluate_pair(run, folder, corpus, tokenizer, capture)
    run.record["seconds"]["total"] = round(time.monotonic() - run.started, 1)
    (options.out / "bundled_pair.json").write_text(json.dumps(run.record, indent=2) + "\n")
    card.save_card(folder / "README.md", run.record)
    with tarfile.open(options.out / "bundled.tar", "w") as archive:
        archive.add(folder, arcname="bundled")
    shutil.rmtree(folder)
    save_bigrams(options.out / "bigrams.npz", tokens, target.dims.vocab)
    run.say("done")


if __name__ == "__main__":
    main()
