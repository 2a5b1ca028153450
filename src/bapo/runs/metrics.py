"""Every metric, declared once with a sentence. A key that is not declared here cannot be logged.

A line of `metrics.jsonl` has a `kind`: `rollout` (once per step), `update` (once per optimizer step) or `eval`; in a
supervised run `imitation` (once per optimizer step) or `held_out`.
Wall-clock figures go to `timing.jsonl`, so that the metrics of a run are a function of its configuration alone.
`python -m bapo.runs.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUADRANT = (
    "Share of the gradient mass r|A| on tokens of {p} probability and {a} advantage that the clip {fate}: {effect}."
)
_EFFECT = {
    ("high", "high"): "pushes entropy down",
    ("high", "low"): "pushes entropy up",
    ("low", "high"): "pushes entropy up",
    ("low", "low"): "pushes entropy down",
}

EVERY_LINE = {
    "kind": "What the line is about: rollout, update or eval; in a supervised run imitation or held_out.",
    "step": "Rollout step, counted from 1; in a supervised run the update.",
    "version": "Updates the learner has taken.",
}

UPDATE = {
    "loss": "Policy loss of the update.",
    "grad_norm": "Gradient norm before clipping.",
    "lr": "Learning rate used.",
    "tokens": "Response tokens trained on.",
    "entropy": "Mean entropy of the distributions the tokens came from, under the current policy, in nats.",
    "share": "Positive tokens' share of the signal at the bounds in use.",
    "share_unclipped": "The same share before any clip.",
    "share_fixed": "The same share at the fixed clip (0.8, 1.2).",
    "share_at_start": "The share at the first candidate bounds of BAPO's search.",
    "share_at_end": "The share at the last candidate bounds of BAPO's search.",
    "negative_weight": "Factor on negative tokens, where remainder = weigh makes up what the bounds could not.",
    "stop": "Why the search ended: 0 start, 1 raising high, 2 raising low, 3 end of path, 4 no signal.",
    "clip_low": "Lower bound on the ratio.",
    "clip_high": "Upper bound on the ratio.",
    "positive_tokens": "Share of tokens with positive advantage.",
    "negative_tokens": "Share of tokens with negative advantage.",
    "clip_fraction": "Share of signed tokens whose gradient the clip blocked.",
    "clip_fraction_positive": "The same among positive tokens.",
    "clip_fraction_negative": "The same among negative tokens.",
    **{
        f"{p}_prob_{a}_adv_{fate}": _QUADRANT.format(p=p, a=a, fate=verb, effect=_EFFECT[p, a])
        for p in ("high", "low")
        for a in ("high", "low")
        for fate, verb in (("retained", "retained"), ("blocked", "blocked"))
    },
    "predicted_entropy_change": "Change of entropy per unit step on the logits that the Entropy-Clip Rule predicts.",
    "ratio_p01": "1st percentile of the ratio of current to sampling probability.",
    "ratio_p10": "10th percentile of that ratio.",
    "ratio_p50": "Median of that ratio.",
    "ratio_p90": "90th percentile of that ratio.",
    "ratio_p99": "99th percentile of that ratio.",
    "ratio_max": "Largest ratio.",
    "ratio_histogram": "Tokens by ratio, in the 15 bins that LOG_RATIO_EDGES of bapo/types.py cuts log r into.",
    "ratio_prob": "Mean probability of the tokens in each of these bins under the current policy; 0 in an empty bin.",
    "ratio_entropy": "Mean entropy of the distributions they came from, likewise, in nats.",
    "kl": "Estimate of KL(sampling policy || current policy) per token: mean of r - 1 - log r.",
    "ess": "Effective sample size as a share of the tokens: (sum r)^2 / (n sum r^2); 1 on-policy.",
    "staleness_mean": "Mean number of updates between sampling and use, per token.",
    "staleness_max": "Largest number of updates between sampling and use; never above offpolicy.max_staleness.",
    "staleness_histogram": "Tokens by number of updates between sampling and use; the last bin holds all older ones.",
    "groups": "Groups in the update, replayed ones included.",
}

ROLLOUT = {
    "reward": "Mean reward of the responses finished in this step, before filtering; absent if none finished.",
    "length": "Mean length of those responses in tokens.",
    "length_correct": "Mean length of those with reward above one half.",
    "length_wrong": "Mean length of the others.",
    "truncated": "Share of those responses that hit the length limit.",
    "reward_failures": "Responses the verifier failed on. They are logged in failures.jsonl and never trained on.",
    "rollout/admitted": "New groups started in this step.",
    "rollout/sampled_tokens": "Tokens sampled.",
    "rollout/returned_tokens": "Tokens in the groups finished in this step.",
    "rollout/wasted_tokens": "Tokens in groups given up.",
    "rollout/finished_groups": "Groups finished.",
    "rollout/dropped_groups": "Groups given up: too old.",
    "rollout/dropped": "Responses in the groups given up.",
    "rollout/resumed": "Parked responses continued.",
    "rollout/forced": "Responses completed beyond the token budget because they would have grown too old.",
    "rollout/parked": "Responses begun and not complete, after the step.",
    "rollout/waiting": "Responses admitted and not begun, after the step.",
    "rollout/held_tokens": "Tokens in groups not yet returned, after the step.",
}

EVAL = {
    "eval/avg": "avg@k on held-out problems: mean success of k samples each.",
    "eval/avg_low": "Lower end of its 95% interval.",
    "eval/avg_high": "Upper end of its 95% interval.",
    "eval/pass": "Unbiased pass@k: chance that one of k samples succeeds.",
    "eval/pass_low": "Lower end of its 95% interval.",
    "eval/pass_high": "Upper end of its 95% interval.",
    "eval/entropy": "Mean entropy per sampled token, in nats.",
    "eval/length": "Mean response length in tokens.",
    "eval/length_correct": "Mean length of the successes.",
    "eval/length_wrong": "Mean length of the failures.",
    "eval/truncated": "Share of responses that hit the length limit.",
    "eval/failures": "Responses the verifier failed on; they count as wrong.",
    "eval/problems": "Problems evaluated.",
    "eval/temperature": "Temperature sampled with; those of eval.also_at have lines of their own.",
}

IMITATION = {
    "imitation/loss": "Mean negative log-prob of the update's response tokens, in nats.",
    "imitation/sequences": "Demonstrations in the update.",
    "imitation/epoch": "Passes over the demonstrations completed.",
}

HELD_OUT = {
    "held_out/loss": "Mean negative log-prob of the response tokens of held-out demonstrations, in nats.",
    "held_out/perplexity": "Exponential of that loss: so many equally likely tokens would be as hard to predict.",
    "held_out/accuracy": "Share of those tokens that were the most likely one.",
    "held_out/tokens": "Response tokens measured.",
}

BUFFER = {
    "buffer/adds": "Rollouts added.",
    "buffer/draws": "Draws that returned groups; each is one update.",
    "buffer/added": "Groups admitted.",
    "buffer/filtered": "Groups refused for want of a signal: all rewards equal, or no token in any response.",
    "buffer/fresh": "Groups drawn in a fresh pass, counted once per pass.",
    "buffer/replayed": "Groups drawn again after their fresh passes, counted once per draw.",
    "buffer/replay_short": "Replay places left empty because too few groups were eligible.",
    "buffer/retired": "Groups released after their last use.",
    "buffer/expired": "Groups released by age: beyond max_staleness, or waiting for replay and beyond replay_max_age.",
    "buffer/evicted": "Groups released because more than the capacity were held.",
    "buffer/lost_fresh": "Those of expired and evicted that had fresh passes to come.",
    "buffer/held": "Now: groups held.",
    "buffer/held_tokens": "Now: response tokens in them.",
    "buffer/to_visit": "Now: visits left in the fresh passes over the latest rollout; 0 when it is time for the next.",
}

TIMING = {
    "seconds": "Wall-clock time of the step.",
    "tokens_per_second": "Tokens sampled and trained on per second of the step.",
    "rollout_seconds": "Time spent sampling.",
    "learn_seconds": "Time spent on updates.",
}

_SHARED = {key: UPDATE[key] for key in ("tokens", "entropy", "grad_norm", "lr")}
"""Metrics that supervised updates have in common with others."""

METRICS: dict[str, str] = EVERY_LINE | ROLLOUT | BUFFER | UPDATE | EVAL | IMITATION | HELD_OUT


def check_declared(metrics: Mapping[str, Any]) -> None:
    """Refuse keys nobody explained."""
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        raise KeyError(f"metrics without a sentence in bapo/runs/metrics.py: {', '.join(unknown)}")


def markdown() -> str:
    """docs/metrics.md."""
    sections = {
        "Every line": EVERY_LINE,
        "`rollout` lines: once per step": ROLLOUT | BUFFER,
        "`update` lines: once per optimizer step": UPDATE,
        "`eval` lines": EVAL,
        "`imitation` lines of a supervised run: once per optimizer step": IMITATION | _SHARED,
        "`held_out` lines of a supervised run": HELD_OUT,
        "`timing.jsonl`: wall clock, once per step": TIMING,
    }
    text = [
        "# Metrics",
        "",
        "Written by `python -m bapo.runs.metrics`; every key of `metrics.jsonl` and what it means.",
        "",
    ]
    for title, keys in sections.items():
        text += [f"## {title}", "", "| key | meaning |", "|---|---|"]
        text += [f"| `{key}` | {sentence.replace('|', chr(92) + '|')} |" for key, sentence in keys.items()]
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    print(markdown(), end="")
