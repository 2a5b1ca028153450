"""Truncated sampling as a loop over Python's floats, for the tests of all engines."""

import math

import torch


def by_loop(logits, sampling):
    """Which tokens are left, and their probability: min_p, then top_k, then top_p, with all that equal the last one."""
    best = max(logits)
    shares = [math.exp(one - best) for one in logits]
    whole = sum(shares)
    left = {token for token, share in enumerate(shares) if share >= sampling.min_p}
    ranked = sorted(left, key=lambda token: -shares[token])
    if sampling.top_k and len(ranked) > sampling.top_k:
        last = shares[ranked[sampling.top_k - 1]]
        left = {token for token in left if shares[token] >= last}
    if sampling.top_p < 1:
        ranked, held = sorted(left, key=lambda token: -shares[token]), 0.0
        goal = sampling.top_p * sum(shares[token] for token in left)
        for token in ranked:
            held += shares[token]
            if held >= goal:
                left = {other for other in left if shares[other] >= shares[token]}
                break
    return left, sum(shares[token] for token in left) / whole


@torch.no_grad()
def exact_rows(model, context, tokens, temperature):
    """Log-distributions that predict these tokens, in float64 from the logits of one full pass."""
    logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).tolist()
