"""A run directory from a stranger: nothing outside it is read as a part of it or written, and no command waits."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo import cli
from bapo.config.errors import PlaceError
from bapo.evaluate.directory import opened as evaluation
from bapo.models.export import _whole
from bapo.runs import files, history
from bapo.runs.write import FILES, FOLDERS, LOGS, RunDirectory
from bapo.train.run import start
from bapo.train.trackers import MAKERS, Tracked
from tests.tiny.runs import configured

SECRET = b"# a file of another program\n"
SECONDS = 60.0
OFF_POLICY = {"reuse": 2, "partial_budget": 600, "replay_fraction": 0.3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, which is copied and never changed."""
    path = tmp_path_factory.mktemp("hostile") / "run"
    start(configured(path, steps=2, checkpoint_every=1, eval={"problems": 1, "k": 1}), plain=True)
    return path


@pytest.fixture
def killed(finished, tmp_path):
    """A run that was killed after its first step."""
    path = shutil.copytree(finished, tmp_path / "killed")
    (path / "summary.json").unlink()
    shutil.rmtree(path / "checkpoints/step-000002")
    return path


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory):
    """A finished run whose checkpoints hold responses in progress and groups that are used again."""
    path = tmp_path_factory.mktemp("off-policy") / "run"
    start(
        configured(path, steps=4, checkpoint_every=1, eval={"problems": 1, "k": 1}, offpolicy=OFF_POLICY),
        plain=True,
    )
    return path


@pytest.fixture
def half_done(off_policy, tmp_path):
    """The same, killed after its third step."""
    path = shutil.copytree(off_policy, tmp_path / "half-done")
    (path / "summary.json").unlink()
    shutil.rmtree(path / "checkpoints/step-000004")
    return path


@pytest.fixture
def outside(tmp_path):
    """What no run owns: a file and a folder."""
    place = tmp_path / "outside"
    (place / "folder").mkdir(parents=True)
    (place / "file").write_bytes(SECRET)
    (place / "folder" / "kept").write_bytes(SECRET)
    return place


def unchanged(outside):
    found = sorted(str(path.relative_to(outside)) for path in outside.rglob("*"))
    contents = {path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    return found == ["file", "folder", "folder/kept"] and contents == {SECRET}


@pytest.fixture(autouse=True)
def no_waiting():
    """A command that waits for ever is a failure."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def put(path, kind, outside):
    """Put something else in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "link":
            path.symlink_to(outside / "file")
        case "link to a folder":
            path.symlink_to(outside / "folder")
        case "link to nothing":
            path.symlink_to(outside / "new")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "FIFO":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "file":
            path.write_bytes(b"")


INSTEAD_OF_A_FILE = ("link", "link to nothing", "link to a device", "FIFO", "directory")
INSTEAD_OF_A_FOLDER = ("link to a folder", "link to nothing", "FIFO", "file")
STEP = "checkpoints/step-000001"
PLACES = [
    *(
        (name, INSTEAD_OF_A_FILE)
        for name in (*FILES, *(f"{STEP}/{name}" for name in ("state.json", "shard-00001.safetensors")))
    ),
    *((name, INSTEAD_OF_A_FOLDER) for name in (*FOLDERS, STEP, "checkpoints/step-000002.partial")),
]


@pytest.mark.parametrize(("name", "kinds"), PLACES, ids=lambda value: value if isinstance(value, str) else "")
def test_resume_refuses_by_name_whatever_stands_in_the_place_of_its_files(killed, outside, capsys, name, kinds):
    for kind in kinds:
        put(killed / name, kind, outside)
        before = sorted(path.name for path in killed.iterdir())
        assert cli.run(["resume", str(killed)]) == 2, kind
        told = capsys.readouterr().err
        assert f"{killed / name} is a" in told, told
        assert ("--out" in told) == kind.startswith("link"), told
        assert sorted(path.name for path in killed.iterdir()) == before
        assert unchanged(outside), kind


@pytest.mark.parametrize(
    "name", [f"{name}.partial" for name in ("config.json", "summary.json", "model.sha256", "model")]
)
def test_a_link_where_something_will_be_written_first_is_replaced_and_not_followed(killed, outside, name):
    for kind in ("link to nothing", "link", "link to a folder"):
        put(killed / name, kind, outside)
    assert cli.run(["resume", str(killed)]) == 0
    assert unchanged(outside)
    assert (killed / "summary.json").is_file()
    assert not (killed / name).exists()


def test_a_run_whose_directory_is_a_link_goes_on_and_folders_of_others_are_left_alone(killed, outside, tmp_path):
    (tmp_path / "link").symlink_to(killed)
    (killed / "wandb").mkdir()
    (killed / "wandb" / "latest-run").symlink_to(outside / "folder")
    (killed / "mine").symlink_to(outside / "folder")
    assert cli.run(["resume", str(tmp_path / "link")]) == 0
    assert (killed / "summary.json").is_file()
    assert unchanged(outside)


@pytest.mark.parametrize("command", ["report", "ledger", "diagnose", "train"])
def test_other_commands_neither_wait_nor_write_elsewhere(finished, outside, tmp_path, capsys, command):
    """Each file in turn is something else. Whether a command needs it or not, it ends with words."""
    words = {
        "report": ["report", "{run}"],
        "ledger": ["ledger", "{run}"],
        "diagnose": ["diagnose", "{run}"],
        "train": ["train", "--out", "{run}"],
    }[command]
    for number, (name, kinds) in enumerate(PLACES):
        run = shutil.copytree(finished, tmp_path / str(number))
        for kind in kinds:
            put(run / name, kind, outside)
            put(run / ".report.html.partial", kind, outside)
            assert cli.run([word.format(run=run) for word in words]) in (0, 1, 2, 3, 4), (name, kind)
            assert unchanged(outside), (name, kind)
            assert "Traceback" not in capsys.readouterr().err


def test_the_report_says_which_file_is_none(finished, outside, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    put(run / "metrics.jsonl", "link", outside)
    assert cli.run(["report", str(run)]) == 2
    assert f"{run / 'metrics.jsonl'} is a link" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "lock", "history.jsonl", "checkpoints", "data.json"])
def test_a_new_run_is_not_written_through_what_waits_in_its_directory(outside, tmp_path, capsys, name):
    (tmp_path / "run").mkdir()
    (data := tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 3)
    put(tmp_path / "run" / name, "link to a folder" if name == "checkpoints" else "link to nothing", outside)
    for command in ("train", "sft"):
        given = ["--task.train", str(data), "--epochs", "1"] if command == "sft" else []
        assert cli.run([command, *given, "--out", str(tmp_path / "run")]) == 2
        assert f"{tmp_path / 'run' / name} is a link" in capsys.readouterr().err
    assert unchanged(outside)


@pytest.mark.parametrize(
    "name", ["config.json", "responses.jsonl", "chunks.jsonl", "results.json", "report.html", "lock"]
)
def test_an_evaluation_is_not_written_through_links(outside, tmp_path, name):
    for kind in INSTEAD_OF_A_FILE:
        put(tmp_path / "eval" / name, kind, outside)
        with pytest.raises(PlaceError, match=name), evaluation(tmp_path / "eval", {}):
            pass
    assert unchanged(outside)


def test_a_grid_is_not_run_through_links(outside, tmp_path, capsys):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f"name = 'g'\nout = {json.dumps(str(tmp_path / 'out'))}\nseeds = 1\n[base]\nsteps = 1\n"
        "[[objective]]\nlabel = 'o'\nobjective.name = 'grpo'\n[[setting]]\nlabel = 's'\n"
    )
    for name in ("lock", "runs.jsonl", "s", "s/o", "s/o/seed-0.log", "s/o/seed-0"):
        folder = "." not in name and name != "lock"
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/s/o").mkdir(parents=True, exist_ok=True) if name.startswith("s/o/") else None
        put(tmp_path / "out" / name, "link to a folder" if folder else "link to nothing", outside)
        assert cli.run(["compare", str(grid)]) != 0, name
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
        assert unchanged(outside), (name, said)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    "held", [{"config.json": "{}", "checkpoints/epoch1/x": ""}, {"config.json": "not json", "x": ""}]
)
@pytest.mark.parametrize("linked", ["s", "s/o"])
def test_a_grid_neither_removes_nor_renames_what_a_link_leads_to(tmp_path, linked, held):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f"name = 'g'\nout = {json.dumps(str(tmp_path / 'out'))}\nseeds = 1\n[base]\nsteps = 1\n"
        "[[objective]]\nlabel = 'o'\nobjective.name = 'grpo'\n[[setting]]\nlabel = 's'\n"
    )
    victim = tmp_path / "victim"
    place = victim / ("o/seed-0" if linked == "s" else "seed-0")
    for name, text in held.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (tmp_path / "out" / linked).parent.mkdir(parents=True)
    (tmp_path / "out" / linked).symlink_to(victim)
    for words in ([], ["--retry"], ["--dry-run"]):
        assert cli.run(["compare", str(grid), *words]) != 0
    assert sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()) == sorted(held)


def test_files_are_opened_as_themselves_or_not_at_all(outside, tmp_path):
    """Also where no command has looked before."""
    for kind in INSTEAD_OF_A_FILE:
        put(tmp_path / "run" / "x", kind, outside)
        for touch in (files.opened, files.appended, files.checksum, lambda path: files.cut(path, 0)):
            with pytest.raises(PlaceError, match="x is a"):
                touch(tmp_path / "run" / "x")
        put(tmp_path / "run" / "y.partial", kind, outside)
        if kind == "directory":
            with pytest.raises(OSError, match=r"y\.partial"):
                files.write(tmp_path / "run" / "y", "new")
        else:
            files.write(tmp_path / "run" / "y", "new")
            assert (tmp_path / "run" / "y").read_text() == "new"
    for kind in INSTEAD_OF_A_FOLDER:
        put(tmp_path / "run" / "folder", kind, outside)
        with pytest.raises(PlaceError, match="folder is a"):
            files.folder(tmp_path / "run" / "folder")
        if kind.startswith("link"):
            put(tmp_path / "run" / "folder.partial", kind, outside)
            with _whole(tmp_path / "run" / "folder", "a card") as partial:
                (partial / "weights").touch()
            assert not (tmp_path / "run" / "folder").is_symlink()
            assert {path.name for path in (tmp_path / "run" / "folder").iterdir()} == {"weights", "README.md"}
    assert unchanged(outside)


def test_a_log_that_becomes_a_link_while_the_run_is_at_work_is_not_followed(outside, tmp_path):
    run = RunDirectory(tmp_path)
    for name, kind in zip(LOGS, ("link", "link to nothing", "FIFO", "directory", "link to a device"), strict=True):
        run.append(name, {"step": 1})
        put(tmp_path / name, kind, outside)
        with pytest.raises((PlaceError, RuntimeError), match=name):
            run.append(name, {"step": 2})
    put(tmp_path / history.FILE, "link", outside)
    with pytest.raises(PlaceError):
        history.record(tmp_path, "start")
    put(tmp_path / "skipped", "link to a folder", outside)
    with pytest.raises(PlaceError):
        run.write_arrays("skipped/update-000001.safetensors", {})
    run.close()
    assert unchanged(outside)


def test_one_file_with_two_names_is_not_written_in_place(outside, tmp_path):
    os.link(outside / "file", tmp_path / "metrics.jsonl")
    os.link(outside / "file", tmp_path / "config.json")
    run = RunDirectory(tmp_path)
    with pytest.raises(PlaceError, match="hard link"):
        run.append("metrics.jsonl", {"step": 1})
    run.write("config.json", {})  # whole files are new files
    assert unchanged(outside)


def test_a_tracker_in_the_run_directory_does_not_follow_links(outside, tmp_path):
    pytest.importorskip("tensorboard")
    run = Tracked(tmp_path, "id", "bapo", {}, 0, 0)
    for name in ("tensorboard", "tensorboard/step"):
        put(tmp_path / name, "link to a folder", outside)
        with pytest.raises(PlaceError, match=name):
            MAKERS["tensorboard"](run)
        (tmp_path / name).unlink()
    assert unchanged(outside)


def test_checksums_name_files_of_the_model_and_nothing_else(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("/etc/passwd", "model/../../x", "model", "model/\0", "config.json", "", "model/" + "x" * 300):
        (run / "model.sha256").write_text(f"{'0' * 64}  {name}\n")
        summary, flaw = RunDirectory(run).complete()
        assert summary is None
        assert flaw


def test_the_checks_of_a_trained_model_follow_no_link_on_the_way(finished, outside, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "model" / "sub").symlink_to(outside)
    for name in ("file", "folder/kept"):
        (run / "model.sha256").write_text(f"{files.checksum(outside / name)}  model/sub/{name}\n")
        summary, flaw = RunDirectory(run).complete()
        assert summary is None
        assert "model/sub is a link" in flaw


def test_malformed_states_are_refused_with_words(half_done, capsys):
    killed = half_done
    state = killed / "checkpoints/step-000003/state.json"
    manifest = state.with_name("manifest.json")
    sound = json.loads(state.read_text())

    def given(changed):
        state.write_text(json.dumps(changed))
        sums = json.loads(manifest.read_text()) | {"state.json": files.checksum(state)}
        manifest.write_text(json.dumps(sums))
        assert cli.run(["resume", str(killed)]) == 3
        told = capsys.readouterr().err
        assert "state.json" in told or "does not fit step-000003" in told, told
        assert "Traceback" not in told

    for key, value in (
        ("logs", {"../outside": 1}),
        ("logs", []),
        ("logs", {"metrics.jsonl": "1"}),
        ("logs", {"metrics.jsonl": -1}),
        ("log_digests", 3),
        ("version", "x"),
        ("scheduler", {}),
        ("buffer", [1]),
        ("progress", {"unknown": 1}),
        ("cursor", None),
    ):
        given(sound | {key: value})
    group = {"id": 0, "problem": {}, "trajectories": []}
    for place, value in (
        ("scheduler/groups/0/trajectories/0/versions/0", "x"),
        ("scheduler/groups/0/trajectories/0/versions/0", 2**40),
        ("scheduler/groups/0/trajectories/0/tokens/0", 10**6),
        ("scheduler/groups/0/trajectories/0/tokens", []),
        ("scheduler/groups/0/trajectories/0/prompt", []),
        ("scheduler/groups/0/problem/answer", 10**40),
        ("scheduler/groups/0/problem/answer", {"numbers": [1]}),
        ("scheduler/groups/0/problem", {}),
        ("scheduler/groups/0", group),
        ("scheduler/groups/0/trajectories", []),
        ("scheduler/next_id", 10**12),
        ("scheduler/version", 10**6),
        ("buffer/totals/adds", None),
        ("buffer/totals/lost_fresh", "x"),
        ("buffer/batches_left", [[1, 0]]),
        ("buffer/held/0/group/trajectories/0/tokens", None),
        ("buffer/held/0/group/trajectories/0/reward", None),
        ("version", 2**70),
        ("progress/step", -3),
        ("progress/step", 0),
        ("progress/groups", 3),
        ("progress/failing", {}),
        ("progress/failing/groups", "x"),
        ("progress/failing/cause", 3),
        ("progress/failing/later", 3),
        ("progress/windows", ["x"]),
    ):
        changed = json.loads(json.dumps(sound))
        *way, last = [int(key) if key.isdigit() else key for key in place.split("/")]
        inside = changed
        for key in way:
            inside = inside[key]
        inside[last] = value
        given(changed)
    for key in ("problems", "cursor", "scheduler", "buffer", "progress"):
        given({name: value for name, value in sound.items() if name != key})
    manifest.write_text(json.dumps({"../../config.json": "0", "state.json\0": "0"}))
    assert cli.run(["resume", str(killed)]) == 3
    assert "manifest.json names" in capsys.readouterr().err
    assert Path(killed).is_dir()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("line", [b"{}", b'{"kind": "update", "step": []}', b"3", b"{", b'{"step": "1"}'])
def test_logs_whose_checksums_agree_and_whose_lines_are_none_are_refused_before_anything_changes(
    killed, capsys, name, line
):
    log, state = killed / name, killed / STEP / "state.json"
    log.write_bytes(line + b"\n")
    kept = json.loads(state.read_text())
    kept["logs"][name] = log.stat().st_size
    kept["log_digests"][name] = files.checksum(log)
    state.write_text(json.dumps(kept))
    manifest = state.with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"state.json": files.checksum(state)}))
    before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    assert cli.run(["resume", str(killed)]) == 3
    told = capsys.readouterr().err
    assert f"are not those of a run: {name} " in told
    assert "Traceback" not in told
    assert {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["a name", "a shape", "a number"])
def test_shards_that_are_none_are_refused_with_words(killed, capsys, kind):
    path, manifest = killed / STEP / "shard-00001.safetensors", killed / STEP / "manifest.json"
    shards = load_file(path)
    first = next(name for name in shards if shards[name].dim() == 2)
    wrong = {"a name": {"nodot": torch.zeros(1)}, "a number": {first: torch.zeros(())}}
    save_file(shards | wrong.get(kind, {first: shards[first][:-1].clone()}), path)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {path.name: files.checksum(path)}))
    assert cli.run(["resume", str(killed)]) == 3
    assert "does not fit this run's model" in capsys.readouterr().err


def test_settings_inside_settings_without_end_are_refused_with_words(tmp_path, capsys):
    for depth in (files.DEEPEST + 1, 990, 100_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        with pytest.raises(ValueError, match="it is nested too deeply"):
            files.object_in(deep.encode())
    (tmp_path / "config.json").write_text(deep)
    assert cli.run(["train", "--model.path", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "config.json" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("line", [{"environment": "x"}, {"changed": "x"}, {"changed": {"a": "b"}}, {"changed": []}])
def test_lines_of_a_history_that_are_none_are_left_out(killed, line):
    with (killed / history.FILE).open("a") as file:
        file.write(json.dumps({"event": "resume"} | line) + "\n")
    assert cli.run(["resume", str(killed)]) == 0
    assert (killed / "summary.json").is_file()
