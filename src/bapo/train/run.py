"""A run of reinforcement learning, as `life_cycle.py` drives it. Its directory holds:

config.json      the resolved configuration
metrics.jsonl    one line per rollout, update and evaluation; a function of the configuration alone
timing.jsonl     wall-clock figures, one line per step
rollouts.jsonl   sample responses with rewards and versions
ledger.jsonl     what happened to every group, from its admission to its last use (bapo/runs/ledger.py)
skipped/         the batch of the last skipped update, if the run stopped because of it
failures.jsonl   responses that the verifier failed on, with the cause; exists only if there are any
judged.jsonl     what a judge said, by the digest of what it was sent: nothing is asked twice, also after a kill
checkpoints/     see checkpoint.py
model/           the trained model, in transformers format, with a card
adapter/         the low-rank additions alone, in peft's format, if they were trained
summary.json     evaluation before and after; written last, so its presence means the run is complete
model.sha256     the checksums of the trained model, for `sha256sum --check`
history.jsonl    each start and resume: the run's identity, changed settings, threads and versions; on a cluster, each
                 restart of an actor
lock             held by the process at work
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bapo.config.errors import CheckpointError, VerifierFailed
from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.environments.played import conversations_of
from bapo.evaluate import evaluate
from bapo.learn.learner import Learner, Update
from bapo.models.policy import prompt_text
from bapo.preflight.examine import TaskData
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.runs import files, history, ledger
from bapo.runs.statistics import FEW_RESPONSES, MOSTLY_CUT_OFF
from bapo.runs.write import JUDGED
from bapo.screen.terminal import shortened
from bapo.tasks.data.problems import fingerprint
from bapo.tasks.task import mostly_why, told_failures
from bapo.tasks.verify.scorers import DataTask
from bapo.train import life_cycle
from bapo.train.build import build, cluster_notes
from bapo.train.card import eval_command, model_card, show_ending, upload
from bapo.train.continuing import check_ledger, check_state
from bapo.train.job import Job, Log, RunState, StepRecord, Summary, When, ends_run, skipped_line, stop_after
from bapo.train.loop import Loop, load_weights
from bapo.train.scoring import ENOUGH_GROUPS, Failing, warning
from bapo.train.torchrun import ALONE, Team
from bapo.types import OPTIONAL, Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from bapo.train.cluster.learner import RemoteLearner


def start(config: Config, *, data: TaskData | None = None, plain: bool | None = None) -> Summary:
    """Train from the beginning. Returns the summary. `data`: the problems, if they were read already."""
    return life_cycle.start(partial(Training, data=data), config, plain=plain)


class Training(Job):
    """Reinforcement learning: rollouts, updates, evaluations."""

    unit = "step"
    shows_samples = True

    def __init__(self, config: Config, team: Team = ALONE, data: TaskData | None = None) -> None:
        self.parts = build(config, team, data)
        self.config: Config = self.parts.config
        self.policy, self.learner, self.notes = self.parts.policy, self.parts.learner, self.parts.notes
        self.title, self.total = self.config.objective.name, self.config.steps
        self.sampling = self.config.rollout.sampling
        self.judge = self.parts.task.judge if isinstance(self.parts.task, DataTask) else None
        kind = Loop
        if self.config.cluster.on:
            from bapo.train.cluster.loop import AsyncLoop

            kind = AsyncLoop
        self.loop = kind(self.parts, RunState())
        self._sampled, self._cut_off = 0, 0.0
        """Of the first responses: how many there were, and how many of them the length limit cut off."""

    @property
    def done(self) -> int:
        """How many steps are completed."""
        return self.loop.state.step

    def watched(self, log: Log) -> None:
        """Say which processes a cluster has, and show what each of them does."""
        for note in cluster_notes(self.config):
            log.view.note(note)
        if self.judge is not None:
            place = log.run.path / JUDGED
            self.judge.remember(_judged(place), lambda lines: files.append(place, _as_lines(lines)))
        self.loop.watched(log.view, log.run.path)

    def advance(self, log: Log) -> None:
        """Take one step, with one rollout and the updates on it; log it, and look at what went wrong."""
        record = self.loop.take_step(log.view)
        rollout = {"kind": "rollout", "step": record.step, "version": self.learner.version} | record.rollout
        log.metrics(rollout, *(_update_line(record.step, update) for update in record.updates))
        judging = {} if self.judge is None else self.judge.take()
        log.timing({"step": record.step} | record.timing | judging)
        log.run.append(ledger.FILE, *self.parts.ledger.take())
        self._log_samples(record, log)
        self._look_at_failures(record, log)
        nothing_scored = record.scored.failures and "reward" not in record.rollout
        if not record.updates and not nothing_scored:
            log.view.note(f"step {record.step}: no update. {self._why_nothing_is_learned(record)}")
        self._tell_of_fragments(record, log)
        self._tell_of_drift(record, log)
        self._stop_if_diverged(record, log)
        shown = record.rollout | (record.updates[-1].metrics if record.updates else {})
        log.view.step(record.step, shown, record.timing)

    def _look_at_failures(self, record: StepRecord, log: Log) -> None:
        """Log responses without a reward, and end the run if the verifier fails on group after group."""
        failures = record.scored.failures
        if failures:
            log.run.append("failures.jsonl", *({"step": record.step} | asdict(failure) for failure in failures))
        failing = self.loop.state.failing = self.loop.state.failing.after(record.step, record.scored)
        if failing.ends_run:
            steps = f"step {record.step}" if failing.since == record.step else f"steps {failing.since} to {record.step}"
            raise VerifierFailed(failing.responses, failing.cause, f"of {steps}")
        if failing.groups and failures:
            log.view.note(
                f"step {record.step}: no reward, because the verifier failed on all {len(failures)} responses; "
                f"{mostly_why(record.scored.causes)}. The run ends if it fails so on {ENOUGH_GROUPS} groups in a row."
            )
        elif failures:
            log.view.note(f"step {record.step}: {told_failures(record.scored.causes)}")

    def _why_nothing_is_learned(self, record: StepRecord) -> str:
        if "reward" in record.rollout:
            mean = f"mean reward {record.rollout['reward']:.3g}"
            if (truncated := self.config.learn.truncated) != "keep":
                return (
                    f"No group had rewards that differ, without what learn.truncated={truncated!r} leaves out ({mean})."
                )
            return f"A group teaches only if its rewards differ, and none did ({mean})."
        left = record.rollout["rollout/parked"] + record.rollout["rollout/waiting"]
        budget = self.config.offpolicy.partial_budget
        why = f"; offpolicy.partial_budget={budget} tokens per step finish few" if budget else ""
        return f"No group is finished, so there are no metrics: {counted(left, 'response')} will be continued{why}."

    def _tell_of_fragments(self, record: StepRecord, log: Log) -> None:
        """Say that the length limit cuts off most responses, as soon as there are enough of them to know."""
        sampled, limit = self._sampled, self.config.rollout
        if sampled >= FEW_RESPONSES or "truncated" not in record.rollout:
            return
        more = record.rollout["rollout/finished_groups"] * limit.responses
        self._sampled, self._cut_off = sampled + more, self._cut_off + more * record.rollout["truncated"]
        if self._sampled >= FEW_RESPONSES and self._cut_off > MOSTLY_CUT_OFF * self._sampled:
            log.view.note(
                f"rollout.max_tokens={limit.max_tokens} cut off {self._cut_off / self._sampled:.0%} of {self._sampled} "
                "sampled responses, so unfinished text was scored. Raise it, or ask for shorter answers."
            )

    def _tell_of_drift(self, record: StepRecord, log: Log) -> None:
        """Say once in a run that sampler and learner have drifted apart. A refused update says so itself."""
        drifted = next((update for update in record.updates if update.drift and update.skipped is None), None)
        if drifted is not None and not self.loop.state.drift:
            self.loop.state.drift = f"update {drifted.version}: {drifted.drift}"
            log.view.note(self.loop.state.drift)

    def _stop_if_diverged(self, record: StepRecord, log: Log) -> None:
        last = record.updates[-1] if record.updates else None
        if last is not None and last.skipped is not None:
            told = counted(self.loop.state.skipped, "update was", "updates were")
            log.view.note(f"step {record.step}: {told} skipped in a row: {last.skipped.cause}")
            if ends_run(last, self.config.learn.skip_limit):
                stop_after(log.run, last, lr=self.config.learn.lr)

    def _log_samples(self, record: StepRecord, log: Log) -> None:
        decode, every = self.policy.decode, self.config.sample_every
        for group in record.samples:
            responses = [decode(t.tokens) for t in group.trajectories]
            written = [_written_by(t, decode) for t in group.trajectories]
            sample = _recorded(group) | {"step": record.step, "responses": responses, "written_by": written}
            log.run.append("rollouts.jsonl", sample)
            rewards = [t.reward for t in group.trajectories]
            scored = [(text, reward) for text, reward in zip(responses, rewards, strict=True) if reward is not None]
            if scored and (record.step % every == 1 or every == 1):
                log.view.sample(prompt_text(group.problem.prompt), *scored[0])

    def measure(self, log: Log, when: When) -> None:
        """Evaluate on the same problems every time; before and after training also at the other temperatures."""
        config = self.config.eval
        self.loop.pause()
        load_weights(self.parts)
        if when == "during":
            found = self._evaluate(log, config.temperature, step=self.done)
            log.view.note(f"step {self.done}: held-out avg@{config.k} {found['eval/avg']:.3f}")
        else:
            log.view.note(f"evaluating on {counted(config.problems or 0, 'held-out problem')} {when} training")
            self._evaluate_fully(log, step=self.done)

    def measure_later(self) -> Callable[[Log], None] | None:
        """Set the initial weights aside: on a CPU an evaluation takes long, and one more copy of them is cheap."""
        if self.config.device != "cpu" or not isinstance(self.parts.engine, LocalEngine):
            return None
        model: Any = self.policy.model
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        aside = {name: weight.clone() for name, weight in self.learner.weights() if name in trained}
        return partial(self._evaluate_initial, aside)

    def _evaluate_initial(self, aside: dict[str, Tensor], log: Log) -> None:
        """Evaluate the weights that were set aside, and then put those of now back."""
        learner, engine = self.learner, self.parts.engine
        engine.load(_exchanged(learner.weights(), aside), version=0)
        problems = self.config.eval.problems
        log.view.note(f"evaluating the weights from before step 1 on {counted(problems or 0, 'held-out problem')}")
        try:
            self._evaluate_fully(log, step=0)
        finally:
            engine.load(_exchanged(learner.weights(), aside), version=learner.version)

    def _evaluate_fully(self, log: Log, *, step: int) -> None:
        for temperature in (self.config.eval.temperature, *self.config.eval.also_at):
            self._evaluate(log, temperature, step=step)

    def _evaluate(self, log: Log, temperature: float, *, step: int) -> dict[str, Any]:
        """Evaluate the weights that the engine has: those after this step."""
        config, parts = self.config, self.parts
        greedy_again = temperature == 0 and temperature != config.eval.temperature  # k samples would all be the same
        with log.view.doing("evaluating") as tell:
            result = evaluate(
                parts.engine,
                parts.policy,
                parts.task.scores,
                list(parts.task.test)[: config.eval.problems],
                k=1 if greedy_again else config.eval.k,
                sampling=Sampling(temperature, parts.policy.stop_ids),
                max_tokens=config.rollout.max_tokens,
                seed=config.seed,
                tell=tell,
                conversations=conversations_of(parts.task, config.task, parts.policy, config.rollout.max_tokens),
            )
        if result.failures == result.problems * result.k:
            raise VerifierFailed(result.failures, result.first_failure, f"of the evaluation after step {step}")
        if result.failures:
            of, cause = counted(result.problems * result.k, "held-out response"), shortened(result.first_failure, 100)
            log.view.note(f"no reward for {result.failures} of {of}, which count 0; the first cause: {cause}")
        line = {"kind": "eval", "step": step, "version": parts.engine.version}
        line |= result.summary() | {"eval/problems": result.problems, "eval/temperature": temperature}
        log.metrics(line)
        return line

    def state(self) -> dict[str, Any]:
        """Where the run stands: its progress, the data, and every group that is in progress, waits or is held."""
        assert self.parts.ledger.written, "the ledger has events that the state would have and the log would not"
        return {
            "progress": asdict(self.loop.state),
            "problems": self._fingerprint(),
            "cursor": self.parts.stream.cursor,
            "scheduler": self.parts.scheduler.state_dict(),
            "buffer": self.parts.buffer.state_dict(),
            **self._reference(),
            **({} if self.judge is None else {"judge": self.judge.identity}),
            **({"unmeasured": True} if self.unmeasured else {}),
            **self.loop.state_dict(),
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from this state, if problems, reference weights and ledger are those that it was made with."""
        if state["problems"] != self._fingerprint():
            raise CheckpointError(
                f"the problems to train or test on (task.name={self.config.task.name!r}) changed since {path} began, "
                "so the run cannot be continued. Restore the data, or start a new run."
            )
        if self._reference().get("reference") != state.get("reference"):
            raise CheckpointError(
                f"{self.config.learn.refers} keeps the policy near the weights with which {path} began, but "
                f"model.path={self.config.model.path!r} holds other weights now. Nothing was changed. Put the model "
                "back, or start a new run."
            )
        if self.judge is not None and state.get("judge") != self.judge.identity:
            raise CheckpointError(
                f"task.judge.rubric={shortened(self.config.task.judge.rubric, 60)!r} says something else now than when "
                f"{path} began, so scores would not mean the same. Put its file back, or start a new run."
            )
        check_state(state, self.parts.task.train, self.policy.model.get_input_embeddings().num_embeddings)
        check_ledger(path, state, max_staleness=self.config.offpolicy.max_staleness)
        self.parts.stream.cursor = state["cursor"]
        self.parts.scheduler.load_state_dict(state["scheduler"])
        self.parts.buffer.load_state_dict(state["buffer"])
        self.loop.state = RunState(**state["progress"] | {"failing": Failing(**state["progress"]["failing"])})
        self.unmeasured = bool(state.get("unmeasured"))
        self.loop.load_state_dict(state)

    def export(self, path: Path, card: str, team: Team) -> None:
        """Write the trained model. On a cluster the learner does so, because its ranks have the weights."""
        if self.config.cluster.on:
            cast("RemoteLearner", self.learner).export(path, card)
        else:
            super().export(path, card, team)

    def close(self) -> None:
        """End the actors of a cluster, and the thread that scores."""
        self.loop.close()
        if self.judge is not None:
            self.judge.close()
        self.parts.close()

    def _reference(self) -> dict[str, int]:
        """The fingerprint of the weights that a KL penalty refers to, unless they are in the checkpoint."""
        reference = self.learner.reference if isinstance(self.learner, Learner) else None
        return {} if reference is None or reference.moving else {"reference": reference.fingerprint}

    def _fingerprint(self) -> str:
        return fingerprint([*self.parts.task.train, *self.parts.task.test])

    def summary(self, lines: list[dict[str, Any]], path: Path) -> Summary:
        """Compare the evaluations before and after, and count updates, skipped ones, and restarts on a cluster."""
        config = self.config
        full = [line for line in lines if line["kind"] == "eval" and line["step"] in (0, config.steps)]
        asked = 1 + len(config.eval.also_at)
        before, after = full[:asked], full[-asked:]
        others = zip(config.eval.also_at, before[1:], after[1:], strict=True)
        staleness = [line["staleness_max"] for line in lines if line["kind"] == "update"]
        rollouts = [line for line in lines if line["kind"] == "rollout"]
        shaped = config.task.overlong_tokens > 0
        warned = warning(rollouts, config.rollout.responses, _causes(path), shaped=shaped)
        return {
            "before": before[0],
            "after": after[0],
            "also_at": [{"temperature": t, "before": one, "after": other} for t, one, other in others],
            "updates": len(staleness),
            "skipped": sum(line["kind"] == "skipped" for line in lines),
            "staleness_max": max(staleness, default=0.0),
            **({"warning": warned} if warned else {}),
            **({"restarts": history.restarts(path)} if config.cluster.on else {}),
        }

    def card(self, summary: Summary) -> str:
        """The README.md of the trained model."""
        return model_card(self.config, summary, chat=self.policy.chat)

    def show(self, summary: Summary, path: Path) -> None:
        """Print the evaluations before and after, and what went wrong."""
        show_ending(self.config, summary, path, drift=self.loop.state.drift)

    def next_steps(self, path: Path) -> list[str]:
        """The report, the trained model's place on a hub, its evaluation, and more steps."""
        again = eval_command(self.config, str(path / "model"), chat=self.policy.chat)
        further = f"bapo resume {path} --steps {2 * self.config.steps}"
        commands = (f"bapo report {path}", upload(self.config, path / "model"), again, further)
        return [command for command in commands if command]


resume = partial(life_cycle.resume, Training, Config)
"""Continue the run in a directory, as `life_cycle.resume` says."""


def _update_line(step: int, update: Update) -> dict[str, Any]:
    if update.skipped is not None:
        return skipped_line(update, step)
    return {"kind": "update", "step": step, "version": update.version} | update.metrics


def _causes(path: Path) -> Counter[str]:
    """How often the verifier failed for which reason in the run so far."""
    failures = path / "failures.jsonl"
    lines = files.read(failures).splitlines() if failures.exists() else []
    return Counter(json.loads(line)["cause"] for line in lines)


def _judged(path: Path) -> Iterator[dict[str, Any]]:
    """What a judge said so far. A line that a kill cut off is none."""
    for line in files.read(path).splitlines() if os.path.lexists(path) else ():
        with suppress(ValueError):
            yield files.object_in(line)


def _as_lines(values: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _exchanged(weights: Iterable[tuple[str, Tensor]], aside: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights that are aside in place of those of now, for an engine that shares its weights with the learner.

    When a weight has been loaded, the one of now is aside in its stead. So there is never more than one copy.
    """
    for name, weight in weights:
        if name not in aside:
            yield name, weight
            continue
        now = weight.clone()
        yield name, aside[name]
        aside[name] = now


def _recorded(group: Group) -> dict[str, Any]:
    """A group as it was sampled. Uses and the log-probs of a reference belong to updates."""
    sampled = asdict(group)
    del sampled["uses"]
    for trajectory in sampled["trajectories"]:
        for name in OPTIONAL:
            if name == "reference_logprobs" or not trajectory[name]:
                del trajectory[name]
    return sampled


def _written_by(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> list[tuple[int | None, str]]:
    """The text of a response, cut where the version of the policy changes: (version, text) in order.

    The version of what an environment said is None.
    """
    versions = iter(trajectory.versions)
    writers = [next(versions) if own else None for own in trajectory.sampled] if trajectory.sampled else versions
    tagged = groupby(zip(writers, trajectory.tokens, strict=True), key=lambda pair: pair[0])
    return [(version, decode([token for _, token in pairs])) for version, pairs in tagged]
