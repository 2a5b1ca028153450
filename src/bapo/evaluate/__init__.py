"""How good a policy is on a set of problems. `estimates.py` has the arithmetic, `sampling.py` makes the responses."""

from bapo.evaluate.estimates import avg_at_k, maj_at_k, pass_at_k
from bapo.evaluate.sampling import Evaluation, evaluate

__all__ = ["Evaluation", "avg_at_k", "evaluate", "maj_at_k", "pass_at_k"]
