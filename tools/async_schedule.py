"""How long a step takes when sampling and learning overlap, and when they take turns: a simulation without a model.

    python tools/async_schedule.py                      published lengths: 7B on 8 GPUs, 32B on 64 GPUs
    python tools/async_schedule.py --bounds             the same lengths, with several staleness bounds
    python tools/async_schedule.py --run runs/NAME      lengths and timings of a real synchronous run
    python tools/async_schedule.py --lengths FILE.json  a list of lengths, or a list of groups of lengths

Every number of `schedule_loops.Setting` is also an option and overrides the scenario's, for example --staleness 24.
Tables are Markdown. Equal options and seed give equal tables. `schedule_loops` explains the loops.

Published lengths. Laminar (arXiv:2510.12633) reports a 99th percentile of ten times the median; ROLL Flash
(arXiv:2510.11345, section 1) reports maxima of more than twenty medians; DeepScaleR reports a mean of 3,500 tokens
under a limit of 8k (5,500 at the start). We take a lognormal with the 99th percentile at ten medians, cut at the limit.
Under 32k the limit is that percentile, so one response in a hundred is cut; under 8k the mean is 3,500 tokens. As a
control, `4k, mostly cut` has the mean of 3,206 that NeMo RL reports for Qwen3-32B under a limit of 4,096 (its
performance page). That half of the variance of the logarithm lies between prompts is our assumption.

Speeds are those that tools/memory.py computes for H100 GPUs; a test compares them.
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
SEED = 0
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

    @property
    def context(self) -> float:
        """How many tokens of its own response precede a token, as a mean over tokens: E[L²] / 2 E[L]."""
        mu, sigma = math.log(self.median), self.sigma
        below = math.exp(2 * mu + 2 * sigma**2) * NORMAL.cdf((math.log(self.limit) - mu - 2 * sigma**2) / sigma)
        return (below + self.limit**2 * self.cut) / (2 * self.mean)

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

    @property
    def half(self) -> int:
        """Rollout engines on half of the GPUs."""
        return max(1, self.gpus // 2 // self.per_engine)

    def changed(self, **changes: Any) -> Scenario:
        return replace(self, setting=replace(self.setting, **changes))


def made(title: str, lengths: LogNormal, model: str) -> Scenario:
    """Work on this model and these lengths. The keys that a decoding step reads grow with the context."""
    known = MODELS[model]
    context = 200 + lengths.context
    setting = Setting(
        prompts=known["prompts"],
        alone=1 / known["weights"],
        saturated=1 / (known["response"] + known["context"] * context),
        prefill=1 / known["response"],
        gather_seconds=known["gather"],
        load_seconds=known["load"],
    )
    return Scenario(title, lengths, setting, known["gpus"], known["per_engine"], known["learn"])


# Seconds of an engine per decoding step, per response in it, per token of its context; seconds to give out and to load
# weights; tokens per second of one learner GPU. From tools/cluster_sizes.py, rounded; a test compares them.
MODELS: dict[str, dict[str, Any]] = {
    "7b": {"gpus": 8, "per_engine": 1, "prompts": 64, "weights": 6.5e-3, "response": 3.1e-5, "context": 2.45e-8}
    | {"gather": 2.2, "load": 2.1, "learn": 6500.0},
    "32b": {"gpus": 64, "per_engine": 4, "prompts": 128, "weights": 8.3e-3, "response": 3.3e-5, "context": 2.8e-8}
    | {"gather": 12.4, "load": 7.5, "learn": 1500.0},
}
EIGHT_K = LogNormal.with_mean(3500, limit=8192)
THIRTY_TWO_K = LogNormal(32768 / TAIL, limit=32768)
CUT_4K = LogNormal.with_mean(3206, limit=4096)
SCENARIOS = {
    "7b-4k": made("7B, 8 GPUs, 4k, mostly cut", CUT_4K, "7b"),
    "7b-8k": made("7B, 8 GPUs, 8k", EIGHT_K, "7b"),
    "7b-32k": made("7B, 8 GPUs, 32k", THIRTY_TWO_K, "7b"),
    "32b-8k": made("32B, 64 GPUs, 8k", EIGHT_K, "32b"),
    "32b-32k": made("32B, 64 GPUs, 32k", THIRTY_TWO_K, "32b"),
}


def fastest(scenario: Scenario, lengths: Lengths) -> Outcome:
    """The asynchronous loop with the division of the GPUs that gives the shortest step."""
    most = (scenario.gpus - 1) // scenario.per_engine
    tried = sorted({max(1, round(most * share / 16)) for share in range(4, 13)})
    return min((asynchronous(scenario.split(n), lengths) for n in tried), key=lambda outcome: outcome.step_seconds)


HEADER = (
    "| loop | rollouts | s per step | tokens/s | engines idle | slots used | learner idle | staleness mean, max "
    "| late groups | by at most | over together | over turns apart |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, outcome: Outcome, *bases: Outcome, together: bool = False) -> str:
    """Speed-ups are over the bases: the synchronous loops, together and apart."""
    s = outcome.setting
    learner = "–" if together else f"{abs(outcome.learner_idle):.0%}"
    late = f"{outcome.late:.0%} | {outcome.latest}" if s.budget is None else "– | –"
    return (
        f"| {name} | {s.engines} | {outcome.step_seconds:.3g} | {outcome.speed:,.0f} | {abs(outcome.engines_idle):.0%} "
        f"| {outcome.slots_used:.0%} | {learner} | {outcome.staleness_mean:.1f}, {outcome.staleness_max} | {late} "
        f"| {' | '.join(f'{base.step_seconds / outcome.step_seconds:.2f}x' for base in bases)} |"
    )


def ahead_row(outcome: Outcome, *bases: Outcome) -> str:
    return row(f"asynchronous, ahead {outcome.setting.ahead}, S {outcome.setting.staleness}", outcome, *bases)


def bases_of(scenario: Scenario, lengths: Lengths) -> tuple[Outcome, Outcome]:
    """The synchronous loops: all GPUs together, and half of them for each."""
    together = synchronous(scenario.all_together(), lengths, together=True)
    return together, synchronous(scenario.split(scenario.half), lengths)


def table(scenario: Scenario, seed: int) -> str:
    """All loops on the same lengths."""
    s = scenario.all_together()
    lengths = scenario.lengths.groups(s.steps * s.prompts, s.responses, seed)
    bases = together, apart = bases_of(scenario, lengths)
    flat = sorted(length for group in lengths for length in group)
    partial = synchronous(replace(s, budget=round(0.5 * sum(flat) / s.steps)), lengths, together=True)
    rows = [row("together", together, *bases, together=True)]
    rows.append(row("together, partial rollout", partial, *bases, together=True))
    rows.append(row("apart, taking turns", apart, *bases))
    for ahead in (1, 2):
        bound = max(s.staleness, (ahead + 1) * s.updates - 1)
        rows.append(ahead_row(fastest(scenario.changed(ahead=ahead, staleness=bound), lengths), *bases))
    return "\n".join([f"### {scenario.title}", "", described(flat, s), "", HEADER, *rows])


def bounds_table(scenario: Scenario, seed: int) -> str:
    """The asynchronous loop, running ahead by more or less and with tighter and looser staleness bounds."""
    s = scenario.all_together()
    lengths = scenario.lengths.groups(s.steps * s.prompts, s.responses, seed)
    bases = bases_of(scenario, lengths)
    rows = []
    for ahead in (1, 2, 4):
        for spare in (0, 1, 2, 4):
            bound = (ahead + 1 + spare) * s.updates - 1
            rows.append(ahead_row(fastest(scenario.changed(ahead=ahead, staleness=bound), lengths), *bases))
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


def of_run(measured: Measured, engines: int) -> tuple[Setting, Observed]:
    """A synchronous loop that takes as long as the run did: the engine's speeds are scaled to that."""
    config = measured.config
    rollout, learn, off = config["rollout"], config["learn"], config["offpolicy"]
    batches = max(1, math.floor(rollout["prompts"] / learn["batch_groups"] + 0.5))
    start = Setting(
        prompts=rollout["prompts"],
        responses=rollout["responses"],
        batches=batches,
        passes=off["reuse"],
        staleness=off["max_staleness"],
        engines=engines,
        slots=rollout["slots"],
        prompt_tokens=0,
        learn=math.inf,
        update_seconds=measured.learn_seconds / (batches * off["reuse"]),
        gather_seconds=0.0,
        load_seconds=0.0,
    )
    observed = Observed(measured.lengths)
    lengths = observed.groups(start.steps * start.prompts, start.responses, SEED)
    scale = (
        synchronous(start, lengths, together=True).step_seconds - measured.learn_seconds
    ) / measured.rollout_seconds
    speeds = {name: getattr(start, name) * scale for name in ("alone", "saturated", "prefill")}
    return replace(start, **speeds), observed


def run_table(path: Path, seed: int, given: dict[str, Any]) -> str:
    """A real synchronous run, and what it would be with sampling and learning side by side."""
    measured = read_run(path)
    engines = given.get("engines") or measured.config.get("cluster", {}).get("rollouts") or 1
    setting, observed = of_run(measured, engines)
    s = replace(setting, **given)
    lengths = observed.groups(s.steps * s.prompts, s.responses, seed)
    base = synchronous(s, lengths, together=True)
    apart = synchronous(s, lengths)
    rows = [row(f"together, measured {measured.seconds:.3g} s", base, base, apart, together=True)]
    rows.append(row("apart, taking turns", apart, base, apart))
    for ahead in (1, 2):
        bound = max(s.staleness, (ahead + 1) * s.updates - 1)
        rows.append(ahead_row(asynchronous(replace(s, ahead=ahead, staleness=bound), lengths), base, apart))
    flat = sorted(length for group in lengths for length in group)
    return "\n".join([f"### {path}", "", described(flat, s), "", HEADER, *rows])


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="only these")
    parser.add_argument("--bounds", action="store_true", help="several staleness bounds")
    parser.add_argument("--run", type=Path, help="the directory of a synchronous run")
    parser.add_argument("--lengths", type=Path, help="a JSON file of lengths")
    parser.add_argument("--seed", type=int, default=SEED)
    for each in fields(Setting):
        kind = {"int": int, "float": float, "bool": lambda text: text == "true"}.get(str(each.type), int)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, help=f"default {each.default}")
    return parser


def main() -> None:
    chosen = _options().parse_args()
    given = {each.name: value for each in fields(Setting) if (value := getattr(chosen, each.name)) is not None}
    if chosen.run:
        print(run_table(chosen.run, chosen.seed, given))
        return
    scenarios = [SCENARIOS[name] for name in chosen.scenario or SCENARIOS]
    if chosen.lengths:
        seen = read_lengths(chosen.lengths)
        scenarios = [replace(each, lengths=seen) for each in scenarios]
    for scenario in scenarios:
        shown = bounds_table if chosen.bounds else table
        print(shown(scenario.changed(**given), chosen.seed), end="\n\n", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
