"""Training of a DFlash drafter, and of its transition table, against a finished target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training import data, export
from training.generate import continue_rows
from training.modules import Drafter, Target, draft_blocks, rope_table
from training.overlap import shared_grams
from training.run import Run
from training.transition import Transition

BLOCK_SIZE = 8
SLOT_DECAY = 4.0


class GeneratedRows:
    """The target's own continuations of training text, greedy and at temperature 1.

    Rows that share a run of tokens with evaluated ones (see ``training.overlap``) are left out.
    """

    def __init__(self, run: Run, target: Target, tokens: Tensor, known: Tensor) -> None:
        self.length = run.row_length // 2
        writer = Target(target.dims).to(
            run.device, torch.bfloat16 if run.device.type == "cuda" else torch.float32
        )
        writer.load_state_dict(target.state_dict())
        table = rope_table(target.dims, run.device)
        rows, starts = [], []
        for temperature in (0.0, 1.0):
            prompts = data.random_rows(tokens, run.generated_rows, self.length, run.generator)
            lengths = torch.randint(
                16, self.length * 5 // 8, (len(prompts),), device=run.device, generator=run.generator
            )
            rows.append(
                continue_rows(writer, prompts, lengths, self.length, temperature, table, run.generator)
                .clone()
                .short()
            )
            starts.append(lengths)
        apart = torch.cat([~shared_grams(part, known).any(1) for part in rows])
        self.rows, self.starts = torch.cat(rows)[apart], torch.cat(starts)[apart]
        run.record["text"] |= {"generated_rows": len(apart), "generated_rows_dropped": int((~apart).sum())}
        if not len(self.rows):
            raise ValueError("every generated row shares 16 tokens in a row with an evaluated one")

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows int64 [count, length], and where their continuations begin [count]."""
        chosen = torch.randint(0, len(self.rows), (count,), device=self.rows.device, generator=generator)
        return self.rows[chosen].long(), self.starts[chosen]


class Drafting(nn.Module):
    """A drafter and its transition table, trained together."""

    def __init__(self, drafter: Drafter, table: Transition) -> None:
        super().__init__()
        self.drafter = drafter
        self.table = table


def train_drafter(
    run: Run, target: Target, tokens: Tensor, capture: tuple[int, ...], known: Tensor
) -> tuple[Drafting, int]:
    """Train a drafter and its table on source text and on the target's own text.

    The slots of an anchor are trained towards the token that follows and the target's distribution there,
    in equal parts, weighted exp(-slot / 4): an early slot decides whether the later ones count at all.

    Args:
        run: Settings and record.
        target: Finished.
        tokens: Training text, int [n].
        capture: Target layers whose outputs the drafter reads.
        known: Runs of tokens that no generated row may hold, as ``overlap.known_grams`` gives them.

    Returns:
        Drafter and table, and the number of steps.
    """
    options = run.options
    if options.drafter is None:
        drafter = Drafter(run.drafter_dims, len(capture)).to(run.device)
    else:
        drafter = export.load_drafter(options.drafter, run.device)
        run.drafter_dims = export.read_dimensions(options.drafter)
    model = Drafting(drafter, Transition(target.dims.vocab, BLOCK_SIZE - 1).to(run.device))
    target.requires_grad_(False)
    run.compiled(target)
    run.compiled(drafter)
    table = rope_table(target.dims, run.device)
    generated = GeneratedRows(run, target, tokens, known)
    run.say("generated rows", len(generated.rows), "of", generated.length)
    weights = torch.exp(-torch.arange(BLOCK_SIZE - 1, device=run.device) / SLOT_DECAY)
    weights = weights / weights.sum()
    rows_a_step, anchors_a_row = (4, 8) if options.dry_run else (32, 128)

    def loss_of(step: int) -> Tensor:
        if step % 4 == 3:
            ids = data.random_rows(tokens, rows_a_step // 2, run.row_length, run.generator)
            first = torch.ones(len(ids), device=run.device)
        else:
            source = data.random_rows(tokens, rows_a_step // 4, generated.length, run.generator)
            written, first = generated.sample(rows_a_step - len(source), run.generator)
            ids = torch.cat([source, written])
            first = torch.cat([torch.ones(len(source), device=run.device), first])
        spread = torch.rand(len(ids), anchors_a_row, device=run.device, generator=run.generator)
        last = (
            (first + 400).clamp(max=ids.shape[1] - BLOCK_SIZE) if step % 4 != 3 else ids.shape[1] - BLOCK_SIZE
        )
        anchors = (first[:, None] + spread * (last - first)[:, None]).long()
        return draft_loss(target, model, ids, anchors, capture, table, weights)

    steps = run.train("drafter", model, loss_of, options.drafter_seconds, options.drafter_lr)
    return model, steps


def draft_loss(
    target: Target,
    model: Drafting,
    ids: Tensor,
    anchors: Tensor,
    capture: tuple[int, ...],
    table: tuple[Tensor, Tensor],
    weights: Tensor,
) -> Tensor:
    """Half cross-entropy to the text, half to the target's distribution, over all slots but the first.

    The drafter's marginals and what the transition table makes of them, given the text's token before each
    slot, are judged alike. The table's part changes the table alone, never the drafter.

    Args:
        target: Frozen.
        model: In training.
        ids: int64 [B, T].
        anchors: Position of each block's bonus token, int64 [B, N].
        capture: Target layers whose outputs the drafter reads.
        table: As ``rope_table`` gives it.
        weights: Of the slots, float32 [block_size - 1], of sum 1.

    Returns:
        The sum of both, each the mean over anchors of the weighted sum over slots.
    """
    with torch.no_grad():
        hidden, features = target(ids, table, capture)
        slots, positions, mask = draft_blocks(ids, anchors, BLOCK_SIZE, data.MASK)
        wanted = positions.unflatten(1, (-1, BLOCK_SIZE))[..., 1:]
        before = (wanted - 1).flatten(1)
        soft = target.logits(hidden.gather(1, before[..., None].expand(-1, -1, hidden.shape[-1]))).softmax(-1)
        noise = target.embed_tokens(slots)
    drafted = model.drafter(noise, features, positions, mask, table).unflatten(1, (-1, BLOCK_SIZE))[:, :, 1:]
    logits = target.logits(drafted.flatten(1, 2))
    labels = ids.gather(1, wanted.flatten(1))
    given = ids.gather(1, before).unflatten(1, (-1, BLOCK_SIZE - 1))
    corrected = model.table(logits.detach().unflatten(1, (-1, BLOCK_SIZE - 1)), given).flatten(1, 2)
    losses = [slot_losses(scores, labels, soft) for scores in (logits, corrected)]
    return torch.stack([(loss * weights).sum(-1).mean() for loss in losses]).sum()


def slot_losses(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    """Loss of every slot: [B, N * slots, vocab], [B, N * slots], and distributions -> [B, N, slots]."""
    logprobs = logits.log_softmax(-1)
    hard_loss = -logprobs.gather(-1, labels[..., None])[..., 0]
    soft_loss = -(soft * logprobs).sum(-1)
    return (hard_loss + soft_loss).unflatten(1, (-1, BLOCK_SIZE - 1)) / 2
