"""The life of a run, whatever it trains: start, resume, save, stop, summarise. It reads from top to bottom:

    start     decides what the configuration leaves open, makes the job and its directory     \
    resume    finds a checkpoint that the run may go on from (continuing.py), makes the job   -> _live
    _live     opens screen and trackers, goes back to the checkpoint, and shows the results at the end
    _train    measures; step after step: logs, measures now and then, saves now and then; then measures again, exports
              the model and summarises

A job may put the first measurement off until the first step is taken, so that a person sees a step soon. It then
measures what it has set aside. In the logs the measurement comes first all the same, and until it is there nothing of
the first step is saved: a run that is killed in between begins again.

The `Job` (job.py) decides what a step is, what is measured and what a checkpoint must keep besides the learner. It is
either reinforcement learning (run.py) or supervised training (sft.py). A checkpoint is saved after every
`checkpoint_every` steps, after `checkpoint_minutes`, after the last step, and when the run is asked to stop. The model
is exported before anything is computed from the logs, so a damaged log cannot cost it. `summary.json` is written last,
so its presence means that the run is complete.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bapo.config.errors import BapoError, CheckpointError, ConfigError, Interrupted
from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.process import stops
from bapo.runs import files, history
from bapo.runs.read import logged_steps
from bapo.runs.write import CONFIG, SUMMARY, RunDirectory, unused
from bapo.screen.terminal import say
from bapo.screen.view import View, make_view
from bapo.tasks.judge import JUDGE
from bapo.tasks.verify.finding import file_of
from bapo.tasks.verify.scorers import MATH
from bapo.train import checkpoint
from bapo.train.card import UNFINISHED_CARD, with_changes
from bapo.train.continuing import Continued, examine
from bapo.train.job import HeldLog, Job, Log, Summary
from bapo.train.machine import differences, environment, resolve
from bapo.train.torchrun import Onlooker, Team, check_alike, joined, team_notes
from bapo.train.trackers import Tracked, tracking

Kind = TypeVar("Kind", Config, SftConfig)


def start(make: Callable[[Kind, Team], Job], config: Kind, *, plain: bool | None) -> Summary:
    """Train from the beginning. Returns the summary."""
    config = resolve(config)
    with joined(config.device) as team, ExitStack() as ending:
        job = ending.enter_context(closing(_made(make, config, team)))
        path = Path(team.lead(lambda: str(ending.enter_context(RunDirectory.begun(job.config)).given)))
        run = ending.enter_context(closing((RunDirectory if team.leads else Onlooker)(path)))
        return _live(job, run, team, plain=plain)


def resume(
    make: Callable[[Kind, Team], Job],
    schema: type[Kind],
    path: Path,
    *,
    plain: bool | None = None,
    config: Kind | None = None,
    source: str | None = None,
) -> Summary:
    """Continue a run, by default from its newest checkpoint. For a complete run, only return its summary.

    `config`: settings to go on with, where they are others than those in config.json. `source`: the name of the
    checkpoint to go on from.
    """
    run = RunDirectory(path)
    kept = run.config(schema)
    finished, flaw = run.complete()
    if finished is not None and source is None and config in (None, kept):
        say(f"{path} is complete; its model is in {path / 'model'}.")
        return finished
    wanted = resolve(kept if config is None else config)
    with joined(wanted.device) as team, ExitStack() as ending:
        run = ending.enter_context(closing((RunDirectory if team.leads else Onlooker)(path)))
        team.lead(lambda: ending.enter_context(run.held()))
        team.lead(lambda: files.sweep(path))
        team.lead(lambda: _say_what_it_brings(wanted))
        if team.lead(lambda: unused(path)):
            team.lead(run.clear)
            job = ending.enter_context(closing(_made(make, wanted, team)))
            team.lead(lambda: run.write(CONFIG, job.config.model_dump(mode="json")))
            return _live(job, run, team, plain=plain, notes=["there is no checkpoint yet, so the run begins anew"])
        continued = Continued(**team.lead(lambda: vars(examine(run, wanted, source))))
        if flaw is not None:
            continued.notes.append(f"{flaw}, so what follows the last step is done again")
        job = ending.enter_context(closing(_made(make, wanted, team)))
        _check_fits(job, continued.source, path)
        return _live(job, run, team, plain=plain, continued=continued)


def _live(
    job: Job,
    run: RunDirectory,
    team: Team,
    *,
    plain: bool | None,
    continued: Continued | None = None,  # what it goes on from; None for a run that begins
    notes: Sequence[str] = (),
) -> Summary:
    """Everything that is left to do in a run, under the eyes of a person and of the trackers. Returns the summary."""
    if continued is None:
        run.id = team.lead(lambda: uuid.uuid4().hex)
        team.lead(lambda: _write_files(job, run))
        team.lead(lambda: _record(run, job, "start"))
        notes = [*notes, *team_notes(team, team.size)]
    title = f"{job.title} · {job.config.model.path} · {run.given}"
    stops.advise(f"Continue with: {team.command} resume {run.given}")
    stops.enter(stops.Phase.RAISE)
    shows_nothing = View(job.total, title=title, clock=time.monotonic)
    opened = make_view(job.total, title=title, plain=plain, samples=job.shows_samples) if team.leads else shows_nothing
    with opened as view:
        view.begin_after(0 if continued is None else checkpoint.step_of(continued.source))
        log = Log(run, view)
        job.watched(log)
        if continued is not None:
            notes = _go_back(job, run, team, continued)
        if job.done == 0:
            _save(job, run, team)  # first, so that a run whose tracker cannot start can be resumed
        tracked = Tracked(
            path=run.path.absolute(),
            id=run.id or run.path.name,
            project=job.config.log.project,
            config=job.config.model_dump(mode="json"),
            step=job.done,
            version=job.learner.version,
        )
        with tracking(job.config.log.to if team.leads else (), tracked, view.note) as trackers:
            summary = _train(job, replace(log, trackers=trackers), team, notes)
    if team.leads:
        _show(job, run, summary)
    return summary


def _train(job: Job, log: Log, team: Team, notes: Sequence[str]) -> Summary:
    """Measure, take the steps that are left, measure again, export the model, and summarise."""
    run, view, every = log.run, log.view, job.config.eval.every
    for note in (*job.notes, *notes):
        view.note(note)
    measure_later = None
    if job.done:
        view.recall(logged_steps(run.path))
    elif (measure_later := job.measure_later()) is None:
        job.measure(log, "before")
    saved, where = time.monotonic(), ""
    with _stops_between_steps(job, team, view) as signals:
        while job.done < job.total and not where:
            try:
                if not job.unmeasured:
                    _advance(job, log, measure_later)
                    measure_later, last = None, job.done == job.total
                    job.unmeasured = bool(every) and job.done % every == 0 and not last
                if job.unmeasured:
                    job.measure(log, "during")
                    job.unmeasured = False
                where = f"after {job.unit} {job.done}, which was saved" if team.any(bool(signals)) else ""
            except stops.StopAsked:
                where = _in_words(job)
            if _checkpoint_due(job, team, saved) or where:
                _save(job, run, team)
                saved = time.monotonic()
    if where:
        stops.enter(stops.Phase.ENDING)
        raise Interrupted(f"stopped {where}. {stops.advice()}")
    job.measure(log, "after")
    job.export(run.path, UNFINISHED_CARD, team)
    summary = team.lead(lambda: _summarized(job, run))
    stops.done()
    return summary


def _in_words(job: Job) -> str:
    """Where a run stopped whose rewards would have taken long."""
    if job.unmeasured:
        return f"while {job.unit} {job.done} was evaluated; the {job.unit} is saved"
    before = f"{job.unit} {job.done} is saved" if job.done else "the run begins anew"
    return f"while the rewards of {job.unit} {job.done + 1} were computed; {before}"


def _checkpoint_due(job: Job, team: Team, saved: float) -> bool:
    """Whether it is time for the next checkpoint. The first rank's clock decides. `saved`: when the last one was."""
    config = job.config
    if job.done % config.checkpoint_every == 0 or job.done == job.total:
        return True
    minutes = config.checkpoint_minutes
    return bool(minutes) and team.lead(lambda: time.monotonic() - saved >= 60 * minutes)


def _advance(job: Job, log: Log, measure: Callable[[Log], None] | None) -> None:
    """Take a step. The first one may be logged after the measurement of what was there before it."""
    if measure is None:
        job.advance(log)
        return
    held = HeldLog(log.run, log.view, log.trackers)
    try:
        job.advance(held)
        stops.enter(stops.Phase.RAISE)  # there is nothing to finish
        measure(log)
        stops.enter(stops.Phase.LISTEN)
    finally:
        log.metrics(*held.lines)


@contextmanager
def _stops_between_steps(job: Job, team: Team, view: View) -> Iterator[list[float]]:
    """The first Ctrl-C or SIGTERM lets the current step finish and saves it; the second one stops at once.

    If rewards are computed that would take long, the first one acts between two of them (`tasks/task.py:Following`). A
    step is then undone, and a resumed run takes it again. An evaluation is made again.

    Yields a list that is empty until the first signal comes. A signal on one rank stops all of them after the same
    step. torchrun passes a Ctrl-C on, which the ranks have heard already, so what follows at once counts as the same
    signal.

    A signal stops measurements before and after training at once: they change nothing. Those after training are not
    covered by this.
    """
    signals: list[float] = []

    def ask(_: int) -> None:
        if signals:
            if team.size > 1 and time.monotonic() - signals[0] < stops.PASSED_ON_SECONDS:
                return
            stops.at_once()
        signals.append(time.monotonic())
        if team.leads:
            sooner = ", or between two rewards that take long" if job.shows_samples else ""
            what = f"stopping after this {job.unit}{sooner}; press Ctrl-C again to stop at once"
            view.interrupt(f"{what}. {stops.advice()}".rstrip())

    with stops.listening(ask):
        yield signals


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
    job.learner.saved(checkpoint.save(place, job.done, job.learner, state, config=config, keep=keep, team=team))


def _summarized(job: Job, run: RunDirectory) -> Summary:
    """Compute the summary from the logs and complete the run with it. The model is there already."""
    run.flush()
    if (flaw := run.flaw(run.logged())) is not None:
        raise CheckpointError(
            f"{flaw}, so the run cannot be summarised. The trained model is in {run.path / 'model'}, without its card. "
            f"Put the file back as it was, then `bapo resume {run.path}` writes both."
        )
    names = ("metrics.jsonl", "timing.jsonl")
    try:
        metrics, timing = (list(map(files.object_in, files.read(run.path / name).splitlines())) for name in names)
        summary = job.summary(metrics, run.path) | {"training_seconds": sum(line["seconds"] for line in timing)}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the logs of {run.path} are not those of a run: {type(error).__name__}: {error}. The trained model is in "
            f"{run.path / 'model'}, without its card."
        ) from error
    card = with_changes(job.card(summary), job.unit, history.changes_of(run.path))
    for name in ("model", "adapter"):
        if (run.path / name).is_dir():
            files.write(run.path / name / "README.md", card)
    run.seal()
    run.write(SUMMARY, summary)
    return summary


def _show(job: Job, run: RunDirectory, summary: Summary) -> None:
    """Print the summary below the screen, and what a person can do next."""
    job.show(summary, run.given)
    if skipped := summary["skipped"]:
        say(
            f"{counted(skipped, 'update was', 'updates were')} skipped, because the loss or the gradient was not finite"
        )
    say(f"run directory   {run.given}\ntrained model   {run.given / 'model'}")
    for number, command in enumerate(job.next_steps(run.given)):
        say(f"{'' if number else 'next':<16}{command}")


# From a checkpoint.


def _go_back(job: Job, run: RunDirectory, team: Team, continued: Continued) -> list[str]:
    """Take the job and its directory back to a checkpoint. Returns what a person should know about that."""
    state = checkpoint.load(continued.source, job.learner, team=team)
    _restore(job, state, run.path, continued.source)
    team.lead(lambda: _cut_back(run, job.config, continued, state))
    team.lead(lambda: _write_files(job, run))  # nothing else would notice that they were damaged
    team.lead(lambda: _record(run, job, "resume", continued))
    where = f"after {job.unit} {job.done}" if job.done else f"before the first {job.unit}"
    return [*continued.notes, *team_notes(team, state["ranks"]), f"resumed {where}"]


def _restore(job: Job, state: dict[str, Any], path: Path, source: Path) -> None:
    """Let the job continue from this state, and say so in words if it is none."""
    try:
        job.restore(state, path)
        if job.done != checkpoint.step_of(source):
            raise ValueError(f"it says that {job.done} {job.unit}s are taken")
    except BapoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{source / checkpoint.STATE} is not the state of such a run in this version of bapo: "
            f"{type(error).__name__}: {error}. Put back the file that the run wrote, or resume with the version that "
            f"wrote it. {checkpoint.advice(source)}"
        ) from None


def _check_fits(job: Job, source: Path, path: Path) -> None:
    """Refuse a model that reads and writes text in other tokens, and fewer steps than are taken already."""
    if checkpoint.read_state(source)["vocabulary"] != job.policy.vocabulary():
        raise CheckpointError(
            f"model.path={job.config.model.path!r} has another tokenizer, chat template or stop token than {path} was "
            "trained with, so its tokens would mean something else. Nothing was changed. Put the tokenizer's files "
            "back, or start a new run."
        )
    if (done := checkpoint.step_of(source)) > job.total:
        raise CheckpointError(
            f"steps={job.total}, but {source.name} has taken {done} already. Nothing was changed. Set steps >= "
            f"{done}, or resume from an older checkpoint with --from."
        )


def _cut_back(run: RunDirectory, config: Config | SftConfig, continued: Continued, state: dict[str, Any]) -> None:
    """Make the directory what it was at the checkpoint, with the settings to go on with."""
    (run.path / SUMMARY).unlink(missing_ok=True)
    if lost := not run.has_config():
        continued.notes.append(f"{CONFIG} was lost or damaged, and was restored from a checkpoint")
    if lost or continued.changes:
        run.write(CONFIG, config.model_dump(mode="json"))
    if aside := checkpoint.set_aside_newer(continued.source):
        continued.notes.append(f"newer checkpoints were set aside: {', '.join(aside)}. Delete them when you like.")
    run.cut(state)


def _say_what_it_brings(config: Config | SftConfig) -> None:
    """Say which code a run brings with it, before that code is run: the run may be somebody else's."""
    task = config.task if isinstance(config, Config) and config.task.name == "data" else None
    for reward in () if task is None else task.rewards:
        if task and reward == JUDGE:
            sent = f" and the key in {task.judge.key_variable}" * bool(task.judge.key_variable)
            say(f"the run sends prompts and responses{sent} to {task.judge.url}")
        elif reward != MATH:
            say(f"the run's reward function {reward} is imported from {file_of(reward) or 'an unknown place'}")
    if isinstance(config, Config) and config.cluster.on and config.cluster.address is not None:
        say(f"the run joins the Ray cluster at {config.cluster.address}, which can run code here")


def _made(make: Callable[[Kind, Team], Job], config: Kind, team: Team) -> Job:
    try:
        return make(config, team)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _write_files(job: Job, run: RunDirectory) -> None:
    for name, value in job.files().items():
        run.write(name, value)


def _record(run: RunDirectory, job: Job, event: str, continued: Continued | None = None) -> None:
    """Write into the history what the run starts or goes on with, and compare it with the time before."""
    now = environment()
    known = [line["environment"] for line in history.read(run.path) if "environment" in line]
    facts: dict[str, Any] = {"id": run.id, "step": job.done}
    if continued is not None:
        facts |= {"from": continued.source.name, "changed": continued.changes}
        if differs := differences(known[-1] if known else {}, now):
            continued.notes.append(
                f"the run may not go on bit for bit, because the surroundings changed: {'; '.join(differs)}"
            )
    history.record(run.path, event, **facts, environment=now)
