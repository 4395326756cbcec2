"""Text that shares a run of 16 tokens with evaluated rows, which no table and no drafter may be trained on.

A transition table that has seen the rows that it is judged by shows a gain that nothing else will see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

GRAM = 16
ROW = 256

_FACTOR = 0x5851F42D4C957F2D
_WORD = 1 << 64


def gram_hashes(tokens: Tensor) -> Tensor:
    """64-bit hash of every run of ``GRAM`` tokens: int [..., n] -> int64 [..., max(0, n - GRAM + 1)].

    The polynomial of the run, modulo 2^64, built by joining runs of 1, 2, 4 and 8 tokens.
    """
    hashes, width, factor = tokens.long() + 1, 1, _FACTOR
    if tokens.shape[-1] < GRAM:
        return hashes[..., :0]
    while width < GRAM:
        hashes = hashes[..., :-width] * _signed(factor) + hashes[..., width:]
        width, factor = 2 * width, factor * factor % _WORD
    return hashes


def known_grams(rows: Iterable[Tensor]) -> Tensor:
    """Sorted distinct hashes of all runs in evaluated rows, int [n, T] each: int64 [m]."""
    return torch.cat([gram_hashes(row).flatten() for row in rows]).unique()


def digest(known: Tensor) -> str:
    """SHA-256 that identifies a set of hashes, as ``known_grams`` gives it."""
    return hashlib.sha256(known.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def shared_grams(tokens: Tensor, known: Tensor) -> Tensor:
    """Which runs are among the known ones: bool, shaped as ``gram_hashes`` shapes them."""
    hashes = gram_hashes(tokens)
    if not len(known):
        return torch.zeros_like(hashes, dtype=torch.bool)
    found = torch.searchsorted(known, hashes.contiguous()).clamp(max=len(known) - 1)
    return known[found] == hashes


def without_shared_rows(stream: Tensor, known: Tensor) -> tuple[Tensor, int]:
    """Cut the token stream into rows of ``ROW`` tokens and drop each that a known run reaches into.

    What is left is joined again, and looked through again, since a joint can make a run that was in no row.

    Args:
        stream: int [n].
        known: As ``known_grams`` gives it.

    Returns:
        The stream without these rows, and how many were dropped; the rest after the last whole row is, too.
    """
    dropped = 0
    while True:
        rows = stream[: len(stream) // ROW * ROW].view(-1, ROW)
        starts = shared_grams(rows.flatten(), known).nonzero()[:, 0]
        if not len(starts):
            return rows.flatten(), dropped
        bad = torch.cat([starts // ROW, (starts + GRAM - 1) // ROW]).unique()
        keep = torch.ones(len(rows), dtype=torch.bool, device=stream.device)
        keep[bad] = False
        dropped += len(bad)
        stream = rows[keep].flatten()


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - _WORD if value >= _WORD // 2 else value
