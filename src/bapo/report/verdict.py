"""What stands on top of a report: the answer in a sentence, the differences behind it, and signs of trouble.

Every sentence has one place:

    one configuration            `_of_one`: from where to where its score got; `_over_seeds`: over several seeds;
                                 `_so_far`: how far an unfinished run is
    a supervised one             `_of_sft`
    several configurations       `bapo.runs.comparison.judge`, because `bapo compare` says the same
    a sign that a run went wrong a function in SIGNS, which looks at one run and returns a clause without a full stop,
                                 or None

Arms meet within their setting; if there is one objective, its settings meet; if no two arms share a setting or an
objective, all of them meet. The first arm of the grid is what others are compared with, or grpo if there is no grid.

The limits of the signs are rules of thumb. They are set so wide that a sound run shows no sign, and they decide
nothing: the figures show what happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bapo.config.sections import ObjectiveConfig
from bapo.config.words import flat
from bapo.report.arms import Arm, grid_record, samples_per_problem
from bapo.runs.comparison import Rows, against_first, at_temperature, difference_cells, judge, meeting_by, scored_on
from bapo.runs.read import SCORED, Run, logged
from bapo.runs.statistics import (
    FEW_RESPONSES,
    FEWEST_SEEDS,
    MOSTLY_CUT_OFF,
    aggregate,
    first_and_last,
    mean,
    measures,
    sampled_responses,
    stop_shares,
)

COLLAPSED = 0.5  # a reward below this part of its best tenth has collapsed
LEAST_REWARD = 0.05  # a best tenth below this reward cannot collapse
ENTROPY_LEFT, ENTROPY_GROWN = 0.25, 2.0  # less than this part, or more than this multiple, of the first entropy
CLIPPED = 0.25  # the clip blocks more than this share of the tokens
SPIKE = 10.0  # a gradient norm above this multiple of the median is a spike
FEW = 20  # fewer updates or steps have no trend
UNREWARDED = 0.9  # with so large a share of steps without any reward, the model hardly ever earns one
NO_SIGNAL = 2 / 3  # more than this share of the groups carries no signal
CUT_OFF = 0.1  # the length limit cuts off so much more of the held-out responses than before training

Said = tuple[list[str], list[str], str]
"""The lines and the notes of a verdict, and the tone in which the page shows them."""


def verdict(arms: Sequence[Arm]) -> dict[str, Any]:
    """`verdict` and `differences` of the page. The first has lines, notes, warnings, and a tone."""
    reinforced = [arm for arm in arms if not arm.sft]
    said: Said = _of_one(reinforced[0]) if reinforced else ([], [], "plain")
    differences: list[dict[str, Any]] = []
    if len(reinforced) > 1:
        said, differences = _of_many(reinforced)
    lines, notes, tone = said
    lines = [*lines, *(_of_sft(arm, named=len(arms) > 1) for arm in arms if arm.sft)]
    shown = {"lines": lines, "notes": notes, "warnings": signs(arms), "tone": tone}
    return {"verdict": shown, "differences": differences}


# Several arms


def _of_many(arms: Sequence[Arm]) -> tuple[Said, list[dict[str, Any]]]:
    measured: dict[str, dict[str, dict[int, Mapping[str, float]]]] = {}
    configs: dict[str, list[dict[str, Any]]] = {}
    for (table, row), arm in places(arms).items():
        finished = [run for run in arm.runs if run.summary]
        measured.setdefault(table, {})[row] = {run.config["seed"]: measures(run) for run in finished}
        configs.setdefault(table, []).append(dict(flat(arm.config)))
    tables = {table: against_first(rows) for table, rows in measured.items()}
    found = judge(tables, configs, missing=_missing(arms))
    said = found.lines, [*found.details, *found.notes], "decided" if found.decided else "open"
    return said, _differences(tables, samples_per_problem(arms))


def places(arms: Sequence[Arm]) -> dict[tuple[str, str], Arm]:
    """(table, row) -> arm, in the order of the grid; the row that others are compared with comes first in its table."""
    record = grid_record(arms) or {}
    settings, objectives = (list(dict.fromkeys(getattr(arm, key) for arm in arms)) for key in ("setting", "objective"))
    by = meeting_by(settings, objectives)
    found = {(getattr(arm, by[0]), getattr(arm, by[1])): arm for arm in arms}
    if all(sum(table == other for other, _ in found) < 2 for table, _ in found):
        found = {("", f"{arm.objective}, {arm.setting}"): arm for arm in arms}

    def place(key: str, label: str) -> int:
        listed = record.get(key)
        return listed.index(label) if isinstance(listed, list) and label in listed else 0

    def order(item: tuple[tuple[str, str], Arm]) -> tuple[int, int, bool]:
        arm = item[1]
        other = arm.config["objective"]["name"] != "grpo"
        return place("settings", arm.setting), place("objectives", arm.objective), other

    return dict(sorted(found.items(), key=order))


def _missing(arms: Sequence[Arm]) -> int:
    """Runs of these arms that are not finished: those in the record of the grid, or those that were found."""
    shown = {(arm.setting, arm.objective) for arm in arms}
    found = {(arm.setting, arm.objective, run.config["seed"]): run for arm in arms for run in arm.runs}
    listed = (grid_record(arms) or {}).get("runs")
    records = [run for run in listed if isinstance(run, dict)] if isinstance(listed, list) else []
    places = ((str(run.get("setting")), str(run.get("objective")), run.get("seed")) for run in records)
    wanted = {place for place in places if place[:2] in shown and isinstance(place[2], int)}
    return len(wanted.union(found) - {place for place, run in found.items() if run.summary})


def _differences(tables: Mapping[str, Rows], k: str) -> list[dict[str, Any]]:
    """Tables with the same columns are one, whose rows begin with the name of their table."""
    joined: dict[tuple[str, ...], list[list[str]]] = {}
    for table, rows in tables.items():
        if cells := difference_cells(rows, k):
            headings, *found = cells
            named = [[f"{table}: {name}" if len(tables) > 1 else name, *others] for name, *others in found]
            joined.setdefault(tuple(headings), []).extend(named)
    return [{"headings": list(headings), "rows": rows} for headings, rows in joined.items()]


# One arm


def _of_one(arm: Arm) -> Said:
    finished = [run for run in arm.runs if run.summary]
    if not finished:
        return _so_far(arm), [], "plain"
    k = arm.config["eval"]["k"]
    if len(finished) > 1:
        return _over_seeds(finished, k)
    summary = finished[0].summary
    usual = {"temperature": arm.config["eval"]["temperature"], "before": summary["before"], "after": summary["after"]}
    clauses, tones = list[str](), list[str]()
    for scored in (usual, *summary["also_at"]):
        where = at_temperature(scored["temperature"]) if summary["also_at"] else ""
        (before, low, high), (after, least, most) = (
            [scored[when][f"eval/{key}"] for key in ("avg", "avg_low", "avg_high")] for when in SCORED
        )
        tones.append("decided" if least > high else "wrong" if most < low else "open")
        went = _went(
            before, after, f" [{low:.3f}, {high:.3f}]", f" [{least:.3f}, {most:.3f}]", sure=tones[-1] != "open"
        )
        chance = ", which may be chance" if tones[-1] == "open" else ""
        clauses.append(f"{f'{where.strip()} it' if clauses else f'avg@{k}{where}'} {went}{chance}")
    notes = [*scored_on([measures(finished[0])], seeds=False), "In brackets: 95% intervals over problems."]
    return [f"{'; '.join(clauses)}."], [*notes, "This is one run. Another seed may end elsewhere."], tones[0]


def _went(before: float, after: float, one: str = "", two: str = "", *, sure: bool = True) -> str:
    """From where to where a number got, each with what follows it."""
    word = "went" if not sure or before == after else "rose" if after > before else "fell"
    return f"{word} from {before:z.3f}{one} to {after:z.3f}{two}"


def _over_seeds(runs: Sequence[Run], k: int) -> Said:
    found = [measures(run) for run in runs]
    before, after = (mean([run[key] for run in found]) for key in ("avg_before", "avg"))
    gained, half = aggregate([run["avg"] - run["avg_before"] for run in found])
    enough = len(found) >= FEWEST_SEEDS
    sure = half is not None and enough and abs(gained) > half
    difference = f"{gained:+.3f}" + ("" if half is None or not enough else f" ± {half:.3f}")
    notes = scored_on(found, seeds=enough)
    notes += [] if enough else ["Two seeds are too few to say what another one would give."]
    tone = "open" if not sure else "decided" if gained > 0 else "wrong"
    return [f"avg@{k} {_went(before, after, sure=sure)} ({difference} over {len(found)} seeds)."], notes, tone


def _so_far(arm: Arm) -> list[str]:
    """How far an unfinished run got: the reward over the first and over the last tenth of its steps."""
    run = max(arm.runs, key=lambda run: len(run.timing))
    rewards = [reward for reward in logged(run.rollouts, "reward") if math.isfinite(reward)]
    if not rewards:
        return []
    went = _went(*first_and_last(rewards), sure=False)
    steps = f"After {len(run.timing)} of {run.planned} steps"
    return [f"{steps}, the reward of sampled responses {went}. The score on held-out problems comes at the end."]


def _of_sft(arm: Arm, *, named: bool) -> str:
    name = f"Supervised, {arm.setting}: the" if named else "The"
    finished = [measures(run) for run in arm.runs if run.summary]
    if not finished:
        return f"{name} run is not finished."
    scored = [run for run in finished if "held_out" in run]
    if not scored:
        return f"{name} run is finished. Nothing was held out, so there is no score."
    before, after = (mean([run[key] for run in scored]) for key in ("held_out_before", "held_out"))
    over = f", the mean over {len(scored)} seeds" if len(scored) > 1 else ""
    return f"{name} held-out loss {_went(before, after)} nats per token{over}."


# Signs of trouble: what a reader should look at first


def signs(arms: Sequence[Arm]) -> list[str]:
    """The signs of every arm; with several seeds, a sign says in how many of them it was found, and shows one."""
    found = []
    for arm in arms:
        named = f"{arm.objective}, {arm.setting}: " if len(arms) > 1 else ""
        for look in SIGNS:
            said = [text for run in arm.runs if (text := look(run))]
            if said:
                where = f" ({len(said)} of {len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
                found.append(f"{named}{said[0]}{where}.")
    return found


def warned(run: Run) -> str | None:
    """The run itself ended with a warning about its rewards."""
    said = run.summary.get("warning")
    return said if isinstance(said, str) else None


def unrewarded(run: Run) -> str | None:
    """The reward was zero in nearly every step."""
    rewards, (kept, filtered) = logged(run.rollouts, "reward"), _groups(run)
    empty = rewards.count(0.0)
    if warned(run) or not rewards or _sampled(run) < FEW_RESPONSES or empty < UNREWARDED * len(rewards):
        return None
    if min(rewards) < 0 or kept > (1 - UNREWARDED) * (kept + filtered):  # 0 may be the best, or a mean of both signs
        return None
    where = f"in all {empty} steps" if empty == len(rewards) else f"in {empty} of {len(rewards)} steps"
    return (
        f"the reward was 0 {where}, so there was next to nothing to learn from; warm-start the model (docs/sft.md), "
        "give it easier problems, or check in its responses whether the verifier refuses correct ones"
    )


def no_signal(run: Run) -> str | None:
    """All responses of most groups have the same reward, so these groups teach nothing."""
    rewards, (kept, filtered) = logged(run.rollouts, "reward"), _groups(run)
    if kept + filtered < FEW or filtered <= NO_SIGNAL * (kept + filtered) or warned(run) or unrewarded(run):
        return None
    what = "harder problems" if mean(rewards) > 0.5 else "easier problems, or a warm start (docs/sft.md)"
    cut = "" if run.config["learn"].get("truncated", "keep") == "keep" else " or were cut off"
    if not all(0 <= reward <= 1 for reward in rewards):  # on another scale, nobody knows which side is the good one
        what = "easier or harder problems"
    return (
        f"{filtered / (kept + filtered):.0%} of the groups carried no signal, because all responses of a group earned "
        f"the same reward{cut}; take larger groups (rollout.responses), or {what}"
    )


def unfinished(run: Run) -> str | None:
    """Most responses end at the length limit, so the reward is one of fragments."""
    cut = mean(logged(run.rollouts, "truncated"))
    if _sampled(run) < FEW_RESPONSES or not cut > MOSTLY_CUT_OFF:
        return None
    return (
        f"the length limit cut off {cut:.0%} of the responses, so the reward is mostly one of unfinished text; raise "
        f"rollout.max_tokens, which is {run.config['rollout']['max_tokens']}, or ask for shorter answers"
    )


def collapse(run: Run) -> str | None:
    """The reward at the end is far below what it was at its best."""
    rewards = logged(run.rollouts, "reward")
    tenth = len(rewards) // 10
    if len(rewards) < FEW:
        return None
    means = [mean(rewards[at : at + tenth]) for at in range(len(rewards) - tenth + 1)]
    best, last = max(means), means[-1]
    if best < LEAST_REWARD or not last < COLLAPSED * best:
        return None
    return f"the reward collapsed from {best:.2f} at its best to {last:.2f} at the end"


def entropy(run: Run) -> str | None:
    """The policy has become nearly deterministic, or much more random."""
    before, after = first_and_last(run.series("entropy"))
    numbers = f"from {before:.3f} to {after:.3f} nats per token"
    if len(run.updates) < FEW or not before > 0 or ENTROPY_LEFT * before <= after <= ENTROPY_GROWN * before:
        return None
    if after < before:
        return f"entropy fell {numbers}, so the policy explores little"
    return f"entropy rose {numbers}, so the policy has become more random" if after > before else None


def clipping(run: Run) -> str | None:
    """The clip blocks much of the data. It is meant to block negative tokens where used ones have their own bound."""
    if len(run.updates) < FEW or not run.series("clip_fraction"):
        return None
    objective = ObjectiveConfig.model_validate(run.config["objective"])
    only = "positive" if objective.has_brake or objective.bound_of_used is not None else ""
    _, last = first_and_last(run.series(f"clip_fraction_{only}" if only else "clip_fraction"))
    if not last > CLIPPED:
        return None
    return f"the clip blocked {last:.0%} of the {only}{' ' * bool(only)}tokens in the last tenth of updates"


def spikes(run: Run) -> str | None:
    """One update was much larger than the others."""
    lines = [line for line in run.updates if isinstance(line.get("grad_norm"), int | float)]
    if len(lines) < FEW:
        return None
    largest, version = max((float(line["grad_norm"]), line["version"]) for line in lines)
    middle = median(logged(lines, "grad_norm"))
    if not largest > SPIKE * middle > 0:
        return None
    return f"the gradient norm reached {largest:.3g} in update {version}, {largest / middle:.0f} times its median"


def skipped(run: Run) -> str | None:
    """Updates whose numbers were not finite."""
    count = len(run.skipped)
    if count == 1:
        return "an update was skipped, because its numbers were not finite"
    return f"{count} updates were skipped, because their numbers were not finite" if count else None


def still(run: Run) -> str | None:
    """BAPO's bounds never moved."""
    lows, highs = run.series("clip_low"), run.series("clip_high")
    if len(run.updates) < FEW or stop_shares(run).get("stop_start") != 1.0 or not highs:
        return None
    return f"the bounds never moved from ({lows[-1]:g}, {highs[-1]:g}), so a fixed clip would have done the same"


def cut_off(run: Run) -> str | None:
    """Responses have grown into the length limit."""
    before, after = (_evaluated(run, when, "eval/truncated") for when in ("before", "after"))
    problems = _evaluated(run, "after", "eval/problems")
    if not problems or problems * run.config["eval"]["k"] < FEW_RESPONSES or not after > before + CUT_OFF:
        return None
    return f"the length limit cuts off {after:.0%} of the held-out responses, and {before:.0%} before training"


def failures(run: Run) -> str | None:
    """The verifier failed on held-out responses."""
    count = _evaluated(run, "after", "eval/failures")
    return f"the verifier failed on {count:.0f} held-out responses, which count as wrong" if count else None


def _sampled(run: Run) -> int:
    """How many responses were sampled for training, as far as that is known."""
    return (sampled_responses(run) or [0])[-1]


def _groups(run: Run) -> tuple[int, int]:
    """How many groups the buffer has kept, and how many it has refused because their rewards did not differ."""
    last = run.rollouts[-1] if run.rollouts else {}
    kept, filtered = (last.get(f"buffer/{name}") for name in ("added", "filtered"))
    return (kept, filtered) if isinstance(kept, int) and isinstance(filtered, int) else (0, 0)


def _evaluated(run: Run, when: str, key: str) -> float:
    """A number of the evaluation before or after training; 0 if it is missing."""
    return sum(logged([run.summary.get(when) or {}], key))


SIGNS: tuple[Callable[[Run], str | None], ...] = (
    *(
        warned,
        unrewarded,
        no_signal,
        unfinished,
        collapse,
        entropy,
        clipping,
        spikes,
        skipped,
        still,
        cut_off,
        failures,
    ),
)
"""The signs, in the order in which the report shows them."""
