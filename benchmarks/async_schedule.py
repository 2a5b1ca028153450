"""How long a step takes when sampling and learning overlap, and when they take turns: a simulation without a model.

    python benchmarks/async_schedule.py                      published lengths: 7B on 8 GPUs, 32B on 64 GPUs
    python benchmarks/async_schedule.py --bounds             the same lengths, with several staleness bounds
    python benchmarks/async_schedule.py --run runs/NAME      lengths and timings of a real synchronous run
    python benchmarks/async_schedule.py --lengths FILE.json  a list of lengths, or a list of groups of lengths

Every number of `schedule_loops.Setting` is also an option and overrides the scenario's, for example --staleness 24.
Tables are Markdown. Equal options and seed give equal tables. `schedule_loops` explains the loops.

Published lengths. Laminar (arXiv:2510.12633) reports a 99th percentile of ten times the median; ROLL Flash
(arXiv:2510.11345, section 1) reports maxima of more than twenty medians; DeepScaleR reports a mean of 3,500 tokens
under a limit of 8k (5,500 at the start). We take a lognormal with the 99th percentile at ten medians, cut at the limit.
Under 32k the limit is that percentile, so one response in a hundred is cut; under 8k the mean is 3,500 tokens. As a
control, `4k, mostly cut` has the mean of 3,206 that NeMo RL reports for Qwen3-32B under a limit of 4,096 (its
performance page). That half of the variance of the logarithm lies between prompts is our assumption.

Speeds are those that benchmarks/memory.py computes for H100 GPUs; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from schedule_loops import Lengths, Outcome, Setting, asynchronous, synchronous

NORMAL = statistics.NormalDist()
TAIL = 10.0  # 99th percentile over median: Laminar, arXiv:2510.12633
BETWEEN = 0.5  # share of the variance of log length that lies between prompts: our assumption


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal, cut at a limit."""

    median: float
    limit: int
    tail: float = TAIL
    """The 99th percentile over the median, before the cut."""
    between: float = BETWEEN

    @property
    def sigma(self) -> float:
        return math.log(self.tail) / NORMAL.inv_cdf(0.99)

    @property
    def cut(self) -> float:
        """Share of the responses that the limit cuts off."""
        return 1 - NORMAL.cdf(math.log(self.limit / self.median) / self.sigma)

    @property
    def mean(self) -> float:
        """E[min(X, limit)] of a lognormal X."""
        mu, sigma = math.log(self.median), self.sigma
        below = math.exp(mu + sigma**2 / 2) * NORMAL.cdf((math.log(self.limit) - mu - sigma**2) / sigma)
        return below + self.limit * self.cut

    @classmethod
    def with_mean(cls, mean: float, limit: int) -> LogNormal:
        """The one with this mean after the cut, by bisection."""
        low, high = 1.0, float(limit) * 1000
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls(middle, limit).mean < mean else (low, middle)
        return cls(low, limit)

    def groups(self, count: int, responses: int, seed: int) -> Lengths:
        draw = random.Random(seed)  # noqa: S311 - not a secret
        result = []
        for _ in range(count):
            shared = math.sqrt(self.between) * draw.gauss(0, 1)
            own = [math.sqrt(1 - self.between) * draw.gauss(0, 1) for _ in range(responses)]
            lengths = [self.median * math.exp(self.sigma * (shared + each)) for each in own]
            result.append([max(1, min(self.limit, round(length))) for length in lengths])
        return result


@dataclass(frozen=True)
class Observed:
    """Lengths that were seen: drawn again, by whole groups where the groups are known."""

    seen: Lengths

    def groups(self, count: int, responses: int, seed: int) -> Lengths:
        draw = random.Random(seed)  # noqa: S311 - not a secret
        if all(len(group) == responses for group in self.seen):
            return [list(draw.choice(self.seen)) for _ in range(count)]
        flat = [length for group in self.seen for length in group]
        return [draw.choices(flat, k=responses) for _ in range(count)]


@dataclass(frozen=True)
class Scenario:
    """A model on a number of GPUs. The learners get the GPUs that the rollout engines leave."""

    title: str
    lengths: LogNormal | Observed
    setting: Setting
    gpus: int
    per_engine: int
    """GPUs of one rollout engine."""
    learn_per_gpu: float
    """Tokens that one GPU trains on per second."""

    def split(self, engines: int) -> Setting:
        learners = self.gpus - engines * self.per_engine
        return replace(self.setting, engines=engines, learn=self.learn_per_gpu * learners)

    def all_together(self) -> Setting:
        return replace(self.setting, engines=self.gpus // self.per_engine, learn=self.learn_per_gpu * self.gpus)


SEVEN = Setting(
    prompts=64, batches=4, staleness=16, slots=128, alone=150.0, saturated=13_500.0, prefill=26_000.0, load_seconds=1.5
)  # an engine has one H100
THIRTY_TWO = replace(
    SEVEN, prompts=128, alone=140.0, saturated=12_000.0, prefill=24_000.0, load_seconds=6.5
)  # four H100
EIGHT_K = LogNormal.with_mean(3500, limit=8192)
THIRTY_TWO_K = LogNormal(32768 / TAIL, limit=32768)
CUT_4K = LogNormal.with_mean(3206, limit=4096)
SCENARIOS = {
    "7b-4k": Scenario("7B, 8 GPUs, 4k, mostly cut", CUT_4K, SEVEN, 8, 1, 6500.0),
    "7b-8k": Scenario("7B, 8 GPUs, 8k", EIGHT_K, SEVEN, 8, 1, 6500.0),
    "7b-32k": Scenario("7B, 8 GPUs, 32k", THIRTY_TWO_K, SEVEN, 8, 1, 6500.0),
    "32b-8k": Scenario("32B, 64 GPUs, 8k", EIGHT_K, THIRTY_TWO, 64, 4, 1500.0),
    "32b-32k": Scenario("32B, 64 GPUs, 32k", THIRTY_TWO_K, THIRTY_TWO, 64, 4, 1500.0),
}


def fastest(scenario: Scenario, lengths: Lengths) -> Outcome:
    """The asynchronous loop with the division of the GPUs that gives the shortest step."""
    most = (scenario.gpus - 1) // scenario.per_engine
    tried = sorted({max(1, round(most * share / 16)) for share in range(1, 17)})
    return min((asynchronous(scenario.split(n), lengths) for n in tried), key=lambda outcome: outcome.step_seconds)


HEADER = (
    "| loop | rollouts | s per step | tokens/s | engines idle | slots used | learner idle | staleness mean, max "
    "| late groups | by at most | speed-up |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, outcome: Outcome, base: Outcome, *, together: bool = False) -> str:
    learner = "–" if together else f"{outcome.learner_idle:.0%}"
    return (
        f"| {name} | {outcome.setting.engines} | {outcome.step_seconds:.0f} | {outcome.speed:,.0f} "
        f"| {outcome.engines_idle:.0%} | {outcome.slots_used:.0%} | {learner} "
        f"| {outcome.staleness_mean:.1f}, {outcome.staleness_max} | {outcome.late:.0%} | {outcome.latest} "
        f"| {base.step_seconds / outcome.step_seconds:.2f}x |"
    )


def table(scenario: Scenario, seed: int, aheads: tuple[int, ...] = (1, 2)) -> str:
    """All loops on the same lengths. Speed-ups are over the synchronous loop with all GPUs together."""
    s = scenario.all_together()
    lengths = scenario.lengths.groups(s.steps * s.prompts, s.responses, seed)
    base = synchronous(s, lengths, together=True)
    flat = sorted(length for group in lengths for length in group)
    parked = synchronous(replace(s, budget=round(0.5 * sum(flat) / s.steps)), lengths, together=True)
    rows = [row("together", base, base, together=True), row("together, partial rollout", parked, base, together=True)]
    half = scenario.split(max(1, scenario.gpus // 2 // scenario.per_engine))
    rows.append(row("apart, taking turns", synchronous(half, lengths), base))
    for ahead in aheads:
        needed = (ahead + 1) * s.updates - 1
        setting = replace(scenario.setting, ahead=ahead, staleness=max(s.staleness, needed))
        best = fastest(replace(scenario, setting=setting), lengths)
        rows.append(row(f"asynchronous, ahead {ahead}, S {setting.staleness}", best, base))
    return "\n".join([f"### {scenario.title}", "", described(flat, s), "", HEADER, *rows])


def bounds_table(scenario: Scenario, seed: int) -> str:
    """The asynchronous loop with several staleness bounds, each with its best division of the GPUs."""
    s = scenario.all_together()
    lengths = scenario.lengths.groups(s.steps * s.prompts, s.responses, seed)
    base = synchronous(s, lengths, together=True)
    rows = [row("together", base, base, together=True)]
    for spare in (0, 1, 2, 4, 8):
        bound = (s.ahead + 1 + spare) * s.updates - 1
        best = fastest(replace(scenario, setting=replace(scenario.setting, staleness=bound)), lengths)
        rows.append(row(f"S {bound}: {spare} rollouts late", best, base))
    return "\n".join([f"### {scenario.title}: staleness bounds", "", HEADER, *rows])


def described(flat: list[int], s: Setting) -> str:
    at = [flat[min(len(flat) - 1, int(share * len(flat)))] for share in (0.5, 0.9, 0.99)]
    return (
        f"Lengths: mean {statistics.fmean(flat):,.0f}, median {at[0]:,}, 90th percentile {at[1]:,}, 99th {at[2]:,}, "
        f"longest {flat[-1]:,}. {s.prompts} prompts x {s.responses} responses, {s.updates} updates per step, "
        f"{s.slots} slots per engine."
    )


@dataclass(frozen=True)
class Measured:
    """What a run directory says about a synchronous run."""

    lengths: Lengths
    """Of the sampled groups in rollouts.jsonl, one group per step."""
    tokens: float
    """Response tokens per step, as a mean."""
    rollout_seconds: float
    learn_seconds: float
    seconds: float
    config: dict[str, Any]


def read_run(path: Path) -> Measured:
    """Read rollouts.jsonl, metrics.jsonl, timing.jsonl and config.json."""
    steps = _lines(path / "timing.jsonl")
    returned = [line["rollout/returned_tokens"] for line in _lines(path / "metrics.jsonl") if line["kind"] == "rollout"]
    groups = [line["trajectories"] for line in _lines(path / "rollouts.jsonl")]
    lengths = [[len(response["tokens"]) for response in group] for group in groups]
    if not steps or not returned or not lengths:
        raise ValueError(f"{path} has no complete step, so there is nothing to simulate. Give a run with some steps.")

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in steps)

    config = json.loads((path / "config.json").read_text())
    times = (mean(key) for key in ("rollout_seconds", "learn_seconds", "seconds"))
    return Measured(lengths, statistics.fmean(returned), *times, config.get("config", config))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def read_lengths(path: Path) -> Observed:
    """A JSON file: [812, 90, ...] or [[812, 90, ...], ...]."""
    value = json.loads(path.read_text())
    groups = [each if isinstance(each, list) else [each] for each in value] if isinstance(value, list) else []
    if not groups or not all(isinstance(n, int) and n > 0 for group in groups for n in group):
        raise ValueError(f"{path} must hold a list of lengths, or a list of groups of lengths, all above 0.")
    return Observed(groups)


def of_run(measured: Measured, engines: int) -> Scenario:
    """A scenario whose synchronous loop takes as long as the run did: the engine's speeds are scaled to that."""
    config = measured.config
    rollout, learn, off = config["rollout"], config["learn"], config["offpolicy"]
    batches = max(1, math.floor(rollout["prompts"] / learn["batch_groups"] + 0.5))
    start = Setting(
        prompts=rollout["prompts"],
        responses=rollout["responses"],
        steps=len(measured.lengths),
        batches=batches,
        passes=off["reuse"],
        staleness=max(off["max_staleness"], 2 * batches * off["reuse"] - 1),
        engines=engines,
        slots=max(1, rollout["slots"] // engines),
        prompt_tokens=0,
        learn=math.inf,
        update_seconds=measured.learn_seconds / (batches * off["reuse"]),
        gather_seconds=0.0,
        load_seconds=0.0,
    )
    observed = Observed(measured.lengths)
    lengths = observed.groups(start.steps * start.prompts, start.responses, seed=0)
    simulated = synchronous(start, lengths, together=True).step_seconds - measured.learn_seconds
    scale = simulated / measured.rollout_seconds
    scaled = replace(start, alone=start.alone * scale, saturated=start.saturated * scale, prefill=start.prefill * scale)
    return Scenario("run", observed, scaled, 2 * engines, 1, math.inf)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="only these")
    parser.add_argument("--bounds", action="store_true", help="several staleness bounds")
    parser.add_argument("--run", type=Path, help="the directory of a synchronous run")
    parser.add_argument("--lengths", type=Path, help="a JSON file of lengths")
    parser.add_argument("--seed", type=int, default=0)
    for each in fields(Setting):
        kind = {"int": int, "float": float, "bool": lambda text: text == "true"}.get(str(each.type), int)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, help=f"default {each.default}")
    return parser


def main() -> None:
    chosen = _options().parse_args()
    given = {each.name: value for each in fields(Setting) if (value := getattr(chosen, each.name)) is not None}
    scenarios = [SCENARIOS[name] for name in chosen.scenario or SCENARIOS]
    if chosen.run:
        scenarios = [of_run(read_run(chosen.run), engines=given.get("engines", 1))]
    if chosen.lengths:
        seen = read_lengths(chosen.lengths)
        scenarios = [replace(each, lengths=seen) for each in scenarios]
    shown = bounds_table if chosen.bounds else table
    for scenario in scenarios:
        print(shown(replace(scenario, setting=replace(scenario.setting, **given)), chosen.seed), end="\n\n")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
