"""Small checkpoints, with real safetensors files."""

import hashlib
import json
import os
import random
import struct
from pathlib import Path


def safetensors(size: int, seed: int = 0) -> bytes:
    """A file whose one tensor has `size` bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(size)


def publish(folder: Path, *, shards: int = 3, size: int = 200_000) -> Path:
    """A checkpoint with shards, index, config and SHA256SUMS in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(safetensors(size + number, number))
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "qwen3"}\n')
    (folder / "tokenizer.json").write_text("{}\n")
    sums(folder)
    return folder


def sums(folder: Path) -> None:
    """Write SHA256SUMS of all files, as sha256sum does."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the marker, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".weights.json", "SHA256SUMS")
    }


def touch_again(path: Path) -> None:
    """Give a file another time."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
