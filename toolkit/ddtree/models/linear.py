"""Products with a model's weights, by the library that is fastest at the row counts of a draft tree.

A tree has few rows. Torch's MKL has kernels for them on Intel's CPUs: eight rows take hardly longer than one.
On another CPU with AVX-512, numpy's OpenBLAS has kernels for small products that take half to nine tenths of
the time that MKL does there, on one thread. A single row is faster in MKL.

A small model's weights do not fit the second-level cache, and on other CPUs than Intel's the blocks of a
product bring them there at a quarter of the speed of one pass over them. So on one thread such a pass
precedes each product.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[np.float32]
_PAGE = 4096
_SPARE = 16  # rows of a matrix that lie whole pages apart compete for the same cache sets
_SMALL = 1_000_000  # multiplications of the largest product that OpenBLAS takes for small
_MOST_ROWS, _MOST = 40, 16 * _SMALL  # rows and multiplications up to which small products win
_MOST_FETCHED = 1 << 19  # float32 of the largest weight that is worth a pass over it
_STEP = 16  # float32 of an AVX-512 register


class Linear:
    """x @ weight.T without bias, for a weight [out, in], which is kept transposed."""

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        spare = _SPARE if outputs * weight.element_size() % _PAGE == 0 else 0
        stored = weight.new_zeros(inputs, outputs + spare)
        self._weight = stored[:, :outputs].copy_(weight.t())
        on_host = weight.device.type == "cpu" and weight.dtype == torch.float32
        is_fetched = on_host and stored.numel() <= _MOST_FETCHED and not is_intel()
        self._fetched = stored.view(-1) if is_fetched else None
        small = on_host and has_small_products()
        self._blocks = _blocks_by_rows(self._weight.numpy()) if small else []

    @property
    def weight(self) -> Tensor:
        """The weight, [out, in]."""
        return self._weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        blocks = self._prepare(x.shape[0])
        return _product(x, blocks) if blocks else torch.mm(x, self._weight)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add a residual: residual + x @ weight.T, [n, out]."""
        blocks = self._prepare(x.shape[0])
        return _product(x, blocks).add_(residual) if blocks else torch.addmm(residual, x, self._weight)

    def _prepare(self, rows: int) -> tuple[_Array, ...]:
        """Bring the weight into the cache, and give it for small products; nothing where torch is faster.

        Several threads would each need a part of the weight in a cache of their own.
        """
        if self._fetched is not None and torch.get_num_threads() == 1:
            self._fetched.sum()
        return self._blocks[rows] if rows < len(self._blocks) else ()


def _blocks_by_rows(weight: _Array) -> list[tuple[_Array, ...]]:
    """Split a weight [in, out] by columns so that OpenBLAS takes each block for small: by number of rows."""
    inputs, outputs = weight.shape
    found: list[tuple[_Array, ...]] = [(), ()]
    for rows in range(2, min(_MOST_ROWS, _MOST // weight.size) + 1):
        widest = _SMALL // (rows * inputs) // _STEP * _STEP
        count = -(-outputs // max(widest, _STEP))
        width = -(-outputs // (count * _STEP)) * _STEP
        found.append(tuple(weight[:, start : start + width] for start in range(0, outputs, width)))
    return found


def _product(x: Tensor, blocks: tuple[_Array, ...]) -> Tensor:
    """Product [n, out] of [n, in] with the blocks of a weight, side by side."""
    if len(blocks) == 1:
        return torch.from_numpy(x.numpy().dot(blocks[0]))
    left = x.numpy()
    out = np.empty((len(left), sum([block.shape[1] for block in blocks])), np.float32)
    start = 0
    for block in blocks:
        stop = start + block.shape[1]
        np.matmul(left, block, out=out[:, start:stop])
        start = stop
    return torch.from_numpy(out)


@cache
def has_small_products() -> bool:
    """Whether numpy's BLAS beats torch's at small products: OpenBLAS does with AVX-512, if not on Intel's."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return "openblas" in blas.get("name", "") and has_avx512 and not is_intel()


@cache
def is_intel() -> bool:
    """Whether this is an Intel CPU whose vector registers torch's MKL uses."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
