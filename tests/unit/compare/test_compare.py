"""Grids: what is run, what is left alone, and what comes out. Runs are real, and tiny."""

import io
import json
import os
import re
import shutil
import signal
import time

import pytest

from bapo.compare import collect, compare, load_grid, table_lines
from bapo.compare.grid import State
from bapo.compare.jobs import default_parallel, make_plan, threads_for
from bapo.compare.progress import GridView
from bapo.config.errors import ConfigError
from bapo.config.placement import available_cores
from bapo.config.words import merged
from bapo.runs.files import held
from tests.processes import PATIENCE, started

BASE = """
name = "tiny"
out = {out}
seeds = {seeds}
[base]
steps = {steps}
device = "cpu"
threads = {threads}
rollout.prompts = 2
rollout.responses = 4
learn.batch_groups = 2
eval.problems = 2
eval.k = 2
eval.every = 0
[[setting]]
label = "reuse-2"
offpolicy.reuse = 2
[[objective]]
label = "grpo"
objective.name = "grpo"
"""
FAILS = """
[[objective]]
label = "wrong"
objective.name = "grpo"
objective.options.hihg = 1.3
threads = 0
"""  # an option that only the objective itself can refuse, when the run starts


def write_grid(path, out, *, steps=1, seeds="[3]", threads=1, more=""):
    path.write_text(BASE.format(out=json.dumps(str(out)), steps=steps, seeds=seeds, threads=threads) + more)
    return path


def ran(out):
    """Names of the runs that a process was started for."""
    log = out / "runs.jsonl"
    return [json.loads(line)["run"] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A comparison of two runs, one of which fails: (directory, exit code, output)."""
    directory = tmp_path_factory.mktemp("compare")
    grid = write_grid(directory / "grid.toml", directory / "out", more=FAILS)
    stream = io.StringIO()
    code = compare(grid, stream=stream)
    return directory, code, stream.getvalue()


@pytest.fixture
def again(first, tmp_path):
    """A copy of that comparison's directory, and a grid file of its finished run alone."""
    shutil.copytree(first[0] / "out", tmp_path / "out")
    return tmp_path / "out", write_grid(tmp_path / "grid.toml", tmp_path / "out")


def refused(tmp_path, text):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    return str(error.value)


def test_cells_are_base_then_setting_then_objective_then_seed(tmp_path):
    (tmp_path / "recipe.toml").write_text(
        "steps = 9\nseed = 5\nout = 'elsewhere'\n[learn]\nlr = 1e-4\nclip_norm = 2.0\n"
    )
    (tmp_path / "grid.toml").write_text("""
        out = "o"
        seeds = 2
        [base]
        recipe = "recipe.toml"
        learn.lr = 2e-4
        [[setting]]
        label = "a"
        [[setting]]
        label = "b"
        offpolicy.reuse = 8
        learn.lr = 3e-4
        [[objective]]
        label = "grpo"
        objective.name = "grpo"
        objective.options = {high = 1.3}
        [[objective]]
        label = "gradient"
        objective.name = "bapo"
        learn.lr = 4e-4
    """)
    grid = load_grid(tmp_path / "grid.toml")
    assert grid.name == "grid"
    names = [cell.name for cell in grid.cells]
    assert names == [f"{s}/{o}/seed-{n}" for n in (0, 1) for s in "ab" for o in ("grpo", "gradient")]
    cells = dict(zip(names, grid.cells, strict=True))
    one, two = cells["a/grpo/seed-0"].config, cells["b/gradient/seed-1"].config
    assert (one.steps, one.learn.lr, one.learn.clip_norm, one.offpolicy.reuse) == (9, 2e-4, 2.0, 4)
    assert (one.objective.name, one.objective.options, one.seed, one.out) == (
        "grpo",
        {"high": 1.3},
        0,
        "o/a/grpo/seed-0",
    )
    assert (two.learn.lr, two.offpolicy.reuse, two.objective.preset, two.seed) == (4e-4, 8, None, 1)
    assert cells["b/grpo/seed-0"].config.learn.lr == 3e-4


def test_merging_keeps_what_is_not_overridden():
    under = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert merged(under, {"b": {"d": {"f": 4}}, "a": {"g": 5}}) == {"a": {"g": 5}, "b": {"c": 2, "d": {"e": 3, "f": 4}}}
    assert under == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}


def test_everything_wrong_with_any_cell_is_listed_at_once(tmp_path):
    message = refused(
        tmp_path,
        """
        [base]
        stepps = 3
        [[objective]]
        label = "one"
        [[objective]]
        label = "two"
        learn.lr = -1
        [[setting]]
        label = "mild"
        [[setting]]
        label = "heavy"
        offpolicy.reuse = 40
        """,
    )
    assert "nothing was started" in message
    assert "every run: stepps is not a known key. Did you mean steps?" in message
    assert "mild/two, heavy/two: learn.lr = -1" in message
    assert refused(
        tmp_path,
        "[[objective]]\nlabel = 'one'\n[[setting]]\nlabel = 'mild'\n[[setting]]\nlabel='heavy'\noffpolicy.reuse = 40",
    ).count("heavy/one: offpolicy.reuse=40 makes 40 updates")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["[[objective]]: give at least one"]),
        ("seeds = 0\nsteps = 3\nout = 3", ["steps is not a key of a grid", "seeds = 0", "out = 3: give a string"]),
        ("seeds = [1, 1]", ["seeds = [1, 1]"]),
        ("seeds = true", ["seeds = True"]),
        ("seeds = 58453746", ["seeds = 58453746: give a count", "10,000 at most"]),
        ("seeds = [1.5]", ["seeds = [1.5]"]),
        ("seeds = [-1]", ["seeds = [-1]", "whole numbers from 0"]),
        ("steps = 3\n[objective]\nname = 'grpo'", ["a recipe for reinforcement learning", "Run it with `bapo train"]),
        ("steps = 3\n[[objective]]\nlabel = 'a'", ["steps is not a key of a grid"]),
        ("kind = 'sft'\nepochs = 3", ["a recipe for supervised training", "Run it with `bapo sft"]),
        ("base = 3", ["base = 3: give a table"]),
        (
            "[base]\nseed = 3\nrecipe = 'no.toml'",
            ["[base]: seed differs from run to run", "Set seeds at the top", "no.toml"],
        ),
        ("[[objective]]\nlabel = '../up'", ["label = '../up' cannot name a directory"]),
        (f"[[objective]]\nlabel = '{'a' * 81}'", ["cannot name a directory", "at most 80"]),
        (f"out = '{'a' * 300}'\n[[objective]]\nlabel = 'a'", ["is too long for a path"]),
        ('out = "a\\u0000b"\n[[objective]]\nlabel = "a"', ["holds a NUL"]),
        (
            "[[objective]]\nlabel = 'a'\nout = 'b'\n[[objective]]\nlabel = 'a'",
            ["out differs from run to run", "[[objective]] 2: label = 'a' cannot name a directory beside the others"],
        ),
        (
            "[[objective]]\nlabel = 'a'\n[[objective]]\nlabel = 'a'\nlearn.lr = -1\n[[objective]]\nstepps = 3",
            [
                "[[objective]] 2: label = 'a' cannot",
                "default/[[objective]] 2: learn.lr = -1",
                "default/[[objective]] 3: stepps is not",
            ],
        ),
        (
            "[[objective]]\nlabel = 'a'\n[[setting]]\noffpolicy.reuse = 2",
            ["[[setting]] 1: label = None cannot name"],
        ),
        ("objective = 3", ["[[objective]]: give at least one"]),
        ("[[objective]]\nlabel = 'a'\n[setting]\nlabel = 'b'", ["write [[setting]], with two brackets"]),
        ("seeds = 2\n[objective]\nlabel = 'a'", ["write [[objective]], with two brackets"]),
        (
            "[[objective]]\nlabel = 'a'\n[[objective]]\nlabel = 'b'\n[[objective]]\nlabel = 'c'\nsteps = 3",
            ["default/a and default/b have the same keys", "Make them differ"],
        ),
        ("a = = 3", ["not valid TOML", "bapo train --list"]),
        ("[objective]\nlabel = 'a'\n[objective]\nlabel = 'b'", ["not valid TOML", "with two brackets"]),
        ("[objective]\nname = 'grpo'", ["a recipe for reinforcement learning", "Run it with `bapo train"]),
    ],
)
def test_bad_grids_say_what_to_do(tmp_path, text, parts):
    message = refused(tmp_path, text)
    for part in parts:
        assert part in message


def test_the_first_grid_can_decide_something():
    """One setting, so that every minute goes into its seeds, of which three are the least that decide."""
    grid = load_grid("quick")
    assert (len(grid.objectives), len(grid.settings), len(grid.seeds)) == (2, 1, 3)


def test_steps_can_be_given_for_every_run(tmp_path):
    path = write_grid(tmp_path / "grid.toml", tmp_path / "out", more=f"steps = 5\n{FAILS}")  # its objective says 5
    assert [cell.config.steps for cell in load_grid(path).cells] == [5, 1]
    assert [cell.config.steps for cell in load_grid(path, steps=3).cells] == [3, 3]
    stream = io.StringIO()
    assert compare(path, steps=3, dry_run=True, stream=stream) == 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError) as error:
        load_grid(path, steps=0)
    assert "every run: steps = 0: give 1 or more" in str(error.value)


def test_cores_are_shared_out(tmp_path):
    grid = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="64", threads=0))
    assert default_parallel(grid.cells) == min(64, available_cores())
    assert threads_for(grid.cells, available_cores()) == 1
    assert threads_for(grid.cells, 1) == available_cores()
    one = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out"))
    assert (default_parallel(one.cells), threads_for(one.cells, 8)) == (1, available_cores())


def test_one_failed_run_does_not_stop_the_rest(first):
    directory, code, output = first
    assert code == 1
    assert "reuse-2/grpo/seed-3: finished" in output
    assert "reuse-2/wrong/seed-3: failed: exit code 2" in output
    assert "objective.options.hihg is not an option of 'grpo', which takes: low, high" in output
    results = json.loads((directory / "out" / "results.json").read_text())
    assert results["settings"]["reuse-2"]["grpo"]["seeds"] == 1
    nothing = {"seeds": 0, "measures": {}, "differences": {"seeds": [], "measures": {}}}
    assert results["settings"]["reuse-2"]["wrong"] == nothing
    assert [(missing["objective"], missing["kind"]) for missing in results["missing"]] == [("wrong", "missing")]
    row = results["settings"]["reuse-2"]["grpo"]["measures"]
    assert row["avg"] == {"mean": results["runs"][0]["measures"]["avg"], "half_width": None}
    assert [run["path"] for run in json.loads((directory / "out" / "grid.json").read_text())["runs"]] == [
        *("reuse-2/grpo/seed-3", "reuse-2/wrong/seed-3"),
    ]
    config = json.loads((directory / "out/reuse-2/grpo/seed-3/config.json").read_text())
    assert (config["seed"], config["threads"]) == (3, 1)
    shared = json.loads((directory / "out/reuse-2/wrong/seed-3.json").read_text())  # the grid leaves its threads open
    assert shared["threads"] == max(1, available_cores() // 2)


def test_a_finished_run_is_not_repeated(again):
    out, grid = again
    before = ran(out)
    stream = io.StringIO()
    assert compare(grid, stream=stream) == 0
    assert ran(out) == before
    assert "1 of 1 finished" in stream.getvalue()
    assert "avg@2" in stream.getvalue()


def test_a_changed_grid_is_refused_and_says_what_differs(again, tmp_path):
    out, grid = again
    before = (out / "results.json").read_bytes()
    grid.write_text(grid.read_text() + "objective.options.high = 1.3\nlearn.lr = 1e-4\nthreads = 0\n")
    with pytest.raises(ConfigError) as error:
        compare(grid)
    assert "reuse-2/grpo/seed-3: objective.options.high is None in the run and 1.3 in the grid" in str(error.value)
    assert "reuse-2/grpo/seed-3: learn.lr is 3e-05 in the run and 0.0001 in the grid" in str(error.value)
    assert "threads" not in str(error.value)
    assert (out / "results.json").read_bytes() == before


def test_a_damaged_run_is_left_alone_until_somebody_removes_it(again):
    out, grid = again
    run = out / "reuse-2/grpo/seed-3"
    os.truncate(run / "metrics.jsonl", 100)
    before = ran(out)
    stream = io.StringIO()
    assert compare(grid, stream=stream) == 1
    assert "reuse-2/grpo/seed-3: damaged: metrics.jsonl ends in the middle of line 1." in stream.getvalue()
    assert "or remove their directories to start again" in stream.getvalue()
    assert ran(out) == before
    assert (run / "metrics.jsonl").stat().st_size == 100

    shutil.rmtree(run)
    assert compare(grid, stream=io.StringIO()) == 0
    assert ran(out) == [*before, "reuse-2/grpo/seed-3"]


def test_what_a_plan_makes_of_half_written_directories(again):
    out, grid = again
    run = out / "reuse-2/grpo/seed-3"

    def planned():
        (job,) = make_plan(load_grid(grid))
        return job.state, job.action

    assert planned()[0] is State.FINISHED
    (run / "summary.json").unlink()
    assert planned() == (State.WAITING, "resume")
    metrics = run / "metrics.jsonl"
    sound = metrics.read_bytes()
    metrics.write_bytes(sound + b"\0\0\0\n")  # logged after the checkpoint: forgotten on resuming
    timing = run / "timing.jsonl"
    timing.write_bytes(timing.read_bytes() + b"x\n")
    assert planned() == (State.WAITING, "resume")
    metrics.write_bytes(b"\0" + sound[1:])  # before it: who resumes will see
    assert planned() == (State.WAITING, "resume")
    metrics.write_bytes(sound)
    shutil.rmtree(run / "checkpoints")
    assert planned()[0] is State.DAMAGED  # logs, but nothing to resume from
    for path in run.iterdir():
        if path.name not in ("config.json", "lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "checkpoints" / "step-000000.partial").mkdir(parents=True)
    assert planned() == (State.WAITING, "train")  # killed before its first checkpoint: nothing is lost
    (run / "notes.txt").write_text("mine")
    assert planned()[0] is State.DAMAGED  # somebody's file: not ours to remove


def test_only_one_comparison_at_a_time(again):
    out, grid = again
    with held(out / "lock", busy="test"), pytest.raises(ConfigError, match="still at work"):
        compare(grid, stream=io.StringIO())


def test_ctrl_c_saves_the_runs_and_the_same_command_continues(tmp_path):
    out = tmp_path / "out"
    grid = write_grid(tmp_path / "grid.toml", out, steps=8, seeds="[0, 1]")
    said = tmp_path / "said"
    process = started("compare", grid, "--parallel", 1, log=said)
    run, waiting = (out / f"reuse-2/grpo/seed-{seed}" for seed in (0, 1))
    deadline = time.monotonic() + PATIENCE
    log = run / "timing.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 1) and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    output = said.read_text()
    assert process.exitcode == 130, output
    assert "reuse-2/grpo/seed-0: stopped at step" in output
    assert "reuse-2/grpo/seed-1: will start" in output
    assert not (run / "summary.json").exists()
    assert not waiting.exists()

    state = {job.cell.seed: (job.action, job.step) for job in make_plan(load_grid(grid))}
    assert state[0][0] == "resume"
    assert 1 <= state[0][1] < 8
    shortened = grid.read_text().replace("seeds = [0, 1]", "seeds = [0]")
    grid.write_text(shortened)
    assert compare(grid, stream=io.StringIO()) == 0
    assert "resumed after step" in run.with_name("seed-0.log").read_text()
    assert len((run / "timing.jsonl").read_text().splitlines()) == 8


def test_a_dry_run_prints_and_writes_nothing(tmp_path, capsys):
    grid = write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="2")
    assert compare(grid, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert printed.count("will start") == 2
    assert printed.startswith(f"2 runs in {tmp_path / 'out'}, ")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with held(tmp_path / "out" / "lock", busy=""):
        assert compare(grid, dry_run=True) == 0
    assert "is still at work" in capsys.readouterr().out
    assert compare(grid, dry_run=True) == 0
    assert "is still at work" not in capsys.readouterr().out


def test_a_part_of_a_grid_is_run_and_the_rest_is_neither_started_nor_missed(tmp_path, capsys):
    grid = write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4]")
    assert compare(grid, dry_run=True, only=["*/seed-4"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed
    assert all(name.endswith("seed-4") for name in listed)
    with pytest.raises(ConfigError, match="matches no run of the grid"):
        compare(grid, dry_run=True, only=["*/seed-4", "*/seed-5"])


def test_exit_codes_of_the_command_line(tmp_path, capsys):
    from bapo.cli import run

    assert run(["compare", str(tmp_path / "no.toml")]) == 2
    grid = write_grid(tmp_path / "grid.toml", tmp_path / "out")
    assert run(["compare", str(grid), "--dry-run"]) == 0
    assert run(["compare", str(grid), "--parallel", "0"]) == 2
    assert "at least one run at a time" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "/below"])
def test_an_out_that_is_a_file_is_said_without_talk_of_checkpoints(tmp_path, capsys, place):
    from bapo.cli import run

    (tmp_path / "file").write_text("mine")
    grid = write_grid(tmp_path / "grid.toml", f"{tmp_path}/file{place}")
    assert run(["compare", str(grid)]) == (4 if place else 2)
    told = capsys.readouterr().err
    assert ("give the same command again" if place else "exists and is not a directory") in told
    assert "checkpoint" not in told
    assert "resume" not in told
    assert (tmp_path / "file").read_text() == "mine"


def test_the_eta_is_the_updates_left_at_the_rate_so_far(tmp_path):
    grid = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out", steps=10, seeds="4"))
    jobs = make_plan(grid)
    now = [100.0]
    stream = io.StringIO()
    progress = GridView(grid, jobs, 2, stream, clock=lambda: now[0])
    assert progress.remaining() == ""
    jobs[0].state, jobs[0].step, jobs[0].before = State.FINISHED, 10, 10  # of an earlier session: no evidence of speed
    jobs[1].state, jobs[1].step, jobs[1].before = State.RUNNING, 8, 3
    jobs[2].state, jobs[2].note = State.FAILED, "no"
    now[0] += 50.0
    assert progress.remaining() == "eta 2:00"  # 5 steps in 50 s; 2 and 10 to go
    assert progress.share_done() == pytest.approx(18 / 40)
    progress.look()
    assert "1 of 4 finished, 1 waiting, 1 running, 1 failed  reuse-2/grpo/seed-1 8/10  eta 2:00" in stream.getvalue()


def test_the_live_table_shows_every_run_or_those_that_matter(tmp_path, monkeypatch):
    grid = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out", steps=10, seeds="40"))
    jobs = make_plan(grid)
    jobs[7].state, jobs[7].step = State.RUNNING, 8
    jobs[9].state, jobs[9].note = State.FAILED, "no"
    stream = io.StringIO()
    monkeypatch.setattr("bapo.compare.progress.can_redraw", lambda stream: True)
    with GridView(grid, jobs, 2, stream) as progress:
        progress.look()
        progress.changed(jobs[9])
    shown = stream.getvalue()
    for part in ("seed-7", "8/10", "seed-9", "38 waiting", "failed: no"):
        assert part in shown
    assert "seed-30" not in shown


def scored(run, path, avg):
    """A copy of a finished run, with another score."""
    shutil.copytree(run, path)
    log = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    log[-1]["eval/avg"] = avg
    summary = json.loads((path / "summary.json").read_text())
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (path / "summary.json").write_text(json.dumps(summary | {"after": log[-1]}))


def test_tables_have_mean_and_interval_over_seeds(first, tmp_path):
    grid = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4, 5]"))
    for cell, avg in zip(grid.cells, (0.1, 0.2, 0.3), strict=True):
        scored(first[0] / "out/reuse-2/grpo/seed-3", cell.path, avg)
    results = collect(grid)
    row = results["settings"]["reuse-2"]["grpo"]
    assert row["seeds"] == 3
    assert row["measures"]["avg"]["mean"] == pytest.approx(0.2)
    assert row["measures"]["avg"]["half_width"] == pytest.approx(0.24841, abs=1e-5)  # 4.3027 · 0.1 / √3
    assert any("0.200 ± 0.248" in line and line.startswith("  grpo") for line in table_lines(results))


def test_tables_have_the_responses_that_were_sampled(first, tmp_path):
    grid = load_grid(write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4]"))
    sampled = []
    for cell, dropped in zip(grid.cells, (0, 7), strict=True):
        scored(first[0] / "out/reuse-2/grpo/seed-3", cell.path, 0.1)
        log = [json.loads(line) for line in (cell.path / "metrics.jsonl").read_text().splitlines()]
        rollouts = [line for line in log if line["kind"] == "rollout"]
        rollouts[0]["rollout/dropped"] = dropped
        (cell.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        begun = sum(line["rollout/admitted"] for line in rollouts)  # without partial rollout, these are finished, too
        sampled.append(begun * cell.config.rollout.responses + dropped)
    results = collect(grid)
    assert [run["measures"]["responses"] for run in results["runs"]] == sampled
    heading, row = (re.split(r"\s{2,}", line.strip()) for line in table_lines(results)[2:4])
    assert (heading[-1], row[-1]) == ("responses", f"{sum(sampled) / 2:.0f}")


def test_differences_are_taken_within_a_seed(first, tmp_path):
    """grpo .1 .2 .3 and bapo .2 .35 .4: means that overlap, differences .1 .15 .1 that do not include 0."""
    text = write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4, 5]").read_text()
    (tmp_path / "grid.toml").write_text(text + '[[objective]]\nlabel = "bapo"\nobjective.name = "bapo"\n')
    grid = load_grid(tmp_path / "grid.toml")
    scores = {"grpo": {3: 0.1, 4: 0.2, 5: 0.3}, "bapo": {3: 0.2, 4: 0.35, 5: 0.4}}
    for cell in grid.cells:
        scored(first[0] / "out/reuse-2/grpo/seed-3", cell.path, scores[cell.objective][cell.seed])
    rows = collect(grid)["settings"]["reuse-2"]
    assert "differences" not in rows["grpo"]
    difference = rows["bapo"]["differences"]
    assert difference["seeds"] == [3, 4, 5]
    assert difference["measures"]["avg"]["mean"] == pytest.approx(0.35 / 3)
    assert difference["measures"]["avg"]["half_width"] == pytest.approx(0.07171, abs=1e-5)  # 4.3027 · 0.028868 / √3
    lines = table_lines(collect(grid))
    assert any(line.startswith("  bapo - grpo") and "3  +0.117 ± 0.072*" in line for line in lines)
    shutil.rmtree(next(cell.path for cell in grid.cells if (cell.objective, cell.seed) == ("grpo", 4)))
    assert collect(grid)["settings"]["reuse-2"]["bapo"]["differences"]["seeds"] == [3, 5]
    lines = table_lines(collect(grid))
    assert any(line.startswith("  bapo - grpo") and "2  +0.100  " in line for line in lines)  # no interval of two
    assert "  difference from grpo, seed by seed" in lines
    assert any(
        line.endswith("reuse-2: mean over seeds ± half width of its 95% interval, from 3 seeds on") for line in lines
    )
    shutil.rmtree(next(cell.path for cell in grid.cells if (cell.objective, cell.seed) == ("grpo", 5)))
    assert not any("difference" in line for line in table_lines(collect(grid)))  # one seed has no interval


def test_the_verdict_follows_the_tables_and_is_kept(first, tmp_path):
    """grpo .1 .2 .3 and bapo .2 .35 .4, as above: + .117 ± .072. Every run started at .5."""
    text = write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4, 5]").read_text()
    (tmp_path / "grid.toml").write_text(text + '[[objective]]\nlabel = "bapo"\nobjective.name = "bapo"\n')
    grid = load_grid(tmp_path / "grid.toml")
    scores = {"grpo": {3: 0.1, 4: 0.2, 5: 0.3}, "bapo": {3: 0.2, 4: 0.35, 5: 0.4}}
    for cell in grid.cells:
        scored(first[0] / "out/reuse-2/grpo/seed-3", cell.path, scores[cell.objective][cell.seed])
    results = collect(grid)
    fell = "Both arms ended below where they started: grpo from 0.500 to 0.200 and bapo from 0.500 to 0.317 avg@2."
    *said, exam = results["verdict"]
    assert said == ["bapo beats grpo (+0.117 ± 0.072 avg@2 over 3 seeds).", fell]
    assert exam.startswith("The scores are from only 2 held-out problems. Fewer than 100 are few")
    printed = table_lines(results)
    assert " ".join(printed[printed.index(said[0]) :]).strip() == " ".join(results["verdict"])
    shutil.rmtree(next(cell.path for cell in grid.cells if (cell.objective, cell.seed) == ("grpo", 4)))
    assert collect(grid)["verdict"] == [
        "bapo has too few seeds to be compared with grpo (+0.100 avg@2 over 2 seeds).",
        fell,
        "Run at least 3 seeds to decide more.",
        exam.removesuffix(" Intervals over seeds leave this out, because every seed has the same problems."),
        "One run is not finished, so this may change.",
    ]


def test_settings_are_compared_if_there_is_one_objective(first, tmp_path):
    text = write_grid(tmp_path / "grid.toml", tmp_path / "out", seeds="[3, 4, 5]").read_text()
    (tmp_path / "grid.toml").write_text(text + '[[setting]]\nlabel = "reuse-4"\noffpolicy.reuse = 4\n')
    grid = load_grid(tmp_path / "grid.toml")
    for cell in grid.cells:
        higher = 0.3 if cell.setting == "reuse-4" else 0.0
        scored(first[0] / "out/reuse-2/grpo/seed-3", cell.path, 0.1 * (cell.seed - 2) + higher)
    results = collect(grid)
    assert results["verdict"][0] == "reuse-4 beats reuse-2 (+0.300 ± 0.000 avg@2 over 3 seeds)."
    lines = table_lines(results)
    assert any(line.startswith("  reuse-4 - reuse-2") and "3  +0.300 ± 0.000*" in line for line in lines)
    (tmp_path / "grid.toml").write_text(text + '[[setting]]\nlabel = "other"\neval.temperature = 0.5\n')
    apart = collect(load_grid(tmp_path / "grid.toml"))["verdict"]
    assert apart[0] == "The scores cannot be compared, because the runs differ in eval.temperature."
