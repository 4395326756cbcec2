"""The transition table's training: what it learns, how it is stored, and what it must not have seen."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from toolkit.ddtree.models.config import read_drafter_config
from toolkit.ddtree.models.loading import load_transition
from toolkit.ddtree.transition import TransitionTable
from training import export
from training.evaluate import Drafted, measure, tune
from training.overlap import (
    GRAM,
    ROW,
    digest,
    gram_hashes,
    known_grams,
    shared_grams,
    without_shared_rows,
)
from training.train_pair import benchmark_rows
from training.transition import Transition

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "toolkit/ddtree/bundled"


def random_tokens(*shape, seed=0, vocab=2048):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def polynomial(run):
    """The hash of one run, as an int64, in plain integers."""
    value = 0
    for token in run:
        value = (value * 0x5851F42D4C957F2D + token + 1) % 2**64
    return value - 2**64 if value >= 2**63 else value


def test_hashes_are_of_every_run():
    tokens = random_tokens(2, 40)
    expected = [[polynomial(row[i : i + GRAM]) for i in range(40 - GRAM + 1)] for row in tokens.tolist()]
    assert gram_hashes(tokens).tolist() == expected
    assert gram_hashes(tokens[:, : GRAM - 1]).shape == (2, 0)
    assert torch.equal(gram_hashes(tokens.short()), gram_hashes(tokens))


def test_a_row_that_shares_a_run_is_dropped():
    stream = random_tokens(10 * ROW)
    evaluated = random_tokens(1, 60, seed=1)
    stream[3 * ROW + 7 : 3 * ROW + 7 + GRAM] = evaluated[0, 5 : 5 + GRAM]
    stream[6 * ROW : 6 * ROW + GRAM - 1] = evaluated[0, 20 : 20 + GRAM - 1]  # one token short: no shared run
    kept, dropped = without_shared_rows(stream, known_grams([evaluated]))
    assert dropped == 1
    assert torch.equal(kept, torch.cat([stream[: 3 * ROW], stream[4 * ROW :]]))


def test_both_rows_that_a_run_reaches_into_are_dropped():
    stream = random_tokens(4 * ROW)
    known = known_grams([stream[None, 2 * ROW - 3 : 2 * ROW - 3 + GRAM]])
    kept, dropped = without_shared_rows(stream, known)
    assert dropped == 2
    assert torch.equal(kept, torch.cat([stream[:ROW], stream[3 * ROW :]]))


def test_a_run_that_a_joint_makes_is_found_too():
    stream = random_tokens(4 * ROW)
    joint = torch.cat([stream[ROW - 8 : ROW], stream[2 * ROW : 2 * ROW + 8]])
    inside = stream[ROW + 20 : ROW + 20 + GRAM]
    known = known_grams([joint[None], inside[None]])
    kept, dropped = without_shared_rows(stream, known)
    assert dropped == 3
    assert not shared_grams(kept, known).any()


def test_without_evaluated_rows_nothing_is_shared():
    stream = random_tokens(ROW + 5)
    kept, dropped = without_shared_rows(stream, torch.zeros(0, dtype=torch.int64))
    assert (len(kept), dropped) == (ROW, 0)


def test_the_bundled_table_saw_no_evaluated_row():
    """What the build recorded: no run in common, the prompts of the speed benchmark included."""
    apart = json.loads((ROOT / "benchmarks/bundled_pair.json").read_text())["apart"]
    assert apart["gram"] == GRAM
    assert apart["shared_grams"] == 0
    assert apart["dropped_rows"] > 0
    assert apart["evaluated_grams"] > 50_000
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target/tokenizer.json"))
    assert apart["benchmark_digest"] == digest(known_grams(benchmark_rows(tokenizer)))


@pytest.fixture(scope="module")
def learnt():
    """A table fitted to text in which the next or the double follows each token; the marginals are flat."""
    torch.manual_seed(0)
    table = Transition(11, 3, rank=10)
    optimiser = torch.optim.Adam(table.parameters(), lr=0.03)
    for step in range(400):
        optimiser.param_groups[0]["lr"] = 0.03 * (1 - step / 400)
        before = torch.randint(11, (256, 3))
        labels = torch.where(torch.rand(256, 3) < 0.75, before + 1, before * 2) % 11
        logits = table(torch.zeros(256, 3, 11), before)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return table


def test_the_table_learns_what_follows(learnt):
    with torch.no_grad():
        found = learnt(torch.zeros(11, 3, 11), torch.arange(11)[:, None].expand(-1, 3)).softmax(-1)
    for token in range(2, 11):  # 0 and 1 have one follower alone
        assert found[token, :, (token + 1) % 11].tolist() == pytest.approx([0.75] * 3, abs=0.12)
        assert found[token, :, token * 2 % 11].tolist() == pytest.approx([0.25] * 3, abs=0.12)


def test_the_stored_table_is_the_learnt_one(learnt, tmp_path):
    factors = learnt.exported()
    assert factors["strengths"].max() == 1
    product = (learnt.left @ learnt.right.T * learnt.strengths[1]).detach()
    folder = tmp_path / "drafter"
    folder.mkdir()
    config = json.loads((BUNDLED / "drafter/config.json").read_text()) | {"vocab_size": 11, "block_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    export.save_transition(folder, factors, 0.5)
    table = load_transition(folder, read_drafter_config(folder), torch.device("cpu"))
    assert table is not None
    stored = table._left @ table._right.T * table._strengths[1]
    torch.testing.assert_close(stored, product * 0.5, atol=0.02 * product.abs().max().item(), rtol=0)


def test_the_strength_is_tuned_and_the_gain_measured(learnt):
    """Text of the table's own making: a tuned strength is near one, and trees gain."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 11, (24,), generator=generator)]
    for _ in range(70):
        follows = torch.rand(24, generator=generator) < 0.75
        rows.append(torch.where(follows, rows[-1] + 1, rows[-1] * 2) % 11)
    texts = torch.stack(rows, 1)
    tokens = torch.arange(8).expand(24, 64, 3, 8)  # tokens 8 to 10 are never drafted
    drafted = Drafted(texts.tolist(), tokens.tolist(), torch.full((24, 64, 3, 8), math.log(1 / 11)))
    factors = learnt.exported()
    tuned = tune(drafted, factors, (0.0, 1.0))
    assert tuned[1.0] > 1.2 * tuned[0.0]
    result = measure(drafted, TransitionTable.quantised(factors, factors["strengths"]))
    assert result["transition_7"] > 1.2 * result["ddtree_7"]
    assert 0 < result["distinct_bigram_ratio"] < 1
