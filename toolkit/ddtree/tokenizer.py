"""The tokenizer beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from toolkit.ddtree.models.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"


def load_tokenizer(directory: Path, vocabulary: int) -> Tokenizer | None:
    """Load `tokenizer.json`; None if there is none, for then only token ids can be served.

    Args:
        directory: the target's checkpoint.
        vocabulary: rows of the target's embedding.

    Raises:
        CheckpointError: it cannot be read, or it has tokens that the model does not know.
    """
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(path, f"is not a tokenizer: {error}") from None
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= vocabulary:
        raise CheckpointError(
            path, f"has token id {highest}, but the model's vocabulary is 0..{vocabulary - 1}"
        )
    return tokenizer
