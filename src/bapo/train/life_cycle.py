"""The life of a run, whatever it trains: start, resume, save, stop, summarise.

    save, measure; then step after step: log, measure now and then, save now and then; measure, export, summarise

A job may put the first measurement off until the first step is taken, so that a person sees a step soon. It then
measures what it has set aside. In the logs the measurement comes first all the same, and until it is there nothing of
the first step is saved: a run that is killed in between begins again.

The `Job` (job.py) decides what a step is, what is measured and what a checkpoint must keep besides the learner. It is
either reinforcement learning (run.py) or supervised training (sft.py). A checkpoint is saved after every
`checkpoint_every` steps, after the last step, and when the run is asked to stop. The model is exported before anything
is computed from the logs, so a damaged log cannot cost it. `summary.json` is written last, so its presence means that
the run is complete. `continuing.py` decides what a run may go on from.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bapo import __version__
from bapo.config.errors import BapoError, CheckpointError, ConfigError, Interrupted
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.process import stops
from bapo.process.stops import PASSED_ON_SECONDS
from bapo.runs import files, history
from bapo.runs.read import logged_steps
from bapo.runs.write import CONFIG, SUMMARY, RunDirectory, unused
from bapo.screen.terminal import say
from bapo.screen.view import View, make_view
from bapo.tasks.verify.finding import file_of
from bapo.tasks.verify.scorers import MATH
from bapo.train import checkpoint
from bapo.train.build import resolve
from bapo.train.card import UNFINISHED_CARD, with_changes
from bapo.train.continuing import Continued, examine
from bapo.train.environment import differences, environment
from bapo.train.job import Job, Summary
from bapo.train.log import Held, Log
from bapo.train.team import Team, check_alike, team_notes
from bapo.train.together import Onlooker, joined
from bapo.train.trackers import Tracked, tracking

Kind = TypeVar("Kind", Config, SftConfig)
AT_ONCE = "at once"
"""Stands where the first signal would, while there is nothing to finish: the next one does not wait."""


def start(make: Callable[[Kind, Team], Job], config: Kind, *, plain: bool | None) -> Summary:
    """Train from the beginning. Returns the summary."""
    config = resolve(config)
    with joined(config.device) as team, ExitStack() as ending:
        job = ending.enter_context(closing(_made(make, config, team)))
        path = Path(team.lead(lambda: str(ending.enter_context(RunDirectory.begun(job.config)).given)))
        return _begin(job, ending.enter_context(closing(_run(path, team))), team, plain=plain)


def resume(
    make: Callable[[Kind, Team], Job],
    schema: type[Kind],
    path: Path,
    *,
    plain: bool | None,
    config: Kind | None = None,
    source: str | None = None,
) -> Summary:
    """Continue a run. For a complete run, only return its summary.

    `config`: settings to go on with, where they are others than those in config.json. `source`: the name of the
    checkpoint to go on from; None for the newest.
    """
    run = RunDirectory(path)
    kept = run.config(schema)
    finished, flaw = run.complete()
    if finished is not None and source is None and config in (None, kept):
        say(f"{path} is complete; its model is in {path / 'model'}.")
        return finished
    wanted = resolve(kept if config is None else config)
    with joined(wanted.device) as team, ExitStack() as ending:
        run = ending.enter_context(closing(_run(path, team)))
        team.lead(lambda: ending.enter_context(run.held()))
        team.lead(lambda: files.sweep(path))
        team.lead(lambda: _say_what_it_brings(wanted))
        if team.lead(lambda: unused(path)):
            team.lead(run.clear)
            job = ending.enter_context(closing(_made(make, wanted, team)))
            run.write(CONFIG, job.config.model_dump(mode="json"))
            return _begin(job, run, team, plain=plain, notes=["there is no checkpoint yet, so the run begins anew"])
        continued = Continued.of(team.lead(lambda: examine(run, wanted, source).as_data()))
        if flaw is not None:
            continued.notes.append(f"{flaw}, so what follows the last step is done again")
        job = ending.enter_context(closing(_made(make, wanted, team)))
        _check_vocabulary(job, checkpoint.read_state(continued.source), path)
        with _watched(job, run, team, plain=plain, after=checkpoint.step_of(continued.source)) as log:
            summary = _live(job, log, team, _restored(job, run, team, continued))
        return _shown(job, run, team, summary)


def _say_what_it_brings(config: Config | SftConfig) -> None:
    """Say which code a run brings with it, before that code is run: the run may be somebody else's."""
    if not isinstance(config, Config):
        return
    reward, address = config.task.reward, config.cluster.address
    if config.task.name == "data" and reward != MATH:
        say(f"the run's reward function {reward} is imported from {file_of(reward) or 'an unknown place'}")
    if config.cluster.on and address is not None:
        say(f"the run joins the Ray cluster at {address}, which can run code here")


def _restored(job: Job, run: RunDirectory, team: Team, continued: Continued) -> list[str]:
    """Take the job and its directory back to a checkpoint. Returns what a person should know about that."""
    state = checkpoint.load(continued.source, job.learner, team=team)
    _restore(job, state, run.path, continued.source)
    _check_length(job, continued.source)
    team.lead(lambda: _go_back(run, job.config, continued, state))
    _write_files(job, run)  # nothing else would notice that they were damaged
    team.lead(lambda: _record(run, job, "resume", continued))
    where = f"after {job.unit} {job.done}" if job.done else f"before the first {job.unit}"
    return [*continued.notes, *team_notes(team, state.get("ranks", 1)), f"resumed {where}"]


def _restore(job: Job, state: dict[str, Any], path: Path, source: Path) -> None:
    try:
        job.restore(state, path)
    except BapoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{source / checkpoint.STATE} is not the state of such a run: {type(error).__name__}: {error}. Put back "
            f"the file that the run wrote. {checkpoint.advice(source)}"
        ) from None


def _begin(job: Job, run: RunDirectory, team: Team, *, plain: bool | None, notes: Sequence[str] = ()) -> Summary:
    """Train from the beginning, in a directory that holds nothing but the configuration."""
    run.id = team.lead(history.new_id)
    _write_files(job, run)
    team.lead(lambda: _record(run, job, "start"))
    with _watched(job, run, team, plain=plain) as log:
        summary = _live(job, log, team, [*notes, *team_notes(team, None)])
    return _shown(job, run, team, summary)


def _check_vocabulary(job: Job, state: dict[str, Any], path: Path) -> None:
    """Refuse a model that reads and writes text in other tokens. An earlier version kept nothing to compare."""
    before = state.get("vocabulary")
    if before is not None and before != job.policy.vocabulary():
        raise CheckpointError(
            f"model.path={job.config.model.path!r} has another tokenizer, chat template or stop token than {path} was "
            "trained with, so its tokens would mean something else. Nothing was changed. Put the tokenizer's files "
            "back, or start a new run."
        )


def _write_files(job: Job, run: RunDirectory) -> None:
    for name, value in job.files().items():
        run.write(name, value)


def _check_length(job: Job, source: Path) -> None:
    if job.done > job.total:
        raise CheckpointError(
            f"steps={job.total}, but {source.name} has taken {job.done} already. Nothing was changed. Set steps >= "
            f"{job.done}, or resume from an older checkpoint with --from."
        )


def _go_back(run: RunDirectory, config: Config | SftConfig, continued: Continued, state: dict[str, Any]) -> None:
    """Make the directory what it was at the checkpoint, with the settings to go on with."""
    (run.path / SUMMARY).unlink(missing_ok=True)
    lost = not run.has_config()
    if lost:
        continued.notes.append(f"{CONFIG} was lost or damaged, and was restored from a checkpoint")
    if lost or continued.changes:
        run.write(CONFIG, config.model_dump(mode="json"))
    aside = checkpoint.set_aside_newer(continued.source)
    if aside:
        continued.notes.append(f"newer checkpoints were set aside: {', '.join(aside)}. Delete them when you like.")
    run.cut(state)


def _record(run: RunDirectory, job: Job, event: str, continued: Continued | None = None) -> None:
    """Write into the history what the run starts or goes on with, and compare it with the time before."""
    now = environment(__version__)
    before: dict[str, Any] = next(
        (line["environment"] for line in reversed(history.read(run.path)) if "environment" in line), {}
    )
    facts: dict[str, Any] = {"id": run.id, "step": job.done}
    if continued is not None:
        facts |= {"from": continued.source.name, "changed": continued.changes}
        if differs := differences(before, now):
            continued.notes.append(
                f"the run may not go on bit for bit, because the surroundings changed: {'; '.join(differs)}"
            )
    history.record(run.path, event, **facts, environment=now)


def _run(path: Path, team: Team) -> RunDirectory:
    return RunDirectory(path) if team.leads else Onlooker(path)


def _made(make: Callable[[Kind, Team], Job], config: Kind, team: Team) -> Job:
    try:
        return make(config, team)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _watched(job: Job, run: RunDirectory, team: Team, *, plain: bool | None, after: int = 0) -> Iterator[Log]:
    """Open the screen, and let the job report there from now on. `after`: the step that a resumed job continues."""
    title = f"{job.title()} · {job.config.model.path} · {run.given}"
    stops.advise(f"Continue with: {team.command} resume {run.given}")
    stops.enter(stops.Phase.RAISE)
    with _view(job, title, team, plain=plain) as view:
        view.begin_after(after)
        log = Log(run, view)
        job.watched(log)
        yield log


def _live(job: Job, log: Log, team: Team, notes: Sequence[str]) -> Summary:
    """Everything that is left to do, from the present state to the summary, under the eyes of the trackers."""
    run, config = log.run, job.config
    tracked = Tracked(
        path=run.path.absolute(),
        id=run.id or run.path.name,
        project=config.log.project,
        config=config.model_dump(mode="json"),
        step=job.done,
        version=job.learner.version,
    )
    if job.done == 0:
        _save(job, run, team)  # first, so that a run whose tracker cannot start can be resumed
    with tracking(config.log.to if team.leads else (), tracked, log.view.note) as trackers:
        return _finished(job, replace(log, trackers=trackers), team, notes)


def _finished(job: Job, log: Log, team: Team, notes: Sequence[str]) -> Summary:
    """Take the steps that are left, then measure, export and summarise."""
    run = log.run
    stopping: list[str] = []
    stopped = False
    for note in (*job.notes(), *notes):
        log.view.note(note)
    measure_first = None
    if job.done == 0:
        measure_first = job.put_off()
        if measure_first is None:
            job.measure(log, "before")
    else:
        log.view.recall(logged_steps(run.path))
    with _stop_on_signal(stopping, team, log.view):
        while job.done < job.total and not stopped:
            if measure_first is None:
                job.advance(log)
            else:
                _advance_first(job, log, measure_first, stopping)
                measure_first = None
            last = job.done == job.total
            if job.measure_every and job.done % job.measure_every == 0 and not last:
                job.measure(log, "during")
            stopped = team.any(bool(stopping))
            if job.done % job.config.checkpoint_every == 0 or last or stopped:
                _save(job, run, team)
    if stopped:
        stops.enter(stops.Phase.ENDING)
        raise Interrupted(f"stopped after {job.unit} {job.done}, which was saved. {stops.advice()}")
    job.measure(log, "after")
    job.export(run.path, UNFINISHED_CARD, team)
    summary = team.lead(lambda: _summarized(job, run))
    stops.done()
    return summary


def _shown(job: Job, run: RunDirectory, team: Team, summary: Summary) -> Summary:
    """The summary, after it was printed below the screen."""
    if team.leads:
        job.show(summary, run.given)
        say(f"run directory   {run.given}\ntrained model   {run.given / 'model'}")
        for title, command in zip(("next", *[""] * 9), job.next_steps(run.given), strict=False):
            say(f"{title:<16}{command}")
    return summary


def _advance_first(job: Job, log: Log, measure: Callable[[Log], None], stopping: list[str]) -> None:
    """Take the first step, and log it after the measurement of what was there before it."""
    held = Held(log.run, log.view, log.trackers)
    try:
        job.advance(held)
        stopping.append(AT_ONCE)
        measure(log)
        stopping.remove(AT_ONCE)
    finally:
        log.metrics(*held.lines)


def _view(job: Job, title: str, team: Team, *, plain: bool | None) -> View:
    """The screen; for ranks that do not lead, one that shows nothing."""
    if team.leads:
        return make_view(job.total, title=title, plain=plain, samples=job.shows_samples)
    return View(job.total, title=title, clock=time.monotonic)


def _save(job: Job, run: RunDirectory, team: Team) -> None:
    """Save everything needed to continue after this step.

    A checkpoint is about one instant, the end of a step: the state, and the length of the logs that tell how it came
    about. The step has written all of its lines, and nothing happens until both are known.
    """
    run.flush()
    state = job.state()
    check_alike(state, team, f"after {job.unit} {job.done}")
    state |= {"run": run.id, "vocabulary": job.policy.vocabulary()} | run.logged()
    config, keep = job.config.model_dump(mode="json"), job.config.checkpoint_keep
    place = run.path / "checkpoints"
    job.saved(checkpoint.save(place, job.done, job.learner, state, config=config, keep=keep, team=team))


def _summarized(job: Job, run: RunDirectory) -> Summary:
    """Compute the summary from the logs and complete the run with it. The model is there already."""
    run.flush()
    if (flaw := run.flaw(run.logged())) is not None:
        raise CheckpointError(
            f"{flaw}, so the run cannot be summarised. The trained model is in {run.path / 'model'}, without its card. "
            f"Put the file back as it was, then `bapo resume {run.path}` writes both."
        )
    metrics, timing = (
        [json.loads(line) for line in files.read(run.path / name).splitlines()]
        for name in ("metrics.jsonl", "timing.jsonl")
    )
    summary = job.summary(metrics) | {"training_seconds": sum(line["seconds"] for line in timing)}
    card = with_changes(job.card(summary), job.unit, history.changes_of(run.path))
    for name in ("model", "adapter"):
        if (run.path / name).is_dir():
            files.write(run.path / name / "README.md", card)
    run.seal()
    run.write(SUMMARY, summary)
    return summary


@contextmanager
def _stop_on_signal(stopping: list[str], team: Team, view: View) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the current step finish and saves it; the second one stops at once.

    A signal on one rank stops all of them after the same step. torchrun passes a Ctrl-C on, which the ranks have heard
    already, so what follows at once counts as the same signal.

    A signal stops measurements before and after training at once: they change nothing. Those after training are not
    covered by this.
    """
    heard = time.monotonic()

    def ask(number: int) -> None:
        nonlocal heard
        if stopping:
            if team.size > 1 and time.monotonic() - heard < PASSED_ON_SECONDS:
                return
            stops.at_once()
        heard = time.monotonic()
        stopping.append(signal.Signals(number).name)
        if team.leads:
            view.interrupt("stopping after this step; press Ctrl-C again to stop at once")

    with stops.listening(ask):
        yield
