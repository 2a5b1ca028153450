"""Limits of rounding: wide enough for sums in any order, and no wider than they must be."""

import pytest
import torch

from tests.rounding import carried, of_sum, rounding

pytestmark = pytest.mark.numeric
ORDERS = ("one after another", "in 16 lanes", "backwards")


def summed(terms, order):
    """The sum in float32, with each partial sum rounded."""
    if order == "in 16 lanes":
        return terms.view(-1, 16).cumsum(0)[-1].sum()
    total = torch.tensor(0.0)
    for term in terms.flip(0) if order == "backwards" else terms:
        total = total + term
    return total


def products(terms=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((20, terms), (terms, 30))]


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_in_any_order_is_within_its_limit(order):
    for seed in range(20):
        terms = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        assert abs(float(summed(terms, order)) - float(terms.double().sum())) < of_sum(terms) < 1e-4


def test_products_are_within_what_is_carried_and_the_limit_is_of_their_size():
    a, b = products()
    limit = carried(lambda: a @ b)
    errors = (sum(a[:, i, None] * b[i] for i in range(512)).double() - a.double() @ b.double()).abs()
    assert limit / 20 < float(errors.max()) < limit  # one after another is the order with the largest errors


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 2.0**16), (torch.float64, 2.0**-29)])
def test_the_limit_follows_the_precision(dtype, factor):
    a = products(terms=16)[0] / 16
    single, other = carried(lambda: a * a.sin()), carried(lambda: a.to(dtype) * a.to(dtype).sin())
    assert 0.2 < other / single / factor < 5
    assert rounding(3, 2.0, dtype) == pytest.approx(rounding(3, 2.0) * factor)


def test_gradients_are_carried_too_and_what_only_moves_is_exact():
    a, b = (x.requires_grad_() for x in products())
    limits = carried(lambda: [*torch.autograd.grad((a @ b).tanh().sum(), (a, b)), a.T.contiguous()])
    assert 0 < limits[0] < 1e-3
    assert limits[2] == 0


def test_a_wrong_product_is_outside():
    a, b = products()
    wrong = b.clone()
    wrong[3, 7] *= 1.001
    assert float((a @ wrong - a @ b).abs().max()) > carried(lambda: a @ b)
