"""Whether a safetensors file is whole, as far as its header tells."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from toolkit.weights.listing import WEIGHTS

_HEADER = 8  # bytes of a file that tell the length of its header
_HEADER_MOST = 100_000_000  # the format's own limit


def shape_problem(path: Path) -> str | None:
    """How a safetensors file contradicts itself, which a cut or empty one does; None where it does not.

    Reads its header only: 8 bytes with the header's length, the header as JSON, then the tensors' bytes
    (safetensors, "Format").
    """
    if path.suffix != WEIGHTS:
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER)
        length = struct.unpack("<Q", head)[0] if len(head) == _HEADER else 0
        if not 0 < length <= min(_HEADER_MOST, size):
            return "has no safetensors header"
        try:
            header = json.loads(file.read(length))
            ends = [int(value["data_offsets"][1]) for key, value in header.items() if key != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return "has a damaged safetensors header"
    wanted = _HEADER + length + max(ends, default=0)
    return None if wanted == size else f"has {size} bytes, and its safetensors header tells of {wanted}"
