"""A run: its directory, its parts built from the configuration, and the beginning, middle and end of it.

config.json      the resolved configuration
metrics.jsonl    one line per rollout, update and evaluation; a function of the configuration alone
timing.jsonl     wall-clock figures, one line per step
rollouts.jsonl   sample responses with rewards and versions
failures.jsonl   responses the verifier failed on, with the cause; there is none if it never did
checkpoints/     see checkpoint.py
model/           the trained model, in transformers format, with a card
adapter/         low-rank additions by themselves, in peft's format, if those were trained
summary.json     evaluation before and after; written last, so its presence means the run is complete
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from bapo import __version__
from bapo.config import Config, ConfigError
from bapo.evaluate import evaluate
from bapo.metrics import check_declared
from bapo.models import prompt_text
from bapo.models.export import save_additions, save_policy
from bapo.rollout.engine import Sampling
from bapo.train import checkpoint
from bapo.train.build import build, resolve
from bapo.train.card import model_card
from bapo.train.loop import Parts, Progress, StepRecord, train
from bapo.types import Trajectory
from bapo.view import View, make_view, summary_table

LOGS = ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "failures.jsonl")


class Interrupted(Exception):  # noqa: N818
    """The run was asked to stop, and did, after saving."""


class RunDirectory:
    """The files of a run. Logs are appended line by line and flushed, so that others can follow them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """A new directory; an existing one is never written over."""
        path = Path(config.out.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"out={config.out}: {path} exists already. Choose another directory, or continue that run with "
                f"`bapo resume {path}`."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"out={config.out}: cannot create {path}: {error.strerror}. Choose another place."
            ) from None
        run = cls(path)
        run.write("config.json", config.model_dump(mode="json"))
        return run

    def write(self, name: str, value: Any) -> None:
        """A JSON file, whole or not at all."""
        partial = self.path / f"{name}.partial"
        partial.write_text(json.dumps(value, indent=2) + "\n")
        partial.rename(self.path / name)

    def append(self, name: str, *values: dict[str, Any]) -> None:
        """Lines to a log."""
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)

    def sizes(self) -> dict[str, int]:
        """How long each log is, in bytes."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in LOGS}

    def cut(self, sizes: dict[str, int]) -> None:
        """Forget what was logged after a checkpoint; those steps will be repeated."""
        for name, size in sizes.items():
            if self.sizes()[name] < size:
                raise checkpoint.CheckpointError(
                    f"{self.path / name} is shorter than its checkpoint recorded: {self.sizes()[name]} of {size} "
                    "bytes, so the run cannot be continued without a gap. Restore the file, or start the run again."
                )
        for name, size in sizes.items():
            if size < self.sizes()[name]:
                os.truncate(self.path / name, size)

    def flush(self) -> None:
        """Logs to the disk, so that none is shorter than a checkpoint says."""
        for name in LOGS:
            if (self.path / name).exists():
                with (self.path / name).open("a") as file:
                    os.fsync(file.fileno())


def start(config: Config, *, plain: bool | None = None) -> dict[str, Any]:
    """Train from the beginning; returns the summary."""
    config = resolve(config)
    try:
        parts = build(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    run = RunDirectory.create(config)
    return _go(run, parts, Progress(), plain=plain)


def resume(path: Path, *, plain: bool | None = None) -> dict[str, Any]:
    """Continue a run from its newest checkpoint; a complete run only returns its summary."""
    run = RunDirectory(path)
    try:
        config = Config.model_validate_json((path / "config.json").read_text())
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{path / 'config.json'} is damaged: {error}. Restore it to resume.") from None
    except OSError:
        raise checkpoint.CheckpointError(
            f"{path} has no config.json, so it is not a run directory. Give the directory that `bapo train` printed."
        ) from None
    if (path / "summary.json").exists():
        finished: dict[str, Any] = json.loads((path / "summary.json").read_text())
        return finished
    source = checkpoint.newest(path / "checkpoints")
    parts, progress = build(config), Progress()
    run.cut(checkpoint.load(source, parts, progress))
    return _go(run, parts, progress, plain=plain)


def _go(run: RunDirectory, parts: Parts, progress: Progress, *, plain: bool | None) -> dict[str, Any]:
    """Evaluate, train, evaluate, save; checkpoints and logs on the way."""
    config = parts.config
    title = f"{config.objective.name} · {config.model.path} · {run.path}"
    stopping: list[str] = []
    with make_view(config.steps, title=title, plain=plain) as view:
        if progress.step == 0:
            _save(run, parts, progress)
            view.note(f"evaluating on {config.eval.problems} held-out problems before training")
            _evaluate_fully(run, parts, progress)
        else:
            view.note(f"resumed at step {progress.step}")

        def after_step(record: StepRecord) -> bool:
            _log(run, record, parts, view)
            last = progress.step == config.steps
            if config.eval.every and progress.step % config.eval.every == 0 and not last:
                result = _evaluate(run, parts, progress, max(1, config.eval.problems // 4), config.eval.temperature)
                view.note(f"step {progress.step}: held-out avg@{config.eval.k} {result['eval/avg']:.3f}")
            if progress.step % config.checkpoint_every == 0 or last or stopping:
                _save(run, parts, progress)
            return bool(stopping)

        with _stop_on_signal(stopping):
            train(parts, progress, after_step=after_step)
        if progress.step < config.steps:
            raise Interrupted(
                f"stopped after step {progress.step}, which is saved. Continue with: bapo resume {run.path}"
            )
        view.note(f"evaluating on {config.eval.problems} held-out problems after training")
        _evaluate_fully(run, parts, progress)
        summary = _summarize(run, config)
        _export(run, parts, summary)
    run.write("summary.json", summary)
    _show(summary, config, run)
    return summary


def _save(run: RunDirectory, parts: Parts, progress: Progress) -> None:
    run.flush()
    checkpoint.save(run.path / "checkpoints", parts, progress, logs=run.sizes(), keep=parts.config.checkpoint_keep)


def _evaluate_fully(run: RunDirectory, parts: Parts, progress: Progress) -> None:
    """On all problems, at every temperature asked for."""
    config = parts.config.eval
    for temperature in (config.temperature, *config.also_at):
        _evaluate(run, parts, progress, config.problems, temperature)


def _evaluate(run: RunDirectory, parts: Parts, progress: Progress, problems: int, temperature: float) -> dict[str, Any]:
    config = parts.config
    greedy_again = temperature == 0 and temperature != config.eval.temperature  # k samples would all be the same
    result = evaluate(
        parts.engine,
        parts.policy.encode,
        parts.policy.decode,
        parts.task,
        list(parts.task.test)[:problems],
        k=1 if greedy_again else config.eval.k,
        sampling=Sampling(temperature, parts.policy.stop_ids),
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        version=parts.learner.version,
    )
    line = {"kind": "eval", "step": progress.step, "version": parts.learner.version}
    line |= result.summary() | {"eval/problems": result.problems, "eval/temperature": temperature}
    check_declared(line)
    run.append("metrics.jsonl", line)
    return line


def _log(run: RunDirectory, record: StepRecord, parts: Parts, view: View) -> None:
    lines = [{"kind": "rollout", "step": record.step, "version": parts.learner.version} | record.rollout]
    lines += [{"kind": "update", "step": record.step, "version": u.version} | u.metrics for u in record.updates]
    for line in lines:
        check_declared(line)
    run.append("metrics.jsonl", *lines)
    run.append("timing.jsonl", {"step": record.step} | record.timing)
    for group in record.samples:
        responses = [parts.policy.decode(t.tokens) for t in group.trajectories]
        written = [_written_by(t, parts.policy.decode) for t in group.trajectories]
        sample = asdict(group) | {"step": record.step, "responses": responses, "written_by": written}
        run.append("rollouts.jsonl", sample)
        if record.step % parts.config.sample_every == 1 or parts.config.sample_every == 1:
            view.sample(prompt_text(group.problem.prompt), responses[0], group.trajectories[0].reward or 0.0)
    if record.failures:
        run.append("failures.jsonl", *({"step": record.step} | asdict(failure) for failure in record.failures))
    shown = record.rollout | (record.updates[-1].metrics if record.updates else {})
    view.step(record.step, {k: v for k, v in shown.items() if not isinstance(v, list)}, record.timing)


def _written_by(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> list[tuple[int, str]]:
    """The text of a response, cut where another version of the policy took over: (version, text) in order."""
    tagged = groupby(zip(trajectory.versions, trajectory.tokens, strict=True), key=lambda pair: pair[0])
    return [(version, decode([token for _, token in pairs])) for version, pairs in tagged]


def _export(run: RunDirectory, parts: Parts, summary: dict[str, Any]) -> None:
    """The trained model, loadable by transformers and vLLM; low-rank additions, if any, also by themselves."""
    config, policy = parts.config, parts.policy
    card = model_card(config, summary, chat=policy.chat, version=__version__)
    save_policy(policy, run.path / "model", card=card, temperature=config.rollout.temperature)
    if policy.adapters is not None:
        save_additions(policy, run.path / "adapter", card=card, base=config.model.path)


def _summarize(run: RunDirectory, config: Config) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    full = [line for line in lines if line["kind"] == "eval" and line["step"] in (0, config.steps)]
    asked = 1 + len(config.eval.also_at)
    before, after = full[:asked], full[-asked:]
    others = zip(config.eval.also_at, before[1:], after[1:], strict=True)
    seconds = [json.loads(line)["seconds"] for line in (run.path / "timing.jsonl").read_text().splitlines()]
    staleness = [line["staleness_max"] for line in lines if line["kind"] == "update"]
    return {
        "before": before[0],
        "after": after[0],
        "also_at": [{"temperature": t, "before": one, "after": other} for t, one, other in others],
        "updates": len(staleness),
        "training_seconds": sum(seconds),
        "staleness_max": max(staleness, default=0.0),
    }


def _show(summary: dict[str, Any], config: Config, run: RunDirectory) -> None:
    """One screen: what training changed, and where everything is."""
    before, after, k = summary["before"], summary["after"], config.eval.k

    def interval(line: dict[str, Any], key: str) -> str:
        return f"{line[key]:.3f}  [{line[f'{key}_low']:.3f}, {line[f'{key}_high']:.3f}]"

    rows = [
        (f"avg@{k}", interval(before, "eval/avg"), interval(after, "eval/avg")),
        (f"pass@{k}", interval(before, "eval/pass"), interval(after, "eval/pass")),
        ("entropy, nats per token", f"{before['eval/entropy']:.3f}", f"{after['eval/entropy']:.3f}"),
        ("response length", f"{before['eval/length']:.1f}", f"{after['eval/length']:.1f}"),
    ]
    for other in summary["also_at"]:
        samples = 1 if other["temperature"] == 0 else k
        name = f"avg@{samples} at temperature {other['temperature']:g}"
        rows.append((name, interval(other["before"], "eval/avg"), interval(other["after"], "eval/avg")))
    summary_table(f"{config.eval.problems} held-out problems, temperature {config.eval.temperature:g}", rows)
    if not summary["updates"]:
        print("No update was taken: no group finished with different rewards. Raise offpolicy.partial_budget or steps.")
    print(
        f"{summary['updates']} updates in {summary['training_seconds']:.0f} s of training; no token older than "
        f"{summary['staleness_max']:.0f} updates (bound {config.offpolicy.max_staleness})\n"
        f"run directory   {run.path}\ntrained model   {run.path / 'model'}"
    )


@contextmanager
def _stop_on_signal(stopping: list[str]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step finish and be saved; the second one ends at once.

    Evaluations before and after training are not covered: they change nothing, so a signal ends them at once.
    """

    def ask(number: int, _frame: Any) -> None:
        if stopping:
            raise KeyboardInterrupt
        stopping.append(signal.Signals(number).name)
        print("\nstopping after this step; once more to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
