"""Products with a model's weights, by the library that is fastest at the row counts of a draft tree.

A tree has few rows. On a CPU with AVX-512, numpy's OpenBLAS has kernels for small products that take half to
nine tenths of the time that torch's MKL does, on one thread. A single row is faster in MKL.

A small model's weights do not fit the second-level cache, and the blocks of a product bring them there at a
quarter of the speed of one pass over them. So on one thread such a pass precedes each product.
"""

from __future__ import annotations

from functools import cache

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
        self._fetched = stored.view(-1) if on_host and stored.numel() <= _MOST_FETCHED else None
        self._array = self._weight.detach().numpy() if on_host and has_small_products() else None

    @property
    def weight(self) -> Tensor:
        """The weight, [out, in]."""
        return self._weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        self._fetch()
        weight = self._if_small(x.shape[0])
        return torch.mm(x, self._weight) if weight is None else torch.from_numpy(_product(x.numpy(), weight))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add a residual: residual + x @ weight.T, [n, out]."""
        self._fetch()
        weight = self._if_small(x.shape[0])
        if weight is None:
            return torch.addmm(residual, x, self._weight)
        return torch.from_numpy(_product(x.numpy(), weight)).add_(residual)

    def _fetch(self) -> None:
        """Bring the weight into the cache; several threads would each need a part of it."""
        if self._fetched is not None and torch.get_num_threads() == 1:
            self._fetched.sum()

    def _if_small(self, rows: int) -> _Array | None:
        """The weight for numpy, if a product with so many rows is faster there."""
        small = 1 < rows <= _MOST_ROWS and rows * self._weight.numel() <= _MOST
        return self._array if small else None


def _product(x: _Array, weight: _Array) -> _Array:
    """Product [n, out], in blocks of columns that OpenBLAS takes for small."""
    (rows, inputs), outputs = x.shape, weight.shape[1]
    widest = max(_SMALL // (rows * inputs), _STEP)
    blocks = 1 if outputs <= widest else -(-outputs // (widest - widest % _STEP))
    width = -(-outputs // (blocks * _STEP)) * _STEP
    out = np.empty((rows, outputs), np.float32)
    for start in range(0, outputs, width):
        np.matmul(x, weight[:, start : start + width], out=out[:, start : start + width])
    return out


@cache
def has_small_products() -> bool:
    """Whether numpy's BLAS has kernels for small products on this CPU: OpenBLAS does with AVX-512."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return "openblas" in blas.get("name", "") and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
