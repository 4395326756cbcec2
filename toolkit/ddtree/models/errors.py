"""The one error that loading a checkpoint raises."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint cannot be served; the message names the file, the key or tensor, and what is expected."""

    def __init__(self, where: Path | str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
