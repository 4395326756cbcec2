"""Replay of a recorded trace: the known figures, the chain's floor, and files that are no trace."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.ddtree.replay import Replay, load_trace, replay
from toolkit.ddtree.types import Expansion, TreeLimits

TRACE = Path(__file__).parents[1] / "data" / "traces" / "python_block8.npz"


@cache
def replayed(limits: TreeLimits) -> Replay:
    return replay(load_trace(TRACE), limits)


CHAIN = TreeLimits(7, 8, Expansion.CHAIN)


def test_the_chain():
    assert replayed(CHAIN).rounds == 2479
    assert round(replayed(CHAIN).acceptance_length, 3) == 2.954


def test_one_candidate_a_slot_is_the_chain():
    assert torch.equal(replayed(TreeLimits(7, 1)).matched, replayed(CHAIN).matched)


@pytest.mark.parametrize(("budget", "length"), [(7, 3.369), (32, 3.896)])
def test_best_first(budget, length):
    assert round(replayed(TreeLimits(budget, 8)).acceptance_length, 3) == length


def test_chain_seeded_accepts_at_least_the_chain_everywhere():
    seeded = replayed(TreeLimits(12, 8, Expansion.CHAIN_SEEDED))
    assert (seeded.matched >= replayed(CHAIN).matched).all()
    assert (seeded.matched > replayed(CHAIN).matched).any()
    assert (replayed(TreeLimits(7, 8)).matched < replayed(CHAIN).matched).any()


def fields() -> dict[str, np.ndarray]:
    return {
        "tokens": np.arange(24, dtype=np.int32).reshape(2, 12),
        "draft_logprob": np.full((2, 8, 2, 1), -0.5, dtype=np.float32),
        "draft_token": np.zeros((2, 8, 2, 1), dtype=np.int32),
        "prompt_len": np.int64(4),
        "block_size": np.int64(3),
    }


def save(path: Path, **changes: np.ndarray) -> Path:
    np.savez(path, **{**fields(), **changes})
    return path


def test_rounds_start_while_a_whole_block_is_left(tmp_path):
    """Eight anchors, blocks of three, nothing ever matched: rounds start at anchors 0 .. 4 of both rows."""
    result = replay(load_trace(save(tmp_path / "t.npz")), TreeLimits(2, 1))
    assert result.rounds == 10
    assert result.acceptance_length == 1.0


def test_a_perfect_drafter_commits_whole_blocks(tmp_path):
    tokens = fields()["tokens"]
    padded = np.pad(tokens, ((0, 0), (0, 4)))
    drafted = np.stack([padded[:, 5 + i : 13 + i] for i in range(2)], axis=-1)[..., None]
    result = replay(load_trace(save(tmp_path / "t.npz", draft_token=drafted)), TreeLimits(2, 1))
    assert result.rounds == 4
    assert result.acceptance_length == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_logprob": np.zeros((2, 8, 2, 2), np.float32)}, "draft_logprob"),
        ({"block_size": np.int64(5)}, "block_size 5"),
        ({"tokens": np.zeros((3, 12), np.int32)}, "tokens"),
        ({"prompt_len": np.int64(9)}, "continuation is shorter"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_trace(save(tmp_path / "t.npz", **change))
    assert "t.npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.npz: not a trace"):
        load_trace(path)


def test_a_missing_array(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, tokens=fields()["tokens"])
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(path)


def test_pickled_arrays_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(save(tmp_path / "t.npz", tokens=np.array([[1, None]], dtype=object)))


def test_a_trace_shorter_than_a_block(tmp_path):
    short = {name: fields()[name][:, :3] for name in ("draft_logprob", "draft_token")}
    with pytest.raises(ValueError, match="3 anchors are too few"):
        replay(load_trace(save(tmp_path / "t.npz", **short)), TreeLimits(2, 1))
