"""What the core refuses, and in which words.

Every message names the argument, the value, the reason and the remedy. Shapes and dtypes are always checked. Values are
checked on CPU tensors, where looking is free; on an accelerator a look is a host sync, so there a NaN or an infinity
turns loss, gradient and bounds into NaN, and `check_tokens` called by hand says which token it was. Finite nonsense
(logits in place of log-probs) is found by `check_tokens` only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LOGPROB_SLACK = 1e-3
"""How far above zero rounding may carry a log-prob before it cannot be one."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to +- this. Beyond it a ratio is a defect of the data, not a signal."""

REMEDIES = {
    "advantages": "Expand one value per response to its tokens: advantages.reshape(-1, 1).expand_as(mask).",
    "": "Pass the log-softmax of the sampled tokens (not logits), sliced like the mask to the response tokens.",
}


def check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    """All tensors are floating, shaped and placed like `mask`: [tokens] or [sequences, tokens]."""
    if mask.dim() not in (1, 2):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; expected [tokens] (packed) or [sequences, tokens] (padded). "
            "Reshape all inputs alike."
        )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}; every input holds one value "
                "per token. " + REMEDIES.get(name, REMEDIES[""])
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating dtype. Call {name}.float() first.")
        if tensor.device != mask.device:
            raise ValueError(
                f"{name} is on {tensor.device} but mask is on {mask.device}. Move all inputs to one device."
            )


def check_mask(mask: Tensor) -> Tensor:
    """The mask as bool, if it is one."""
    if mask.dtype == torch.bool:
        return mask
    if mask.device.type == "cpu" and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "mask holds values other than 0 and 1; it selects tokens and cannot weigh them. "
            "Put weights into the advantages, and pass mask > 0."
        )
    return mask != 0


def check_sequence_ids(sequence_ids: Tensor | None, mask: Tensor) -> None:
    """Ids of a packed batch: one integer per token, 0 <= id < number of tokens."""
    if sequence_ids is None:
        return
    _check_integers("sequence_ids", sequence_ids, mask, "the index of the response each token belongs to.")
    if sequence_ids.device.type == "cpu" and sequence_ids.numel():
        lowest, highest = sequence_ids.aminmax()
        if lowest < 0 or highest >= sequence_ids.numel():
            raise ValueError(
                f"sequence_ids ranges over {int(lowest)}..{int(highest)}; number the responses of the batch from 0."
            )


def check_uses(uses: Tensor | None, mask: Tensor, rule: str | None) -> None:
    """How often each token was trained on before: one whole number per token, none of them negative.

    `rule`: the setting for used tokens, if there is one. They come together: neither is ignored in silence.
    """
    if rule is not None and uses is None:
        raise ValueError(
            f"{rule} is a bound for tokens that were trained on before, so it needs uses=: how often each token was. "
            "Pass them, or leave it out; the objectives brake and push_once have such a bound by default."
        )
    if uses is None:
        return
    if rule is None:
        raise ValueError(
            "uses= is given, but nothing asks for it, so it would be ignored. Choose objective='brake' or 'push_once', "
            "set brake or used_low in ClipSettings, or leave uses= out."
        )
    meaning = "how often each token was trained on before this update. Expand one value per response to its tokens: "
    _check_integers("uses", uses, mask, f"{meaning}uses.reshape(-1, 1).expand_as(mask).")
    can_look = uses.dtype != torch.bool and uses.device.type == "cpu" and uses.numel() > 0
    if can_look and uses.numpy().min() < 0 and bool((chosen := uses[mask != 0]).lt(0).any()):
        raise ValueError(
            f"uses holds {int(chosen.min())}, but a token cannot have been trained on less than 0 times. Count the "
            "updates that used the token before this one."
        )


def _check_integers(name: str, given: Tensor, mask: Tensor, meaning: str) -> None:
    """One whole number per token, placed like the mask."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is a {type(given).__name__}; expected a tensor of integers, one for each token.")
    if given.shape != mask.shape or given.is_floating_point() or given.is_complex():
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} and dtype {given.dtype}; expected integers of shape "
            f"{tuple(mask.shape)}: {meaning}"
        )
    if given.device != mask.device:
        raise ValueError(f"{name} is on {given.device} but mask is on {mask.device}. Move all inputs to one device.")


def check_bounds(low: float, high: float) -> None:
    """Two bounds on the ratio, with 1 between them."""
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low={low}, high={high} do not enclose 1. They are bounds on the ratio, not epsilons: an epsilon of 0.2 "
            "is low=0.8, high=1.2."
        )


def check_positive(**options: float) -> None:
    """Options of an objective that have to be positive."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive. Leave it out for the default.")


def check_not_empty(mask: Tensor, remedy: str) -> None:
    """At least one token is selected (CPU only)."""
    if mask.device.type == "cpu" and not mask.count_nonzero():
        raise ValueError(f"mask selects none of its {mask.numel()} tokens, so there is nothing to compute. {remedy}")


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """The values under the mask and 0 elsewhere, whatever stood there. NaN and infinity under the mask stay."""
    if values.device.type == "cpu" and _all_finite(values.detach()):
        return values * mask.view(torch.int8)  # on CPU several times faster than a select
    return torch.where(mask, values, 0.0)


def holds(operator: Callable[..., Tensor], values: Tensor, other: Tensor | float) -> Tensor:
    """Where operator(values, other) holds, for torch.gt, torch.lt and the like: bool, shaped like the values.

    On CPU it is compared in the values' own dtype, as vectors, and takes half as long.
    """
    values = values.detach()
    if values.device.type != "cpu":
        return operator(values, other)
    return operator(values, other, out=torch.empty_like(values)).bool()


def check_finite(name: str, values: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> bool:
    """No NaN or infinity under the mask: the first one is named by its sequence. True if there is none anywhere."""
    if _all_finite(values.detach()):
        return True
    masked = torch.where(mask, values.detach(), 0.0)
    if _all_finite(masked):
        return False
    where, value = _first(masked, ~torch.isfinite(masked), sequence_ids)
    raise ValueError(
        f"{name} is {value} in {where}. Every token under the mask needs a finite value: mask that token out, or drop "
        "the sequence and find out what produced it."
    )


def check_not_negative(name: str, values: Tensor, mask: Tensor) -> None:
    """No value below 0 under the mask."""
    if not values.numel() or values.min() >= 0:
        return
    masked = zero_outside(mask, values)
    if masked.min() < 0:
        where, value = _first(masked, masked < 0, None)
        raise ValueError(
            f"{name} is {value} in {where}, but a ratio of probabilities is never negative. This looks like a "
            "log-ratio: call .exp() on it."
        )


def check_logprobs(name: str, values: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> None:
    """Finite and not above zero under the mask."""
    check_finite(name, values, mask, sequence_ids)
    masked = zero_outside(mask, values.detach())
    if masked.numel() and masked.max() > LOGPROB_SLACK:
        where, value = _first(masked, masked > LOGPROB_SLACK, sequence_ids)
        raise ValueError(
            f"{name} is {value} in {where}, but a log-probability is at most 0. Pass log-softmax outputs of the "
            "sampled tokens, not logits, probabilities or negative log-likelihoods."
        )


def check_tokens(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> None:
    """Every value check of `policy_loss`, on any device. Reads values on the host: on CUDA this waits for the GPU."""
    mask = check_mask(mask)
    check_logprobs("logprobs", logprobs, mask, sequence_ids)
    check_logprobs("behavior_logprobs", behavior_logprobs, mask, sequence_ids)
    check_finite("advantages", advantages, mask, sequence_ids)
    if entropy is not None:
        check_finite("entropy", entropy, mask, sequence_ids)


def _all_finite(values: Tensor) -> bool:
    """One pass: a NaN anywhere makes both extremes NaN, an infinity is one of them."""
    if not values.numel():
        return True
    lowest, highest = values.aminmax()
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))


def _first(values: Tensor, bad: Tensor, sequence_ids: Tensor | None) -> tuple[str, float]:
    """Where the first bad value sits, in words, and the value."""
    position = bad.nonzero()[0]
    value = float(values[tuple(position)])
    if values.dim() == 2:
        return f"sequence {int(position[0])}, token {int(position[1])}", value
    if sequence_ids is not None:
        return f"sequence {int(sequence_ids[position])}, packed token {int(position)}", value
    return f"packed token {int(position)}", value


def zero_or_nan(source: Tensor) -> Tensor:
    """0 where the source is finite, NaN where it is NaN or infinite. Detach the source to keep it out of gradients.

    A clamp, a comparison or a select turns NaN and infinity into numbers that look plausible. Code that may not look at
    values adds this of what went in to what comes out. Kernels do the same in their own words.
    """
    return 0 * source


def working_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything coarser is worked on in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
