"""`nvidia-smi topo -m` and `-p2p r`: how each two GPUs are joined; `nvidia-smi nvlink -s`: the links.

Source of the words: their own legends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_GPU = re.compile(r"^GPU(\d+)$")
_HEAD = re.compile(r"^GPU (\d+):")
_LINK = re.compile(r"^Link (\d+): (?:([\d.]+) GB/s|<?(inactive)>?)", re.IGNORECASE)
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
# Farther and farther apart; NCCL's own levels have PHB for NODE (NCCL_P2P_LEVEL, NCCL user guide).
DISTANCES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A word for each pair of GPUs.

    Attributes:
        pairs: (row, column) to the word, such as `NV18`, `SYS`, `OK`; without the diagonal.
        numa: GPU to its NUMA node as printed; empty where that is not told.
    """

    pairs: dict[tuple[int, int], str] = field(default_factory=dict)
    numa: dict[int, str] = field(default_factory=dict)

    def between(self, gpus: list[int]) -> dict[tuple[int, int], str]:
        """The words of the pairs among these GPUs, each pair once."""
        return {
            pair: word for pair, word in self.pairs.items() if pair[0] < pair[1] and set(pair) <= set(gpus)
        }


def parse_matrix(text: str) -> Matrix:
    """A matrix of `nvidia-smi topo`; empty where this is none.

    The columns are told apart by tabs: the headings of the last ones have spaces.
    """
    pairs: dict[tuple[int, int], str] = {}
    numa: dict[int, str] = {}
    columns: list[str] = []
    for line in _UNDERLINE.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if not columns:
            if "GPU0" in cells:
                columns = cells
            continue
        row = _GPU.match(cells[0])
        if row is None:
            continue
        for name, cell in zip(columns, cells, strict=False):
            column = _GPU.match(name)
            if column is not None and cell not in ("X", ""):
                pairs[int(row[1]), int(column[1])] = cell
            elif name == "NUMA Affinity" and cell:
                numa[int(row[1])] = cell
    return Matrix(pairs, numa)


def distance(word: str) -> int:
    """How far apart a word of `topo -m` says; unknown words are the farthest."""
    short = "NV" if word.startswith("NV") else word
    return DISTANCES.index(short) if short in DISTANCES else len(DISTANCES)


def parse_nvlink(text: str) -> dict[int, list[float | None]]:
    """GPU to its links in order: GB/s a direction, None where one is inactive."""
    found: dict[int, list[float | None]] = {}
    gpu = None
    for line in text.splitlines():
        if head := _HEAD.match(line.strip()):
            gpu = int(head[1])
            found[gpu] = []
        elif gpu is not None and (link := _LINK.match(line.strip())):
            found[gpu].append(None if link[2] is None else float(link[2]))
    return found
