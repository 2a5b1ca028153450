"""The figures of a report: which metrics each of them shows, and what its caption says. panels.py draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapo.config.run import Config
from bapo.report.arms import Arm, samples_per_problem
from bapo.report.panels import (
    FEW_TOKENS,
    Figure,
    Panel,
    age_bars,
    bars,
    curves,
    figure,
    profile,
    scores,
    use_profile,
    uses_tokens_again,
)
from bapo.runs.metrics import of_each_reward
from bapo.runs.read import logged

QUADRANTS = {
    "high_prob_high_adv": "likely,<br>high adv.<br><b>H ↓</b>",
    "high_prob_low_adv": "likely,<br>low adv.<br><b>H ↑</b>",
    "low_prob_high_adv": "unlikely,<br>high adv.<br><b>H ↑</b>",
    "low_prob_low_adv": "unlikely,<br>low adv.<br><b>H ↓</b>",
}
SHARES = {
    "share_unclipped": "before clipping",
    "share_fixed": "at the fixed clip (0.8, 1.2)",
    "share": "at the bounds in use",
}


def figures(arms: Sequence[Arm]) -> list[Figure]:
    """Every figure, in the order of the page. One arm has no figures that set arms against each other."""
    played = any("turns" in line for arm in arms for run in arm.runs for line in run.rollouts)
    chosen = [make for make in FIGURES if len(arms) > 1 or make not in OF_SEVERAL]
    chosen = [make for make in chosen if played or make is not episodes]
    return [make(arms) | {"folded": make in FOR_EXPERTS} for make in chosen]


def held_out(arms: Sequence[Arm]) -> Figure:
    """Figure 9: success on held-out problems."""
    k = samples_per_problem(arms)
    panels = [
        curves(arms, "eval/avg", f"avg@{k} on held-out problems", lines="evals"),
        curves(arms, "eval/pass", f"pass@{k} on held-out problems", lines="evals"),
        curves(arms, "eval/entropy", "Entropy on held-out problems, nats per token", lines="evals"),
        curves(arms, "kl", "KL from sampler to learner, nats per token"),
    ]
    apart = any(any(series.get("apart") or ()) for panel in panels for series in panel["series"])
    hollow = " Hollow points were measured on fewer problems, so no line joins them with the others." if apart else ""
    return figure(
        "held-out",
        ("Success on held-out problems", "figure 9"),
        f"Evaluations before, during and after training.{_how_sure(arms, panels[0])}{hollow}",
        panels,
    )


def _how_sure(arms: Sequence[Arm], panel: Panel) -> str:
    """What the bars and the small dots at evaluations are, as far as there are any."""
    dots = " Small dots are seeds." if any(len(arm.runs) > 1 for arm in arms) else ""
    said = panel["bars"]
    return (f" {said[:1].upper()}{said[1:]}." if said else "") + dots


def dynamics(arms: Sequence[Arm]) -> Figure:
    """Figure 2: what staleness does."""
    each = of_each_reward(key for arm in arms for run in arm.runs for line in run.rollouts for key in line)
    return figure(
        "dynamics",
        ("Training under staleness", "figure 2"),
        "Reward of the sampled responses before filtering, entropy of the trained tokens, share of those tokens whose "
        "gradient the clip blocks, and gradient norm before it is clipped.",
        [
            curves(arms, "reward", "Reward of sampled responses", lines="rollouts"),
            *(curves(arms, key, f"Reward by {name}", lines="rollouts") for key, name in sorted(each.items())),
            curves(arms, "entropy", "Entropy of trained tokens, nats per token"),
            curves(arms, "clip_fraction", "Share of tokens that the clip blocks"),
            curves(arms, "grad_norm", "Gradient norm before clipping"),
        ],
    )


def episodes(arms: Sequence[Arm]) -> Figure:
    """How conversations with environments went."""
    ended = {
        "answered": "Episodes that the environment ended",
        "turns": "Episodes that the limit of turns ended",
        "context": "Episodes that the limit of tokens ended",
        "environment_failed": "Episodes whose environment failed",
        "grader_failed": "Episodes whose reward could not be computed",
    }
    runs = [run for arm in arms for run in arm.runs]
    happened = [key for key in ended if any(any(logged(run.rollouts, f"endings/{key}")) for run in runs)]
    return figure(
        "episodes",
        ("Episodes", None),
        "Turns of the policy, what the environment said and how long it took, and how episodes ended, in each step.",
        [
            curves(arms, "turns", "Turns per response", lines="rollouts"),
            curves(arms, "observed", "Tokens per response that the environment said", lines="rollouts"),
            curves(arms, "tool_seconds", "Seconds until the environment answered a turn", lines="timing"),
            *(curves(arms, f"endings/{key}", ended[key], lines="rollouts") for key in happened),
        ],
    )


def by_staleness(arms: Sequence[Arm]) -> Figure:
    """Figure 11: score by staleness."""
    here = [arm for arm in arms if arm.config["offpolicy"]["partial_budget"] is None]
    few = len({round(arm.staleness, 6) for arm in here}) < 2
    return figure(
        "by-staleness",
        ("Score by staleness", "figure 11"),
        "Held-out score after training against the mean staleness of the trained tokens. Small dots are seeds. Bars "
        "are 95% intervals over seeds and are drawn for three seeds or more.",
        [] if few else scores(here, samples_per_problem(arms), "after training"),
        reason="This figure needs runs without partial rollout whose mean staleness takes at least two values.",
    )


def under_partial(arms: Sequence[Arm]) -> Figure:
    """Figure 12: score by staleness under partial rollout."""
    here = [arm for arm in arms if arm.config["offpolicy"]["partial_budget"] is not None]
    return figure(
        "under-partial",
        ("Score under partial rollout", "figure 12"),
        "The same for runs in which long responses were parked and continued under newer weights.",
        scores(here, samples_per_problem(arms), "after training, with partial rollout"),
        reason="This figure needs finished runs with offpolicy.partial_budget set.",
    )


def balance(arms: Sequence[Arm]) -> Figure:
    """Figure 4: positive and negative tokens."""
    targets = {Config.model_validate(arm.config).objective.clip.target_share for arm in arms if _searches(arm)}
    marks = [{"value": target, "text": f"target {target:g}"} for target in sorted(targets)]
    return figure(
        "balance",
        ("Positive against negative tokens", "figure 4"),
        "Tokens with positive advantage, as a share of the signal and as a share of the tokens; the rest is negative. "
        "The clip can move the share of the signal towards BAPO's target, but not the share of the tokens.",
        [
            *(curves(arms, key, f"Positive share of the signal {where}", marks=marks) for key, where in SHARES.items()),
            curves(arms, "positive_tokens", "Positive share of the trained tokens"),
        ],
    )


def bounds(arms: Sequence[Arm]) -> Figure:
    """Figure 8: bounds over time."""
    return figure(
        "bounds",
        ("Clip bounds over time", "figure 8"),
        "The bounds on the ratio. BAPO chooses both anew for every update, unless it is given a single pair; other "
        "objectives keep theirs. Tokens that were trained on before can have a lower bound of their own (used_low). "
        "The brake moves it; elsewhere it is fixed and not drawn.",
        [
            curves(arms, "clip_high", "Upper clip bound on the ratio"),
            curves(arms, "clip_low", "Lower clip bound on the ratio"),
            curves(arms, "used_low", "Lower clip bound of used tokens, by the brake"),
        ],
        reason="No objective here reports clip bounds.",
    )


def ratio_profile(arms: Sequence[Arm]) -> Figure:
    """Figures 5 and 10: which tokens are far from ratio 1."""
    return figure(
        "ratio-profile",
        ("Token probability and entropy by ratio", "figures 5 and 10"),
        "Trained tokens by the ratio of their current probability to the probability they were sampled with: their "
        "mean probability and the mean entropy of the distributions they came from, both under the current policy, "
        "and their number. Dotted lines: the fixed clip 0.8, 1.2. The outer bins are open; bins of fewer than "
        f"{FEW_TOKENS} tokens are left out.",
        [
            profile(arms, "ratio_prob", "Mean token probability, by ratio"),
            profile(arms, "ratio_entropy", "Mean entropy, by ratio, nats"),
            profile(arms, "ratio_histogram", "Share of tokens, by ratio"),
        ],
    )


def by_use(arms: Sequence[Arm]) -> Figure:
    """Where tokens stand, and which negative ones are pushed further down, by how often they were trained on before."""
    again = [index for index, arm in enumerate(arms) if uses_tokens_again(arm)]
    as_sampled = [{"value": 0, "text": "as sampled"}]
    return figure(
        "by-use",
        ("Negative tokens by use", None),
        "Trained tokens by how often they were trained on before: the mean of log r, where r is the ratio of their "
        "current probability to the probability they were sampled with, and the share of negative tokens that the "
        "update pushes further below the probability they were sampled with (r < 1, and the clip lets them through). "
        f"Bins of fewer than {FEW_TOKENS} tokens are left out, and so are runs that used every token once. With the "
        "brake also: how far used negative tokens have fallen on average, and the lower bound that follows.",
        [
            use_profile(arms, "use_negative", "log r of negative tokens, by earlier uses", again, marks=as_sampled),
            use_profile(arms, "use_positive", "log r of positive tokens, by earlier uses", again, marks=as_sampled),
            use_profile(arms, "use_below", "Negative tokens pushed further down, share", again),
            curves(arms, "drift", "Drift: mean fall of used negative tokens, nats"),
            curves(arms, "used_low", "Lower clip bound of used tokens, by the brake"),
        ],
        reason="This figure needs runs that train on a response more than once (offpolicy.reuse, "
        "offpolicy.replay_fraction). So far, these runs used every token once.",
    )


def quadrants(arms: Sequence[Arm]) -> Figure:
    """The Entropy-Clip Rule: what the clip lets through and what it blocks."""
    return figure(
        "quadrants",
        ("Entropy-Clip Rule", None),
        "The gradient mass r|A| by probability and advantage, mean over updates: what the clip retained and what it "
        "blocked. The eight bars of a run sum to 1. H ↑ and H ↓ show the direction in which, according to the rule, "
        "a quadrant pushes entropy. The last plot is the rule's prediction per unit step on the logits: its sign and "
        "relative size mean something, its value in nats does not.",
        [
            *(
                bars(arms, f"Gradient mass {word}, by quadrant", QUADRANTS.values(), [f"{q}_{fate}" for q in QUADRANTS])
                for fate, word in (("retained", "passed"), ("blocked", "blocked"))
            ),
            curves(arms, "predicted_entropy_change", "Predicted entropy change"),
        ],
    )


def lengths(arms: Sequence[Arm]) -> Figure:
    """Figure 6: length by correctness."""
    return figure(
        "lengths",
        ("Length of correct and wrong responses", "figure 6"),
        "Mean length in tokens of the correct and of the wrong responses that finished in a step. When wrong responses "
        "are longer, there are more negative tokens.",
        [
            curves(arms, "length_correct", "Length of correct responses, tokens", lines="rollouts"),
            curves(arms, "length_wrong", "Length of wrong responses, tokens", lines="rollouts"),
        ],
    )


def fixed_clips(arms: Sequence[Arm]) -> Figure:
    """Figure 7: asymmetric fixed clips."""
    fixed = {index: values for index, arm in enumerate(arms) if (values := _fixed_clip(arm))}
    listed = "; ".join(sorted({f"{arms[index].objective} {_said(*values)}" for index, values in fixed.items()}))
    enough = len(set(fixed.values())) > 1
    panels = [
        curves(arms, "reward", "Reward with fixed clips", lines="rollouts", only=fixed),
        curves(arms, "entropy", "Entropy with fixed clips, nats per token", only=fixed),
    ]
    return figure(
        "fixed-clips",
        ("Fixed clips, symmetric and not", "figure 7"),
        f"Only the objectives whose bounds never move: {listed}.",
        panels if enough else [],
        reason="This figure needs runs with at least two different sets of fixed bounds, such as grpo and "
        "clip_higher, or grpo with the objective.options low, high and used_low.",
    )


def staleness(arms: Sequence[Arm]) -> Figure:
    """How old the trained tokens were."""
    limits = sorted({arm.config["offpolicy"]["max_staleness"] for arm in arms})
    return figure(
        "staleness",
        ("Staleness of trained tokens", None),
        "Tokens by the number of updates between sampling and use, over the whole run. The bound is "
        f"{' or '.join(map(str, limits))} (offpolicy.max_staleness).",
        [age_bars(arms)],
    )


FIGURES: tuple[Callable[[Sequence[Arm]], Figure], ...] = (
    *(held_out, dynamics, lengths, episodes, by_staleness, under_partial),
    *(balance, bounds, ratio_profile, by_use, quadrants, fixed_clips, staleness),
)
OF_SEVERAL = (by_staleness, under_partial, fixed_clips)  # those that set arms against each other
FOR_EXPERTS = (balance, bounds, ratio_profile, by_use, quadrants, fixed_clips, staleness)
"""Those that say how a rule works rather than what came of it. The page shows their headings only, until one opens."""


def sft_figures(arms: Sequence[Arm]) -> list[Figure]:
    """Losses over updates; no figure without a supervised run."""
    chosen = [index for index, arm in enumerate(arms) if arm.sft]
    if not chosen:
        return []
    held_out = curves(arms, "held_out/loss", "Held-out loss, nats per token", lines="evals", only=chosen)
    return [
        figure(
            "sft",
            ("Supervised training", None),
            "Mean negative log-prob of response tokens: those of each update, just before the update, and those of "
            "held-out demonstrations. If the first falls while the second rises, the model is learning by heart."
            f"{_how_sure([arms[index] for index in chosen], held_out)}",
            [
                curves(arms, "imitation/loss", "Training loss, nats per token", only=chosen),
                held_out,
                curves(arms, "held_out/accuracy", "Held-out tokens predicted right, share", lines="evals", only=chosen),
                curves(arms, "grad_norm", "Gradient norm before clipping", only=chosen),
            ],
            note=None if held_out["series"] else "Nothing was held out, so there is no held-out loss.",
        )
        | {"folded": False}
    ]


def _fixed_clip(arm: Arm) -> tuple[float, float, float | None] | None:
    """The bounds of an arm in which they never move: low, high, and the lower one of used tokens if they have one."""
    pairs = {
        (round(low, 4), round(high, 4))
        for run in arm.runs
        for low, high in zip(run.series("clip_low"), run.series("clip_high"), strict=False)
    }
    objective = Config.model_validate(arm.config).objective
    if len(pairs) != 1 or _searches(arm) or objective.has_brake:
        return None
    return *pairs.pop(), objective.bound_of_used


def _said(low: float, high: float, used_low: float | None) -> str:
    return f"{low:g}, {high:g}" + ("" if used_low is None else f" ({used_low:g} instead of {low:g} for used tokens)")


def _searches(arm: Arm) -> bool:
    """Whether BAPO searches for the bounds of this arm; otherwise they are given."""
    objective = Config.model_validate(arm.config).objective
    return objective.name == "bapo" and objective.clip.searches
