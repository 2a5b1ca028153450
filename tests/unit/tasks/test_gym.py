import json
import re

import pytest
import reasoning_gym

from bapo.tasks.gym import DATASETS as ALL
from bapo.tasks.gym import INSTRUCTION, Gym, evaluates, generate, is_formula
from bapo.types import Score

# isomorphic_strings iterates over sets: its problems depend on the hash seed of the process that makes them.
DATASETS = {"chain_sum": {"max_terms": 3}, "countdown": {"min_numbers": 3, "max_numbers": 3}, "isomorphic_strings": {}}


@pytest.fixture(scope="module")
def gym():
    gym = Gym(DATASETS, train_size=30, test_size=10, seed=3, workers=2, seconds=3)
    yield gym
    gym.close()


@pytest.fixture(scope="module")
def other():
    """Of another seed, as text, after a prompt that opens the thinking."""
    gym = Gym(DATASETS, train_size=30, test_size=10, seed=4, workers=1, chat=False, thinking=True)
    yield gym
    gym.close()


def question(problem):
    return problem.prompt[0]["content"].removesuffix(f"\n\n{INSTRUCTION}")


def own_answer(problem):
    origin = problem.answer
    return reasoning_gym.create_dataset(origin["name"], seed=origin["seed"], size=origin["size"])[origin["index"]][
        "answer"
    ]


def test_splits_have_their_sizes_take_turns_and_share_no_question(gym):
    assert (len(gym.train), len(gym.test)) == (30, 10)
    assert [problem.source for problem in gym.train[:4]] == [
        "chain_sum",
        "countdown",
        "isomorphic_strings",
        "chain_sum",
    ]
    assert [problem.source for problem in gym.test].count("chain_sum") == 4
    problems = [*gym.train, *gym.test]
    assert len({question(problem) for problem in problems}) == len({problem.id for problem in problems}) == 40
    assert all(INSTRUCTION in problem.prompt[0]["content"] for problem in problems)
    assert json.loads(json.dumps(gym.train[0].answer)) == gym.train[0].answer


def test_the_same_seed_makes_the_same_problems_whatever_the_hash_seed_of_this_process(gym, other):
    again = Gym(DATASETS, train_size=30, test_size=10, seed=3, workers=1)
    again.close()
    assert (again.train, again.test) == (gym.train, gym.test)
    assert not {problem.id for problem in other.train} & {problem.id for problem in gym.train}
    assert isinstance(other.train[0].prompt, str)


def test_the_data_sets_own_scorer_decides(gym):
    total = gym.train[0]
    first, *rest = re.search(r"(-?\d+(?: [-+] \d+)+)", question(total))[1].split()
    value = int(first) + sum(int(sign + term) for sign, term in zip(rest[::2], rest[1::2], strict=True))
    responses = [f"<answer>{value}</answer>", f"<think><answer>{value}</answer></think> <answer>{value + 1}</answer>"]
    responses += [
        str(value),
        f"<answer>{value}",
        f"<think><answer>{value}</answer>",
        f"<answer>1</answer><answer> {value} </answer>",
    ]
    scores = gym.scores([(total, response) for response in responses])
    assert [score.reward == 1.0 for score in scores] == [True, False, False, False, False, True]
    assert scores[0].answer == scores[-1].answer == str(value)
    assert scores[2] == Score(0.0)


def test_every_problem_is_made_again_in_the_sandbox(gym):
    scores = gym.scores([(problem, "<answer>True</answer>") for problem in (*gym.train, *gym.test)])
    assert not any(score.failure for score in scores)
    assert {score.reward for score in scores} >= {0.01, 1.0} or {score.reward for score in scores} >= {0.0, 1.0}


def test_an_answer_that_is_a_program_is_not_run(gym, tmp_path):
    countdown = gym.train[1]
    target = tmp_path / "pwned"
    programs = [f"__import__('os').mkdir({str(target)!r})", f"open({str(target)!r}, 'w')", "().real", "exec('1')"]
    programs += [
        f"""S('_'+'_import_'+'_("os")'+'.'+'mkdir("{target}")')""",
        f"ｏｐｅｎ({str(target)!r}, 'w')",
        "exit()",
    ]
    programs += ["x.y", "(lambda: 1)()", "[1]", "x1", "1" * 5000 + "$"]
    scores = gym.scores([(countdown, f"<answer>{program}</answer>") for program in programs])
    assert [score.reward for score in scores] == [0.0] * len(programs)
    assert not target.exists()


def test_where_lists_are_evaluated_nothing_else_is(tmp_path):
    target = tmp_path / "pwned"
    programs = [f"open({str(target)!r}, 'w')", f"ｏｐｅｎ({str(target)!r}, 'w')"]
    programs += ["exit()", "[1][0].real", "__import__('os')"]
    names = [name for name in ALL if evaluates(name) == "eval"]
    task = Gym({name: {} for name in names}, train_size=len(names), test_size=0, workers=2)
    spiral = task.train[names.index("spiral_matrix")]
    right = own_answer(spiral)
    listed = str([int(number) for number in right.split()])
    try:
        refused = task.scores([(p, f"<answer>{program}</answer>") for p in task.train for program in programs])
        scored = task.scores([(spiral, f"<answer>{text}</answer>") for text in (right, listed)])
    finally:
        task.close()
    assert [score.reward for score in refused] == [0.0] * len(programs) * len(names)
    assert not target.exists()
    assert [score.reward for score in scored] == [1.0, 0.1]


def test_what_each_scorer_evaluates_with():
    assert {name: evaluates(name) for name in sorted(ALL) if name != "composite" and evaluates(name)} == {
        **dict.fromkeys(["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"], "eval"),
        **dict.fromkeys(["countdown", "intermediate_integration", "polynomial_multiplication"], "parse_expr"),
        **dict.fromkeys(["puzzle24", "simple_integration"], "parse_expr"),
    }


@pytest.mark.parametrize(
    "name", ["countdown", "polynomial_multiplication", "intermediate_integration", "simple_integration"]
)
def test_the_data_sets_own_answers_are_formulas(name):
    dataset = reasoning_gym.create_dataset(name, seed=1, size=40)
    answers = [dataset[i]["answer"] for i in range(40)]
    assert all(is_formula(answer, own=answer) for answer in answers)
    assert is_formula("2*sqrt(x) + 1.5e-3*exp(-x**2) - .5!")
    assert not is_formula("2*alpha")
    assert is_formula("2*alpha", own="alpha**2")


def test_where_the_prompt_opens_the_thinking_only_what_follows_it_counts(other):
    right = own_answer(other.train[0])
    responses = [f"<answer>{right}</answer>", f"so</think><answer>{right}</answer>"]
    assert [score.reward for score in other.scores([(other.train[0], text) for text in responses])] == [0.0, 1.0]


def test_an_answer_without_end_is_a_failure(gym):
    assert gym.scores([(gym.train[1], "<answer>9**9**9**9**9</answer>")]) == [Score(None, "timeout after 3 s")]


def test_a_question_that_comes_out_differently_is_a_failure(gym):
    problem = gym.train[0]
    problem.answer["question"], kept = "0" * 16, problem.answer["question"]
    (score,) = gym.scores([(problem, "<answer>1</answer>")])
    problem.answer["question"] = kept
    assert score == Score(None, "RuntimeError: chain_sum did not make the same question again")


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"cuntdown": {}}, r"data set 'cuntdown', which reasoning-gym does not have\. Did you mean countdown\?"),
        ({"countdown": {"min_number": 2}}, r"gym\.countdown=.*'min_number'.*The keys of countdown are max_numbers"),
        ({"countdown": {"min_numbers": 0}}, r"gym\.countdown={'min_numbers': 0}: min_numbers must be"),
        ({"countdown": {"seed": 1}}, r"gym\.countdown\.seed=1 cannot be set: the task's seed and sizes decide"),
    ],
)
def test_what_cannot_be_made_is_explained(datasets, message):
    with pytest.raises(ValueError, match=message):
        Gym(datasets, train_size=1, test_size=1)


def test_a_data_set_with_too_few_questions_says_so():
    with pytest.raises(ValueError, match=r"coin_flip gave only \d+ new questions for the train problems"):
        generate([["coin_flip", {"min_trials": 3, "max_trials": 3}]], 500, 2, 0)
