"""A run: its parts built from the configuration, and the beginning, middle and end of it. Its directory holds:

config.json      the resolved configuration
metrics.jsonl    one line per rollout, update and evaluation; a function of the configuration alone
timing.jsonl     wall-clock figures, one line per step
rollouts.jsonl   sample responses with rewards and versions
failures.jsonl   responses the verifier failed on, with the cause; there is none if it never did
checkpoints/     see checkpoint.py
model/           the trained model, in transformers format, with a card
adapter/         low-rank additions by themselves, in peft's format, if those were trained
summary.json     evaluation before and after; written last, so its presence means the run is complete
lock             held by the process at work
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from bapo import __version__
from bapo.config.errors import CheckpointError, ConfigError, Interrupted, VerifierFailed
from bapo.config.run import Config
from bapo.evaluate import evaluate
from bapo.models import prompt_text
from bapo.models.export import save_additions, save_policy
from bapo.rollout.engine import Sampling
from bapo.runs.metrics import check_declared
from bapo.runs.write import RunDirectory
from bapo.screen.view import View, make_view, summary_table
from bapo.tasks.data.problems import fingerprint
from bapo.train import checkpoint
from bapo.train.build import build, resolve
from bapo.train.card import model_card
from bapo.train.life_cycle import save, stop_on_signal
from bapo.train.loop import Parts, Progress, StepRecord, train
from bapo.types import Trajectory


def start(config: Config, *, plain: bool | None = None) -> dict[str, Any]:
    """Train from the beginning; returns the summary."""
    config = resolve(config)
    parts = _built(config)
    run = RunDirectory.create(config)
    with run.held():
        return _go(run, parts, Progress(), plain=plain)


def resume(path: Path, *, plain: bool | None = None) -> dict[str, Any]:
    """Continue a run from its newest checkpoint; a complete run only returns its summary."""
    run = RunDirectory(path)
    config = run.config(Config)
    if (finished := run.summary()) is not None:
        return finished
    with run.held():
        return _continue(run, config, plain=plain)


def _continue(run: RunDirectory, config: Config, *, plain: bool | None) -> dict[str, Any]:
    source = checkpoint.newest(run.path / "checkpoints")
    parts, progress = _built(config), Progress()
    state = checkpoint.load(source, parts.learner)
    if state["problems"] != fingerprint([*parts.task.train, *parts.task.test]):
        raise CheckpointError(
            f"the problems to train or test on (task.name={config.task.name!r}) changed since {run.path} began, so it "
            "cannot be continued as it was. Restore the data, or start a new run."
        )
    _restore(parts, progress, state)
    run.cut(state["logs"])
    return _go(run, parts, progress, plain=plain)


def _built(config: Config) -> Parts:
    try:
        return build(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _go(run: RunDirectory, parts: Parts, progress: Progress, *, plain: bool | None) -> dict[str, Any]:
    """Evaluate, train, evaluate, save; checkpoints and logs on the way."""
    config = parts.config
    title = f"{config.objective.name} · {config.model.path} · {run.path}"
    stopping: list[str] = []
    with make_view(config.steps, title=title, plain=plain) as view:
        for note in parts.notes:
            view.note(note)
        if progress.step == 0:
            _save(run, parts, progress)
            view.note(f"evaluating on {config.eval.problems} held-out problems before training")
            _evaluate_fully(run, parts, progress, view)
        else:
            view.note(f"resumed at step {progress.step}")

        def after_step(record: StepRecord) -> bool:
            _log(run, record, parts, view)
            last = progress.step == config.steps
            if config.eval.every and progress.step % config.eval.every == 0 and not last:
                problems = max(1, config.eval.problems // 4)
                result = _evaluate(run, parts, progress, view, problems, config.eval.temperature)
                view.note(f"step {progress.step}: held-out avg@{config.eval.k} {result['eval/avg']:.3f}")
            if progress.step % config.checkpoint_every == 0 or last or stopping:
                _save(run, parts, progress)
            return bool(stopping)

        with stop_on_signal(stopping):
            train(parts, progress, after_step=after_step, watching=view.doing)
        if stopping:
            raise Interrupted(
                f"stopped after step {progress.step}, which is saved. Continue with: bapo resume {run.path}"
            )
        view.note(f"evaluating on {config.eval.problems} held-out problems after training")
        _evaluate_fully(run, parts, progress, view)
        summary = _summarize(run, config)
        _export(run, parts, summary)
    run.write("summary.json", summary)
    _show(summary, config, run)
    return summary


def _save(run: RunDirectory, parts: Parts, progress: Progress) -> None:
    """All that the next step depends on, besides the learner."""
    state = {
        "progress": asdict(progress),
        "problems": fingerprint([*parts.task.train, *parts.task.test]),
        "cursor": parts.stream.cursor,
        "scheduler": parts.scheduler.state_dict(),
        "buffer": parts.buffer.state_dict(),
    }
    save(run, progress.step, parts.learner, state, keep=parts.config.checkpoint_keep)


def _restore(parts: Parts, progress: Progress, state: dict[str, Any]) -> None:
    """What `_save` kept, back in its place."""
    parts.stream.cursor = state["cursor"]
    parts.scheduler.load_state_dict(state["scheduler"])
    parts.buffer.load_state_dict(state["buffer"])
    progress.step, progress.groups, progress.owed = (state["progress"][k] for k in ("step", "groups", "owed"))


def _evaluate_fully(run: RunDirectory, parts: Parts, progress: Progress, view: View) -> None:
    """On all problems, at every temperature asked for."""
    config = parts.config.eval
    for temperature in (config.temperature, *config.also_at):
        _evaluate(run, parts, progress, view, config.problems, temperature)


def _evaluate(
    run: RunDirectory, parts: Parts, progress: Progress, view: View, problems: int, temperature: float
) -> dict[str, Any]:
    config = parts.config
    greedy_again = temperature == 0 and temperature != config.eval.temperature  # k samples would all be the same
    with view.doing("evaluating") as watch:
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
            watch=watch,
        )
    if result.failures == result.problems * result.k:
        raise VerifierFailed(result.failures, result.first_failure, f"of the evaluation after step {progress.step}")
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
            scored = [(t.reward, text) for t, text in zip(group.trajectories, responses, strict=True)]
            for reward, text in [(reward, text) for reward, text in scored if reward is not None][:1]:
                view.sample(prompt_text(group.problem.prompt), text, reward)
    if record.failures:
        run.append("failures.jsonl", *({"step": record.step} | asdict(failure) for failure in record.failures))
        if "reward" not in record.rollout:
            raise VerifierFailed(len(record.failures), record.failures[0].cause, f"of step {record.step}")
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


def _why_no_update(config: Config, after: dict[str, Any]) -> str:
    """What a run that learned nothing should change."""
    told = "No update was taken: no group finished with different rewards."
    if config.offpolicy.partial_budget is not None:
        return f"{told} Raise offpolicy.partial_budget or steps."
    if after["eval/avg"] < SELDOM:
        return f"{told} The model (nearly) never earns one: warm-start it (docs/sft.md), or give it easier problems."
    return f"{told} Give it problems that it solves now and then, larger groups, or more steps."


SELDOM = 0.02
"""A mean reward below this leaves most groups without a single success."""


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
        print(_why_no_update(config, after))
    failures = run.path / "failures.jsonl"
    if failures.exists() and failures.stat().st_size:
        lines = failures.read_text().splitlines()
        print(f"{len(lines)} responses were left out because the verifier failed on them: {failures}")
    print(
        f"{summary['updates']} updates in {summary['training_seconds']:.0f} s of training; no token older than "
        f"{summary['staleness_max']:.0f} updates (bound {config.offpolicy.max_staleness})\n"
        f"run directory   {run.path}\ntrained model   {run.path / 'model'}"
    )
