"""BAPO: off-policy reinforcement learning of language models with adaptive clip bounds (arXiv:2510.18927).

    from bapo import policy_loss
    out = policy_loss(logprobs, behavior_logprobs, advantages, mask)    # four tensors in
    out.loss.backward()                                                 # loss out; bounds and metrics beside it

Names load on first use, so that `import bapo` alone needs no torch. It imports nothing at all: after `python -m bapo`,
Python looks in the current directory first, until `__main__` has stopped that.
"""

TYPE_CHECKING = False  # as typing has it; type checkers take it for true
if TYPE_CHECKING:
    from typing import Any

    from bapo.core.advantages import to_tokens
    from bapo.core.bounds import ClipBounds, StopReason, bounds_from_table, signal_table, solve_bounds
    from bapo.core.logprobs import token_logprobs
    from bapo.core.loss import PolicyLoss, policy_loss, update_table
    from bapo.core.objectives import OBJECTIVES
    from bapo.core.settings import ClipSettings

__version__ = "0.1.0"

_HOME = {
    "ClipSettings": "bapo.core.settings",
    "ClipBounds": "bapo.core.bounds",
    "StopReason": "bapo.core.bounds",
    "solve_bounds": "bapo.core.bounds",
    "signal_table": "bapo.core.bounds",
    "bounds_from_table": "bapo.core.bounds",
    "policy_loss": "bapo.core.loss",
    "PolicyLoss": "bapo.core.loss",
    "update_table": "bapo.core.loss",
    "token_logprobs": "bapo.core.logprobs",
    "to_tokens": "bapo.core.advantages",
    "OBJECTIVES": "bapo.core.objectives",
}

__all__ = [
    "OBJECTIVES",
    "ClipBounds",
    "ClipSettings",
    "PolicyLoss",
    "StopReason",
    "__version__",
    "bounds_from_table",
    "policy_loss",
    "signal_table",
    "solve_bounds",
    "to_tokens",
    "token_logprobs",
    "update_table",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> "Any":
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bapo' has no attribute {name!r}")
