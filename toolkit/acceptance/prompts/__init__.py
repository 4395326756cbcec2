"""The acceptance prompts: a JSON lines file with one `prompt` a line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from toolkit.errors import ConfigError, Problem

BUILT_IN = Path(__file__).with_name("python.jsonl")

_FEWEST = 16
_LARGEST_FILE = 16 << 20


def load_prompts(path: Path | None = None) -> list[str]:
    """Read a prompt file; without a path the built-in set.

    Returns:
        At least 16 different prompts, in the file's order.

    Raises:
        ConfigError: the file cannot be read or holds something else; every bad line is named.
    """
    path = path or BUILT_IN
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError([Problem(f"is larger than {_LARGEST_FILE >> 20} MiB", source=str(path))])
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError([Problem(f"cannot be read: {reason}", source=str(path))]) from None
    prompts: list[str] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _prompt(line)
        if prompt is None:
            problems.append(Problem('is no JSON object with a text "prompt"', source=str(path), line=number))
        elif prompt in prompts:
            problems.append(Problem("repeats an earlier prompt", source=str(path), line=number))
        else:
            prompts.append(prompt)
    if not problems and len(prompts) < _FEWEST:
        problems.append(
            Problem(f"holds {len(prompts)} prompts, at least {_FEWEST} are needed", source=str(path))
        )
    if problems:
        raise ConfigError(problems)
    return prompts


def prompts_hash(prompts: list[str]) -> str:
    """SHA-256 of the prompts in order; reports are compared only when it is equal."""
    return hashlib.sha256(json.dumps(prompts, ensure_ascii=True).encode()).hexdigest()


def _prompt(line: str) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else None
