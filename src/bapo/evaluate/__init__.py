"""How good a policy is on a set of problems. `estimates.py` has the arithmetic, `sampling.py` makes the responses."""

from bapo.evaluate.estimates import SOLVED, Estimate, avg_at_k, maj_at_k, pass_at_k
from bapo.evaluate.sampling import Evaluation, Response, evaluate, mean, sample

__all__ = [
    "SOLVED",
    "Estimate",
    "Evaluation",
    "Response",
    "avg_at_k",
    "evaluate",
    "maj_at_k",
    "mean",
    "pass_at_k",
    "sample",
]
