"""Every metric and the sentence that explains it. A key that is not declared here cannot be logged.

Each line of `metrics.jsonl` has a `kind`: `rollout` (once per step), `update` (once per optimizer step) or `eval`; in a
supervised run `imitation` (once per optimizer step) or `held_out`; in both `skipped`, for an update whose numbers are
not finite. Wall-clock figures go to `timing.jsonl`, so that the metrics of a run depend on its configuration alone.
`python docs/metrics.py` prints docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

EVERY_LINE = {
    "kind": "What the line is about: rollout, update, skipped or eval; in a supervised run imitation, skipped or "
    "held_out.",
    "step": "Step of the run, counted from 1; in a supervised run the number of the update.",
    "version": "Number of updates the learner has taken, including those it skipped.",
}

UPDATE = {
    "loss": "Policy loss of the update; with learn.kl or learn.entropy, penalty and bonus are included, multiplied by "
    "their weights.",
    "grad_norm": "Gradient norm before clipping.",
    "lr": "Learning rate used.",
    "tokens": "Response tokens trained on.",
    "entropy": "Mean entropy of the next-token distributions at these tokens, under the current policy, in nats.",
    "entropy_weight": "Weight of the entropy bonus in this update; present if learn.entropy_target is set.",
    "share": "Share of the signal that positive tokens hold at the bounds in use, by the measure that BAPO searches "
    "by; for other objectives, by the gradient measure.",
    "share_unclipped": "The same share without a clip.",
    "share_fixed": "The same share at the fixed clip (0.8, 1.2).",
    "share_at_start": "The share at the first candidate bounds of BAPO's search.",
    "share_at_end": "The share at the last candidate bounds of BAPO's search.",
    "negative_weight": "Factor on negative tokens with which remainder = weigh closes the gap that the bounds left.",
    "stop": "Why the search for bounds ended: 0 start, 1 raising high, 2 raising low, 3 end of path, 4 no signal.",
    "clip_low": "Lower bound on the ratio.",
    "clip_high": "Upper bound on the ratio.",
    "drift": "The brake: how far used negative tokens have fallen since they were sampled, mean of -log r, in nats.",
    "used_low": "The brake: lower bound on the ratio of tokens that were trained on before.",
    "positive_tokens": "Share of tokens with positive advantage.",
    "negative_tokens": "Share of tokens with negative advantage.",
    "clip_fraction": "Share of the tokens with non-zero advantage whose gradient the clip blocked.",
    "clip_fraction_positive": "The same among positive tokens.",
    "clip_fraction_negative": "The same among negative tokens.",
    **{
        f"{p}_prob_{a}_adv_{fate}": f"Share of the gradient mass r|A| on tokens of {p} probability and {a} advantage "
        f"that the clip {fate}. This quadrant pushes entropy {'down' if p == a else 'up'}."
        for p, a, fate in product(("high", "low"), ("high", "low"), ("retained", "blocked"))
    },
    "predicted_entropy_change": "Change of entropy that the Entropy-Clip Rule predicts per unit step on the logits.",
    "ratio_p01": "1st percentile of the ratio r of a token's current probability to the one it was sampled with.",
    "ratio_p10": "10th percentile of that ratio.",
    "ratio_p50": "Median of that ratio.",
    "ratio_p90": "90th percentile of that ratio.",
    "ratio_p99": "99th percentile of that ratio.",
    "ratio_max": "Largest such ratio.",
    "ratio_histogram": "Number of tokens by ratio, in the 15 bins of log r that LOG_RATIO_EDGES in bapo/types.py sets.",
    "ratio_prob": "Mean probability of the tokens in each of these bins under the current policy; 0 in an empty bin.",
    "ratio_entropy": "Mean entropy at the tokens in each of these bins, under the current policy, in nats; 0 if empty.",
    "kl": "Estimate of KL(sampling policy || current policy) per token: mean of r - 1 - log r.",
    "kl_reference": "Estimate of KL(current policy || reference) per token: mean of q - 1 - log q, where q is the "
    "ratio of a token's probability under the reference to its current one; present if learn.kl or learn.kl_in_reward "
    "is set.",
    "kl_response": "Mean over responses of their log-prob when they were sampled minus that under the reference, in "
    "nats: learn.kl_in_reward times this is taken from rewards. Present with kl_reference.",
    "ess": "Effective sample size as a share of the tokens: (sum r)^2 / (n sum r^2); 1 on-policy.",
    "response_ess": "The same over responses, with products of r over each; present if learn.ess_reference is set.",
    "staleness_mean": "Mean number of updates between sampling and use, per token.",
    "staleness_max": "Largest number of updates between sampling and use; never above offpolicy.max_staleness.",
    "staleness_histogram": "Number of tokens by updates between sampling and use; the last bin holds all older tokens.",
    "use_histogram": "Number of tokens by how often they were trained on before: never, 1, 2 to 3, 4 to 7, 8 or more.",
    "use_positive": "Mean log r of the positive tokens in each of these bins; 0 in an empty bin.",
    "use_negative": "Mean log r of the negative tokens in each of these bins; 0 in an empty bin.",
    "use_retained": "Share of the negative tokens in each of these bins whose gradient the clip retained.",
    "use_below": "Share of the negative tokens in each of these bins that were retained although r < 1: the update "
    "pushes them further below the probability they were sampled with.",
    "anchor_tokens": "Fresh tokens, which the weights before the update sampled. If none, the next three are absent.",
    "anchor_gap": "Mean of |log b - log pi| over fresh tokens, in nats: the sampler's log-prob against the learner's. "
    "Rounding alone should explain it; beyond learn.anchor_limit the run stops.",
    "anchor_gap_max": "The largest of these differences.",
    "anchor_bias": "Mean of log b - log pi over fresh tokens, with signs.",
    "groups": "Groups in the update, including replayed ones.",
}

EACH_REWARD = "reward/"
"""How the key of one of several rewards begins; its name follows."""

ROLLOUT = {
    "reward": "Mean reward of the responses finished in this step, before filtering; absent if none finished.",
    f"{EACH_REWARD}NAME": "If task.reward names several: the mean of each over the responses that it applies to, "
    "without its weight.",
    "length": "Mean length of those responses in tokens.",
    "length_correct": "Mean length of those of them with a reward above one half.",
    "length_wrong": "Mean length of the others.",
    "truncated": "Share of those responses that the length limit cut off.",
    "turns": "Mean turns of those responses; present with task.environment, like the next six.",
    "observed": "Mean tokens of those responses that the environment said. No other number of tokens counts them.",
    "endings/answered": "Episodes of this step that their environment ended, whatever their reward.",
    "endings/turns": "Episodes that the limit of turns ended.",
    "endings/context": "Episodes that the limit of tokens ended: rollout.max_tokens, or the model's context.",
    "endings/environment_failed": "Episodes whose environment failed on every try. Their groups are dropped.",
    "endings/grader_failed": "Episodes that got no reward, because it could not be computed. Their groups leave.",
    "kept_mass": "Mean probability that rollout.top_p, top_k and min_p kept at a token of those responses; present if "
    "one of them is set.",
    "reward_failures": "Responses on which the verifier failed. They are in failures.jsonl and are never trained on.",
    "judge_read": "Tokens that the judge read for the rewards of this step, whether it was asked now or before.",
    "judge_written": "Tokens that the judge wrote for them.",
    "rollout/admitted": "New groups started in this step.",
    "rollout/sampled_tokens": "Tokens sampled in this step.",
    "rollout/returned_tokens": "Tokens in the groups finished in this step.",
    "rollout/wasted_tokens": "Tokens in the groups dropped in this step.",
    "rollout/finished_groups": "Groups finished in this step.",
    "rollout/dropped_groups": "Groups dropped in this step: too old, or with a response that could not go on.",
    "rollout/dropped": "Responses in those dropped groups, including complete ones.",
    "rollout/resumed": "Parked responses that were continued in this step.",
    "rollout/forced": "Responses completed beyond the token budget, because their group would have grown too old.",
    "rollout/parked": "Responses that are begun but not complete, after the step.",
    "rollout/waiting": "Responses that are admitted but not begun, after the step.",
    "rollout/probe_gap": "Largest difference between a log-prob of an engine and the learner's after new weights were "
    "loaded, in nats; only on a cluster.",
    "rollout/held_tokens": "Tokens in groups that are not finished, after the step.",
}

EVAL = {
    "eval/avg": "avg@k on held-out problems: mean reward of k samples per problem.",
    "eval/avg_low": "Lower end of its 95% interval.",
    "eval/avg_high": "Upper end of its 95% interval.",
    "eval/pass": "Unbiased pass@k: chance that at least one of k samples solves the problem.",
    "eval/pass_low": "Lower end of its 95% interval.",
    "eval/pass_high": "Upper end of its 95% interval.",
    "eval/entropy": "Mean entropy per sampled token, in nats.",
    "eval/length": "Mean response length in tokens.",
    "eval/length_correct": "Mean length of the responses that solve their problem.",
    "eval/length_wrong": "Mean length of the other responses.",
    "eval/truncated": "Share of responses that the length limit cut off.",
    "eval/failures": "Responses on which the verifier failed; they count as wrong.",
    "eval/problems": "Number of problems evaluated.",
    "eval/temperature": "Sampling temperature. Each temperature of eval.also_at has a line of its own.",
}

IMITATION = {
    "imitation/loss": "Mean negative log-prob of the update's response tokens, in nats.",
    "imitation/sequences": "Demonstrations in the update.",
    "imitation/epoch": "Passes over the demonstrations completed so far.",
}

HELD_OUT = {
    "held_out/loss": "Mean negative log-prob of the response tokens in held-out demonstrations, in nats.",
    "held_out/perplexity": "Exponential of that loss: as hard as choosing among this many equally likely tokens.",
    "held_out/accuracy": "Share of those tokens that were the model's most likely token.",
    "held_out/tokens": "Number of those tokens.",
}

SKIPPED = {
    "skipped/in_a_row": "Updates skipped in a row, this one included. At learn.skip_limit the run stops.",
    "skipped/cause": "What is known of why loss or gradient are not finite, or of why sampler and learner differ.",
}

BUFFER = {
    "buffer/adds": "Rollouts added so far.",
    "buffer/draws": "Draws so far that returned groups; each is one update.",
    "buffer/added": "Groups admitted so far.",
    "buffer/filtered": "Groups refused so far for lack of a signal: all rewards equal, or no token to train on.",
    "buffer/fresh": "Groups drawn in fresh passes so far, counted once per pass.",
    "buffer/replayed": "Groups drawn again after their fresh passes so far, counted once per draw.",
    "buffer/replay_short": "Places for replay that stayed empty so far because too few groups were eligible.",
    "buffer/retired": "Groups released so far after their last use.",
    "buffer/expired": "Groups released so far for age: beyond max_staleness, or beyond replay_max_age before a replay.",
    "buffer/evicted": "Groups released so far because the buffer held more than its capacity.",
    "buffer/lost_fresh": "Expired and evicted groups that had fresh passes left: trained on less often than asked.",
    "buffer/held": "Groups held now.",
    "buffer/held_tokens": "Response tokens in the groups held now.",
    "buffer/to_visit": "Visits left in the fresh passes over the latest rollout; at 0 it is time for the next rollout.",
}

TIMING = {
    "seconds": "Wall-clock time of the step.",
    "tokens_per_second": "Tokens sampled and trained on per second of the step.",
    "rollout_seconds": "Time spent sampling.",
    "learn_seconds": "Time spent on updates.",
    "judge_requests": "Requests to the judge, those that failed included.",
    "judge_seconds": "Time of a request to the judge, on average.",
    "judge_slowest": "Time of the slowest of them.",
    "tool_seconds": "Time until an environment answered a question (how it begins, a turn, its reward), on average.",
    "tool_slowest": "Time until the slowest of these answers.",
    "sampling_share": "Share of the time in which a rollout actor sampled, mean over actors; only on a cluster.",
}

METRICS: dict[str, str] = EVERY_LINE | ROLLOUT | BUFFER | UPDATE | SKIPPED | EVAL | IMITATION | HELD_OUT


def of_each_reward(keys: Iterable[str]) -> dict[str, str]:
    """The keys of several rewards among these, each with its name. A stranger may have written the log, so only
    names that a function can have count."""
    named = {key: key.removeprefix(EACH_REWARD) for key in keys if key.startswith(EACH_REWARD)}
    return {key: name for key, name in named.items() if name.replace(".", "").isidentifier()}


def check_declared(metrics: Mapping[str, Any]) -> None:
    """Raise a KeyError for keys without a sentence."""
    unknown = sorted(metrics.keys() - METRICS.keys() - of_each_reward(metrics).keys())
    if unknown:
        raise KeyError(f"metrics without a sentence in bapo/runs/metrics.py: {', '.join(unknown)}")
