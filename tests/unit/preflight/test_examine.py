"""What is wrong with a run is found before torch is imported, and all of it at once."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from bapo.cli import run
from bapo.config.recipe import check, parse
from bapo.config.run import Config
from bapo.demo import model_path
from bapo.preflight.examine import examine

ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(8)]
WITHOUT_TORCH = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Watch())
from bapo.cli import run
sys.exit(run(sys.argv[1:]))
"""


def rows(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "train.jsonl", ROWS[:6])
    rows(tmp_path / "test.jsonl", ROWS[6:])
    (tmp_path / "rewards.py").write_text(
        "def right(response, answer):\n    return float(answer in response)\n"
        "def broken(response, answer):\n    return answer['value']\n"
        "def picky(response):\n    return float(response.split('<answer>')[1] != '')\n"
    )
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    return tmp_path


def of_data(**sections):
    task = {"train": ["train.jsonl"], "test": ["test.jsonl"], "reward": "rewards:right"}
    values = {"task": task | sections.pop("task", {}), **sections}
    return parse(Config, values, source="test")


def test_columns_that_are_missing_are_told_of_each_file(place):
    for name in ("train", "test"):
        rows(place / f"{name}.jsonl", [{"text": "What is 1 plus 1?", "gold": "2"}])
    told = examine(of_data()).wrong
    assert [line.partition(" has no prompt: ")[0] for line in told] == [
        "task.train: train.jsonl, line 1", "task.test: test.jsonl, line 1",
    ]  # fmt: skip


@pytest.mark.parametrize("switches", [[], ["--dry-run"]])
def test_everything_is_said_at_once_and_without_torch(place, switches):
    (place / "taken").mkdir()
    (place / "taken" / "something").write_text("")
    words = [
        *("--task.train", "nowhere.jsonl", "--task.test", "test.jsonl", "--task.answer-column", "gold"),
        *("--task.reward", "rewards:rihgt", "--out", "taken", "--model.path", "./nothing", "--learn.lr", "-1"),
        *("--learn.batch-size", "4"),
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, "train", *switches, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    for part in (
        "learn.lr = -1.0: give a number greater than 0",
        "learn.batch_size is not a known key",
        "out=taken: taken exists already",
        "model.path='./nothing': there is no such file or directory",
        "task.train: data source 'nowhere.jsonl' does not exist",
        "task.test: ",
        "gold",
        "task.reward: reward function 'rewards:rihgt': rewards has no function 'rihgt'. Did you mean right?",
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sound_run_is_read_once_and_handed_on(place, monkeypatch):
    started = []
    monkeypatch.setattr("bapo.train.run.start", lambda config, data: started.append((config, data)))
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "rewards:right"]
    assert run(["train", *words]) == 0
    ((config, data),) = started
    assert config.task.name == "data"
    assert [problem.answer for problem in data.train] == ["0", "2", "4", "6", "8", "10"]
    assert len(data.test) == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"reward": "rewards:broken"}}, "task.reward='rewards:broken' fails on the first problem"),
        ({"eval": {"problems": 3}}, "the task holds out only 2 problems. Set eval.problems <= 2"),
        ({"task": {"train": ["test.jsonl"]}}, "all of its problems are in task.test too"),
        ({"rollout": {"max_tokens": 100_000}}, "rollout.max_tokens=100000 leaves no room for a prompt: 'demo' has"),
        ({"out": "train.jsonl/run"}, "train.jsonl is not a directory"),
        ({"model": {"path": "empty"}}, "holds no config.json"),
        (
            {"objective": {"name": "grpo", "options": {"hihg": 1.0}}},
            "objective.options.hihg is not an option of 'grpo'",
        ),
        ({"task": {"reward": "math", "answer_column": "list"}}, "neither text nor number"),
    ],
)
def test_what_would_stop_a_run_is_found(place, sections, message):
    (place / "empty").mkdir()
    rows(place / "train.jsonl", [row | {"list": {"a": 1}} for row in ROWS[:6]])
    rows(place / "test.jsonl", [row | {"list": {"a": 1}} for row in ROWS[6:]])
    (wrong,) = examine(of_data(**sections)).wrong
    assert message in wrong


def test_an_async_reward_is_not_called_in_a_loop_that_ends_before_the_run(place):
    (place / "judge.py").write_text(
        "calls = []\nasync def score(response):\n    calls.append(response)\n    return 1.0\n"
    )
    assert examine(of_data(task={"reward": "judge:score"})).wrong == []
    import judge

    assert judge.calls == []


def test_a_reward_that_wants_its_answer_in_tags_is_not_refused(place):
    found = examine(of_data(task={"reward": "rewards:picky"}))
    assert found.wrong == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_may_not_be_written_to_is_found(place):
    (place / "closed").mkdir(mode=0o500)
    (wrong,) = examine(of_data(out="closed/run")).wrong
    assert "nothing can be written to closed: Permission denied" in wrong


def test_a_place_where_not_even_root_can_write_is_found_and_a_trial_leaves_nothing(place):
    (wrong,) = examine(of_data(out="/proc/bapo/run")).wrong
    assert "out=/proc/bapo/run: cannot create /proc/bapo/run: nothing can be written to /proc" in wrong
    before = sorted(place.rglob("*"))
    assert examine(of_data(out="runs/x")).wrong == []
    assert sorted(place.rglob("*")) == before


def test_a_reward_of_trl_is_tried_with_the_columns_of_the_data_and_without_torch(place):
    (place / "graded.py").write_text(
        "def accuracy(completions, answer, question, **kwargs):\n"
        "    return [float(one == gold and q[0] == '0') for one, gold, q in zip(completions, answer, question)]\n"
        "def chatty(completions, **kwargs):\n    return [one[0]['content'] for one in completions]\n"
    )
    assert examine(of_data(task={"reward": ["rewards:right", "graded:accuracy"]})).wrong == []
    words = [
        "--task.train",
        "train.jsonl",
        "--task.test",
        "test.jsonl",
        "--task.reward",
        "graded:chatty,rewards:broken",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", *words],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert "task.reward='graded:chatty' fails on the first problem" in said
    assert "it is called with lists: prompts and completions (messages where the prompts of the data are" in said
    assert "task.reward='rewards:broken' fails on the first problem" in said


def test_a_name_in_a_path_may_have_240_bytes(place):
    for length, wrong in ((240, 0), (241, 1)):
        name = "m" * length
        if not wrong:
            shutil.copytree(model_path(), place / name)
        config, said = check(Config, {"model": {"path": f"./{name}"}})
        assert len(said) == wrong
        assert config is None if wrong else examine(config).wrong == []
    assert "a name in it can have 240 bytes" in said[0]
    (line,) = check(Config, {"out": "o" * 241})[1]
    assert "a name in it can have 240 bytes" in line
