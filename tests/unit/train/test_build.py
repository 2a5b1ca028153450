"""Tasks from the configuration: data, verifier and notes."""

import json

import pytest
from transformers import AutoTokenizer

from bapo.config.errors import ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.demo import model_path
from bapo.models.policy import Policy
from bapo.train.build import make_task

GSM8K = [
    {"question": "Tom has 2 pens and buys 3. How many has he?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "Ann reads 4 pages a day. How many in 6 days?", "answer": "4 * 6 = <<4*6=24>>24\n#### 24"},
    {"question": "Of 12 eggs 5 break. How many are whole?", "answer": "12 - 5 = <<12-5=7>>7\n#### 7"},
]


@pytest.fixture(scope="module")
def policy():
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    return Policy(None, tokenizer, frozenset({tokenizer.eos_token_id}))


@pytest.fixture
def files(tmp_path):
    for name, rows in (("train", GSM8K), ("test", GSM8K[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": [str(tmp_path / "train.jsonl")], "test": [str(tmp_path / "test.jsonl")]}


def made(policy, **task):
    return make_task(parse(Config, {"task": task}, source="test"), policy)


def test_data_is_loaded_cleaned_of_test_problems_and_scored_by_math_verify(policy, files):
    task, notes = made(policy, name="data", reward_workers=1, **files)
    assert [problem.answer for problem in task.train] == ["5", "24"]
    assert "task.train: left out 1 problem also held out" in notes
    first, second = task.train
    scores = task.scores([(first, r"So \boxed{5}"), (first, "6"), (second, "It is 24.")])
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]


def ids(problems):
    return {problem.id for problem in problems}


def test_a_share_of_the_problems_is_held_out_whatever_their_order_and_template(policy, tmp_path):
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
    rows += rows[:5] + [{"question": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(5)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    how = {"name": "data", "reward_workers": 1, "holdout": 0.2}
    task, notes = made(policy, train=[str(tmp_path / "one.jsonl")], **how)
    assert (len(task.train), len(task.test)) == (36, 9)
    assert "task.holdout=0.2: 9 problems of task.train held out" in notes
    every = ids(task.train) | ids(task.test)
    assert ids(task.test) == set(sorted(every)[:9])
    questions = {" ".join(problem.prompt.split()) for problem in task.train}
    assert questions.isdisjoint(" ".join(problem.prompt.split()) for problem in task.test)
    other, _ = made(policy, train=[str(tmp_path / "two.jsonl")], template="Say: {prompt}", **how)
    assert ids(other.test) == ids(task.test)
    assert ids(other.train) == ids(task.train)


def test_one_prompt_under_two_questions_is_not_on_both_sides(policy, tmp_path):
    """With a template, the first row becomes the same prompt as the second, which has it already."""
    rows = [
        {"question": text, "answer": "1"} for n in range(12) for text in (f"What is {n}?", f"What is {n}? In a word.")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"name": "data", "reward_workers": 1, "holdout": 0.25, "template": "{prompt} In a word."}
    task, notes = made(policy, train=[str(tmp_path / "rows.jsonl")], **how)
    assert {problem.prompt for problem in task.train}.isdisjoint(problem.prompt for problem in task.test)
    left_out = 24 - len(task.train) - len(task.test)
    assert left_out > 0
    assert f"task.train: left out {left_out} problem{'s' * (left_out > 1)} also held out" in notes


def test_a_holdout_that_holds_out_nothing_or_all_that_can_be_used_is_refused(policy, files, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps(GSM8K[0]) + "\n")
    with pytest.raises(ValueError, match=r"task.holdout=0.5 holds out nothing, because task.train has one problem"):
        made(policy, name="data", train=[str(tmp_path / "one.jsonl")], holdout=0.5)
    with pytest.raises(ConfigError, match=r"task.holdout=0.1 holds out problems of task.train, but task.test names"):
        made(policy, **files, holdout=0.1)
    with pytest.raises(ConfigError, match=r"task.holdout belongs to task.name='data', not to 'countdown'"):
        made(policy, holdout=0.1)


def test_long_prompts_are_left_out_and_counted(policy, files):
    _, notes = made(policy, name="data", max_prompt_tokens=43, reward_workers=1, **files)
    assert "task.train: left out 1 prompt over 43 tokens" in notes
    with pytest.raises(ValueError, match=r"task\.train has no problem left.*Raise task.max_prompt_tokens"):
        made(policy, name="data", max_prompt_tokens=1, reward_workers=1, **files)


def test_a_reward_of_ones_own(policy, files, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def score(response, answer):\n    return 0.25 * (response == answer)\n")
    monkeypatch.chdir(tmp_path)
    task, _ = made(policy, name="data", reward="my_reward:score", **files)
    assert [score.reward for score in task.scores([(task.train[0], "5"), (task.train[0], "4")])] == [0.25, 0.0]


def test_a_gym(policy):
    task, _ = made(policy, name="gym", gym={"basic_arithmetic": {}}, gym_train=8, gym_test=4, reward_workers=1)
    assert (len(task.train), len(task.test)) == (8, 4)
    assert task.scores([(task.train[0], "<answer>no number</answer>")])[0].reward in (0.0, 0.01)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "data"}, "task.train and task.test"),
        ({"train": ["mine.jsonl"]}, "set task.holdout = 0.1 instead of task.test"),
        ({"name": "gym"}, "needs a data set"),
        ({"overlong_tokens": 4096}, "every response would be penalised"),
    ],
)
def test_what_cannot_be_is_refused(task, message):
    with pytest.raises(ConfigError, match=message):
        parse(Config, {"task": task}, source="test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task": {"name": "countdown", "train": ["x"]}},
            r"task.train belongs to task.name='data', not to 'countdown'",
        ),
        ({"task": {"name": "gym", "gym": {"gcd": {}}, "reward": "a:b"}}, r"task.reward belongs to task.name='data'"),
        (
            {"objective": {"name": "grpo", "scope": "microbatch"}},
            r"objective\.scope='microbatch' belongs to objective\.name='bapo', not to 'grpo'",
        ),
        ({"objective": {"remainder": "weigh", "scope": "microbatch"}}, r"Set objective\.scope='update'"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(Config, values, source="test")


def test_answers_that_math_cannot_read_are_refused_before_anything_runs(policy, tmp_path):
    for name, value in (("train", True), ("test", False)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"Is it {name}?", "answer": value}) + "\n")
    files = {name: [str(tmp_path / f"{name}.jsonl")] for name in ("train", "test")}
    with pytest.raises(ValueError, match=r"neither text nor number, so reward='math' cannot compare"):
        made(policy, name="data", **files)


def test_a_run_says_what_its_engine_cannot_do():
    from types import SimpleNamespace

    from bapo.train.build import engine_notes

    assert engine_notes(SimpleNamespace(draws_by_position=True, gives_entropies=True)) == []
    notes = engine_notes(SimpleNamespace(draws_by_position=False, gives_entropies=False))
    assert [" ".join(note.split()[2:5]) for note in notes] == ["draws its own", "gives no entropies:"]
