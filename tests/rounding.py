"""How far rounding may take a result: limits for comparisons that hold on every processor.

Processors add up in different orders and widths, so two sound computations of one number differ. How far they may is
derived, not measured on one machine. With u = 2^-24 in float32 (`unit`):

    one operation    u |x| at most, and u |x| / sqrt(3) as a standard deviation; functions such as exp: twice that
    a sum of n       sqrt(n / 6) u |x|, where |x| is the root of the sum of squares: the standard deviation, if terms of
                     random sign are added one after another. Each partial sum s_k is rounded, and sum s_k^2 is about
                     n |x|^2 / 2, and a rounding has a variance of u^2 / 3. In lanes or blocks, it is less

`rounding` counts operations, for results of a few of them, and `of_sum` terms. Through a model, or its gradients,
errors grow and shrink on their way. There `carried` lets every operation err by chance, with such a deviation, and sees
how far the result moves (Monte Carlo arithmetic: Parker, UCLA 1997). What it injects outweighs the errors of the
processor at hand, so the limit follows from the precision, the lengths of the sums and the sizes of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

BOTH = 2
"""Two computations are compared, and each may be so far from the truth."""
FEW = 4
"""How many times the root mean square of the errors seen the largest one counts at least."""
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "dot", "mv"}
SUMS = {"sum", "mean", "embedding_dense_backward", "index_add", "scatter_add"}
ONCE = {"add", "sub", "rsub", "mul", "div", "sqrt", "reciprocal", "addcmul", "addcdiv", "lerp", "_to_copy"}
FUNCTIONS = {
    *("exp", "expm1", "log", "log1p", "pow", "rsqrt", "cos", "sin", "sigmoid", "silu", "tanh", "gelu"),
    *("silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward"),
}


def unit(dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def rounding(operations: float, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The limit for two computations of a value of this size, each of so many operations one after another."""
    return BOTH * operations * unit(dtype) * size


def of_sum(terms: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """The limit for two sums of these terms."""
    return BOTH * FEW * math.sqrt(terms.numel() / 6) * unit(dtype) * float(terms.detach().double().norm())


class Erring(TorchDispatchMode):
    """Inside, every operation errs by chance, with its standard deviation. What only moves numbers is exact."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        kind, in_place = name.removesuffix("_"), name.endswith("_")
        out = func(*args, **kwargs)
        if not torch.is_tensor(out) or not out.is_floating_point():
            return out
        if (error := deviation(kind, func, args, kwargs, out)) is None:
            return out
        error = torch.where(error.isfinite(), error, 0.0)  # a mask of -inf is exact
        moved = (out.double() + torch.randn(out.shape, generator=self.chance) * error).to(out.dtype)
        return out.copy_(moved) if in_place else moved


def deviation(kind: str, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
    """The standard deviation of the result of one operation, in float64; None where it is exact."""
    u, size = unit(out.dtype) / math.sqrt(3), out.double().abs()
    wide = unit(torch.promote_types(out.dtype, torch.float32))  # 16-bit sums are taken in float32
    if kind in ONCE:
        return u * size if kind != "_to_copy" or _narrower(args[0].dtype, out.dtype) else None
    if kind in FUNCTIONS:
        return 2 * u * size
    if kind in PRODUCTS | SUMS:  # the same function of squares is the sum of squares
        squares = func(*(x.double() ** 2 if _numbers(x) else x for x in args), **_without_dtype(kwargs))
        terms = _terms(kind, args, out)
        return u * size + math.sqrt(terms / 6) * wide * (squares / (terms if kind == "mean" else 1)).sqrt()
    if kind in ("_softmax", "_safe_softmax", "_log_softmax"):
        p = size if kind != "_log_softmax" else out.double().exp()
        spread = wide * (2 + math.sqrt(out.shape[args[1]] / 6) * p.norm(dim=args[1], keepdim=True))
        return 2 * u * size + spread * (1.0 if kind == "_log_softmax" else p)
    if kind in ("_softmax_backward_data", "_log_softmax_backward_data"):  # p (g - sum(p g)) and g - p sum(g)
        grad, given, dim = args[0].double(), args[1].double(), args[2]
        p, inner = (given, grad * given) if kind == "_softmax_backward_data" else (given.exp(), grad)
        summed = (2 + math.sqrt(out.shape[dim] / 6)) * inner.norm(dim=dim, keepdim=True)
        return 2 * u * size + wide * p * (summed + 2 * (grad.abs() if inner is not grad else 0.0))
    if kind in ("linalg_vector_norm", "logsumexp"):  # relative to the sum of squares; absolute
        return 2 * u * size + wide * math.sqrt(_terms(kind, args, out) / 6) * (1.0 if kind == "logsumexp" else size)
    return None


def _numbers(x: Any) -> bool:
    return torch.is_tensor(x) and x.is_floating_point()


def _narrower(before: torch.dtype, after: torch.dtype) -> bool:
    return before.is_floating_point and unit(after) > unit(before)


def _without_dtype(kwargs: Any) -> Any:
    return {name: value for name, value in kwargs.items() if name != "dtype"}


def _terms(kind: str, args: Any, out: Tensor) -> int:
    """How many terms a sum has."""
    if kind in PRODUCTS:
        return int(args[1].shape[-1] if kind in ("addmm", "baddbmm") else args[0].shape[-1])
    return max(1, math.ceil(args[0].numel() / max(1, out.numel())))


def carried(
    compute: Callable[..., Any],
    *,
    given: Callable[[], Any] | None = None,
    draws: int = 3,
    size: Callable[[Tensor], Tensor] = torch.max,
) -> Any:
    """The limit for two computations of each number or tensor that `compute` returns: for the largest of its
    differences, or for another `size` of them. In the same form, which may have dictionaries and lists.

    `given`: makes what `compute` begins with, such as a learner, without an error, each time anew.
    """
    begin = [(given(),) if given else () for _ in range(1 + draws)]
    plain, erred = compute(*begin[0]), []
    for seed in range(draws):
        with sdpa_kernel(SDPBackend.MATH), Erring(seed):
            erred.append(compute(*begin[1 + seed]))
    return _farthest(plain, erred, size)


def _farthest(plain: Any, erred: list[Any], size: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(plain, dict):
        return {name: _farthest(value, [other[name] for other in erred], size) for name, value in plain.items()}
    if isinstance(plain, list | tuple) and not all(isinstance(value, int | float) for value in plain):
        return [_farthest(value, [other[at] for other in erred], size) for at, value in enumerate(plain)]
    if plain is None or isinstance(plain, str):
        return None
    here, *there = (_float64(value) for value in (plain, *erred))
    nothing = here.isnan()  # a mean of nothing stays one
    assert all(torch.equal(other.isnan(), nothing) for other in there), "an error of rounding made a number NaN"
    differences = torch.stack([(other - here).abs().masked_fill(nothing, 0.0) for other in there])
    found = max(float(size(difference)) for difference in differences)
    if size is torch.max:  # a few numbers may all have been lucky
        found = max(found, FEW * float(differences.square().mean().sqrt()))
    if here.numel() == 1:  # one may have been so in every draw; it is rounded once at least
        once = unit(plain.dtype if torch.is_tensor(plain) else torch.float32)
        found = max(found, once * float(here.abs().nan_to_num().sum()))
    return BOTH * found


def _float64(value: Any) -> Tensor:
    return (value.detach() if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)).double()


def logprob_limit(learner: Any, batches: Any, *, size: Callable[[Tensor], Tensor] = torch.max) -> float:
    """The limit for log-probs of these tokens, of sampler and learner: two computations of one number."""

    @torch.no_grad()
    def logprobs() -> Tensor:
        return torch.cat([learner.logprobs(batch)[0].float() for batch in batches])

    limit: float = carried(logprobs, draws=2, size=size)
    return limit
