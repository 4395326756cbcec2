"""Products with a weight: the same by torch and by numpy, whatever the shape."""

import pytest
import torch

from toolkit.ddtree.models import linear
from toolkit.ddtree.models.linear import Linear

SHAPES = [(512, 192), (768, 192), (192, 384), (2048, 192), (50, 100), (1, 3), (17, 7000)]


@pytest.fixture(params=[True, False], ids=["numpy", "torch"])
def library(request, monkeypatch):
    monkeypatch.setattr(linear, "has_small_products", lambda: request.param)
    return request.param


class TestLinear:
    @pytest.mark.parametrize("rows", [1, 2, 8, 9, 17, 40, 41])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_product_with_the_transposed_weight(self, library, shape, rows):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(shape, generator=generator)
        x = torch.randn(rows, shape[1], generator=generator)
        residual = torch.randn(rows, shape[0], generator=generator)
        expected = (x.double() @ weight.double().t()).float()
        product = Linear(weight)
        torch.testing.assert_close(product(x), expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(product.add(x, residual), expected + residual, rtol=1e-4, atol=1e-3)
        assert torch.equal(product.weight, weight)

    def test_few_rows_go_through_numpy_where_it_has_small_products(self, library, monkeypatch):
        calls = []
        product = linear._product
        monkeypatch.setattr(linear, "_product", lambda *args: calls.append(args) or product(*args))
        by_rows = {}
        for rows in (1, 2, 40, 41):
            calls.clear()
            Linear(torch.ones(64, 32))(torch.ones(rows, 32))
            by_rows[rows] = len(calls)
        assert by_rows == {1: 0, 2: int(library), 40: int(library), 41: 0}

    @pytest.mark.parametrize("intel", [True, False])
    def test_intel_s_own_library_is_left_to_itself(self, monkeypatch, intel):
        monkeypatch.setattr(linear, "is_intel", lambda: intel)
        monkeypatch.setattr(linear, "has_small_products", linear.has_small_products.__wrapped__)
        product = Linear(torch.ones(64, 32))
        assert (product._fetched is None) == intel
        assert not (intel and product._blocks)

    def test_a_large_weight_stays_with_torch(self, library, monkeypatch):
        monkeypatch.setattr(linear, "_product", lambda *args: pytest.fail("went through numpy"))
        Linear(torch.zeros(4096, 4096))(torch.zeros(2, 4096))

    def test_bfloat16_stays_with_torch(self, library):
        assert Linear(torch.ones(64, 32, dtype=torch.bfloat16))(torch.ones(8, 32).bfloat16())[0, 0] == 32
