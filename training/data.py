"""Python sources of the training machine as token rows, split by package into training and held-out text."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT_PACKAGES = ("networkx", "statsmodels", "xarray")
EOS, MASK = 0, 1
SPECIAL_TOKENS = ("<|eos|>", "<|mask|>")

_MAX_FILE_BYTES = 200_000
_LONG_LINE = 30
_NEAR_COPY_SHARE = 0.3
_reader_state: dict[str, frozenset[int]] = {"held_lines": frozenset()}


@dataclass(frozen=True)
class Corpus:
    """Texts of both sides of the split, and what identifies them.

    Attributes:
        train: Training texts, one a file, shuffled.
        held_out: Held-out texts, one a file, shuffled.
        digest: SHA-256 over the sorted digests of the training texts.
        dropped: Files left out, by reason.
    """

    train: list[str]
    held_out: list[str]
    digest: str
    dropped: dict[str, int]


def collect(roots: Sequence[Path] | None = None, limit: int | None = None, seed: int = 0) -> Corpus:
    """Read every Python file under ``roots`` and split by package.

    A file is dropped when it is large, empty, mostly not letters (tables of numbers), the same as another, or
    when over 30 % of its long lines also stand in a held-out package (a vendored or adapted copy).

    Args:
        roots: Folders to read; by default this interpreter's site-packages and standard library.
        limit: Keep at most this many files a side, for a dry run.
        seed: Order of the files.

    Returns:
        The split. The held-out side is every file below a folder named in ``HELD_OUT_PACKAGES``.

    Raises:
        ValueError: One side is empty.
    """
    if roots is None:
        paths = sysconfig.get_paths()
        roots = [Path(paths["purelib"]), Path(paths["stdlib"])]
    files = sorted({p.resolve() for root in roots for p in root.rglob("*.py") if p.is_file()})
    rng = random.Random(seed)
    rng.shuffle(files)
    held_files = [p for p in files if any(name in p.parts for name in HELD_OUT_PACKAGES)][:limit]
    held_set = set(held_files)
    train_files = [p for p in files if p not in held_set][:limit]
    held_out = [text for p in held_files if isinstance(text := _read(p), str)]

    # The forked readers inherit it; string hashes differ between processes that are not forked.
    _reader_state["held_lines"] = frozenset(line for text in held_out for line in _long_lines(text))
    with multiprocessing.get_context("fork").Pool() as pool:
        results = pool.map(_read_train, train_files, chunksize=64)
    train: dict[bytes, str] = {}
    dropped = {"unsuitable": 0, "duplicate": 0, "near-copy of held-out": 0}
    seen = {_digest(text) for text in held_out}
    for result in results:
        if not isinstance(result, tuple):
            dropped[result] += 1
        elif result[0] in seen:
            dropped["duplicate"] += 1
        else:
            seen.add(result[0])
            train[result[0]] = result[1]
    if not train or not held_out:
        raise ValueError(f"nothing to train on or nothing held out ({HELD_OUT_PACKAGES}) under {list(roots)}")
    digest = hashlib.sha256(b"".join(sorted(train))).hexdigest()
    return Corpus(list(train.values()), held_out, digest, dropped)


def _read(path: Path) -> str | None:
    """Text of a suitable file, else None."""
    if not 64 < path.stat().st_size < _MAX_FILE_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="ignore")
    letters = sum(map(str.isalpha, text[:8192]))
    return text if letters > 0.4 * len(text[:8192]) else None


def _read_train(path: Path) -> tuple[bytes, str] | str:
    """Digest and text of a training file, or the reason it is dropped."""
    text = _read(path)
    if text is None:
        return "unsuitable"
    lines, held_lines = _long_lines(text), _reader_state["held_lines"]
    if sum(line in held_lines for line in lines) > _NEAR_COPY_SHARE * max(1, len(lines)):
        return "near-copy of held-out"
    return _digest(text), text


def _long_lines(text: str) -> list[int]:
    return [hash(line) for raw in text.splitlines() if len(line := raw.strip()) >= _LONG_LINE]


def _digest(text: str) -> bytes:
    return hashlib.sha256("\n".join(line.rstrip() for line in text.splitlines()).encode()).digest()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; ids 0 and 1 are the end-of-text and mask tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Concatenate the texts' ids, each followed by the end-of-text token: int16 [tokens]."""
    pieces = []
    for start in range(0, len(texts), 4096):
        encodings = tokenizer.encode_batch_fast(texts[start : start + 4096])
        pieces += [np.array([*encoding.ids, EOS], dtype=np.int16) for encoding in encodings]
    return torch.from_numpy(np.concatenate(pieces))


def random_rows(tokens: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw windows of the token stream: int64 [rows, length] on the stream's device."""
    starts = torch.randint(0, len(tokens) - length, (rows, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def prompt_rows(
    tokenizer: Tokenizer, texts: Sequence[str], rows: int, length: int, seed: int
) -> torch.Tensor:
    """Take one window of ``length`` tokens from each of the first ``rows`` texts that are long enough.

    Returns:
        int64 [rows, length]; fewer rows where the texts run out.
    """
    rng = random.Random(seed)
    taken: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        if len(ids) > length + 64:
            start = rng.randrange(0, len(ids) - length)
            taken.append(ids[start : start + length])
        if len(taken) == rows:
            break
    return torch.tensor(taken)
