"""Train the bundled target and drafter on this machine's Python sources.

    python -m training.train_pair --out DIR [--target-seconds 240] [--drafter-seconds 300]

Writes ``DIR/bundled.tar`` (the two checkpoints and the model card; unpack it as ``toolkit/ddtree/bundled``)
and ``DIR/bundled_pair.json`` (every number of the run; it belongs in ``benchmarks/``). The drafter gets a
transition table. Neither is trained on text that shares 16 tokens in a row with a row that they are judged
by, or that the table's strength is tuned on; the record tells these rows by their digests. Phases are bounded
by wall clock, so the machine decides how many steps they hold; one H200 was used. ``--target FOLDER`` keeps
an exported target and trains only a drafter for it (``--record FILE`` then carries over the numbers of the
run that made the target), and ``--drafter FOLDER`` starts that from an exported drafter. ``--dry-run`` goes
through everything with tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from toolkit.ddtree.transition import TransitionTable
from training import card, data, evaluate, export
from training.drafting import BLOCK_SIZE, train_drafter
from training.generate import continue_rows
from training.modules import Dimensions, Target, rope_table
from training.overlap import GRAM, ROW, digest, known_grams, shared_grams, without_shared_rows
from training.run import Run

PROMPT, NEW_TOKENS, LONG_PROMPT = 192, 256, 1536
STRENGTHS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
BENCHMARK_PROMPTS = Path(__file__).parents[1] / "toolkit/acceptance/prompts/python.jsonl"


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


class Evaluation:
    """Rows that the pair is judged by, and others that the strength of its transition table is tuned on.

    The target alone writes them, so they are known before a drafter is trained, and kept out of its text.
    """

    def __init__(self, run: Run, target: Target, corpus: data.Corpus, tokenizer: Tokenizer) -> None:
        scale, count = (8, 4) if run.options.dry_run else (1, 64)
        prompt, new, long_prompt = PROMPT // scale, NEW_TOKENS // scale, LONG_PROMPT // scale
        run.record["text"] |= {"prompt": prompt, "long_prompt": long_prompt, "new_tokens": new}
        table = rope_table(target.dims, run.device)

        def written(texts: list[str], rows: int, length: int, seed: int, temperature: float = 0.0) -> Tensor:
            prompts = data.prompt_rows(tokenizer, texts, rows, length, seed).to(run.device)
            generator = torch.Generator(run.device).manual_seed(0)
            lengths = torch.full((len(prompts),), length, device=run.device)
            return continue_rows(
                target, prompts, lengths, length + new, temperature, table, generator
            ).clone()

        held_out, backwards = corpus.held_out, corpus.held_out[::-1]
        self.rows = {
            "held_out_greedy": (written(held_out, count, prompt, 1), prompt),
            "held_out_temperature_1": (written(held_out, count, prompt, 1, 1.0), prompt),
            "held_out_long_greedy": (written(held_out, count // 4, long_prompt, 2), long_prompt),
            "trained_on_greedy": (written(corpus.train, count, prompt, 3), prompt),
        }
        self.tuning = (written(backwards, count // 2, prompt, 4), prompt)
        self.benchmark = benchmark_rows(tokenizer)
        own = [rows for rows, _ in (*self.rows.values(), self.tuning)]
        self.known = known_grams([*own, *(row.to(run.device) for row in self.benchmark)])


def benchmark_rows(tokenizer: Tokenizer) -> list[Tensor]:
    """Prompts of the acceptance checks and of the speed benchmark, int64 [1, n] each."""
    lines = BENCHMARK_PROMPTS.read_text(encoding="utf-8").splitlines()
    return [torch.tensor([tokenizer.encode(json.loads(line)["prompt"]).ids]) for line in lines]


def keep_apart(run: Run, tokens: Tensor, evaluation: Evaluation) -> Tensor:
    """Training text of drafter and table: without rows that share 16 tokens in a row with evaluated ones."""
    kept, dropped = without_shared_rows(tokens, evaluation.known)
    run.say("rows that share 16 tokens in a row with evaluated ones:", dropped)
    run.record["apart"] = {
        "gram": GRAM,
        "row": ROW,
        "evaluated_grams": len(evaluation.known),
        "evaluated_digest": digest(evaluation.known),
        "benchmark_digest": digest(known_grams(evaluation.benchmark)),
        "dropped_rows": dropped,
        "tokens": len(kept),
        "tokens_digest": hashlib.sha256(kept.cpu().numpy().astype("<i2").tobytes()).hexdigest(),
        "shared_grams": int(shared_grams(kept, evaluation.known).sum()),
    }
    return kept


def evaluate_pair(
    run: Run, folder: Path, corpus: data.Corpus, tokenizer: Tokenizer, evaluation: Evaluation,
    capture: tuple[int, ...], factors: dict[str, Tensor],
) -> None:  # fmt: skip
    """Tune the table's strength, add it to the drafter, and measure the pair as exported, in float32."""
    target = export.load_target(folder / "target", run.device).eval()
    drafter = export.load_drafter(folder / "drafter", run.device).eval()
    table = rope_table(target.dims, run.device)
    pair = evaluate.Pair(target, drafter, capture, BLOCK_SIZE, data.MASK, table)
    factors = {name: value.cpu() for name, value in factors.items()}
    tuned = evaluate.tune(evaluate.Drafted.of(pair, *evaluation.tuning), factors, STRENGTHS)
    strength = max(tuned, key=lambda choice: tuned[choice])
    run.say("acceptance length by strength of the table", tuned)
    export.save_transition(folder / "drafter", factors, strength)
    run.record["transition"] = {
        "rank": factors["left"].shape[1],
        "strength": strength,
        "strengths": [round(float(value) * strength, 4) for value in factors["strengths"]],
        "acceptance_by_strength": {str(choice): length for choice, length in tuned.items()},
    }
    transition = TransitionTable.quantised(factors, factors["strengths"] * strength)
    run.record["acceptance_length"] = {}
    for name, rows in evaluation.rows.items():
        result = evaluate.measure(evaluate.Drafted.of(pair, *rows), transition)
        run.record["acceptance_length"][name] = result
        run.say(name, result)
    text = data.encode(tokenizer, corpus.held_out[:200]).long().to(run.device)
    windows = text[: len(text) // 513 * 513].view(-1, 513)[:512]
    with torch.inference_mode():
        losses = [token_loss(target, target(w[:, :-1], table)[0], w[:, 1:]).item() for w in windows.split(64)]
    run.record["target"]["held_out_loss"] = round(sum(losses) / len(losses), 4)
    for name in ("held_out_greedy", "held_out_temperature_1"):
        rows, first = evaluation.rows[name]
        for row in rows[:2].tolist():
            run.say(f"sample of {name}:\n" + tokenizer.decode(row[first - 24 :])[:900])


def keep_record(run: Run, record: Path | None) -> None:
    """Carry over how a kept target, and a drafter to start from, were trained; zeros where nobody says."""
    old = json.loads(record.read_text()) if record else {}
    run.record["target"] = {key: old.get("target", {}).get(key, 0) for key in ("steps", "tokens_seen")}
    if run.options.drafter is not None:
        drafter = old.get("drafter", {})
        run.earlier = {
            "steps": drafter.get("steps", 0) + drafter.get("earlier_steps", 0),
            "seconds": old.get("seconds", {}).get("drafter", 0) + drafter.get("earlier_seconds", 0),
        }
    for key in ("seconds", "training_loss"):
        run.record.setdefault(key, {})["target"] = old.get(key, {}).get("target", 0)


def describe(dims: Dimensions, model: nn.Module) -> dict[str, Any]:
    """Sizes of a model for the record."""
    return {"parameters": sum(p.numel() for p in model.parameters()), **vars(dims)}


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
        export.save_target(folder / "target", train_target(run, tokens), tokenizer)
    else:
        export.save_target(folder / "target", export.load_target(options.target, run.device), tokenizer)
        keep_record(run, options.record)
    target = export.load_target(folder / "target", run.device)
    layers = target.dims.layers
    capture = (1, layers // 2 - 2, layers * 2 // 3 - 1, layers - 2) if layers > 6 else (1, layers - 2)
    run.record["target"] |= describe(target.dims, target)

    evaluation = Evaluation(run, target, corpus, tokenizer)
    run.say("evaluated rows written")
    tokens = keep_apart(run, tokens, evaluation)
    trained, steps = train_drafter(run, target, tokens, capture, evaluation.known)
    export.save_drafter(folder / "drafter", trained.drafter, run.drafter_dims, BLOCK_SIZE, capture, layers)
    run.record["drafter"] = describe(run.drafter_dims, trained.drafter) | {
        "steps": steps,
        "capture": list(capture),
        "block_size": BLOCK_SIZE,
        **{f"earlier_{key}": value for key, value in run.earlier.items()},
    }
    evaluate_pair(run, folder, corpus, tokenizer, evaluation, capture, trained.table.exported())
    run.record["seconds"]["total"] = round(time.monotonic() - run.started, 1)
    (options.out / "bundled_pair.json").write_text(json.dumps(run.record, indent=2) + "\n")
    card.save_card(folder / "README.md", run.record)
    with tarfile.open(options.out / "bundled.tar", "w") as archive:
        archive.add(folder, arcname="bundled")
    shutil.rmtree(folder)
    run.say("done")


if __name__ == "__main__":
    main()
