import asyncio
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bapo.tasks.task import following
from bapo.tasks.verify.scorers import FunctionReward
from bapo.types import Problem, Score

PROBLEM = Problem("p", "2+2=", "4", extra={"level": 3})


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module into the current directory and gives a reward made of one of its functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made, names = [], itertools.count()

    def write(code, function="reward", **options):
        name = f"reward_{tmp_path.name}_{next(names)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        made.append(FunctionReward(f"{name}:{function}", **options))
        return made[-1]

    yield write
    for reward in made:
        reward.close()


def scores(reward, *responses):
    return reward.scores([(PROBLEM, response) for response in responses])


def test_a_function_gets_the_keywords_it_names(written):
    reward = written("def reward(response, answer):\n    return answer in response")
    assert scores(reward, "it is 4", "5") == [Score(1.0), Score(0.0)]
    reward = written("def reward(extra, prompt, scale=2):\n    return extra['level'] * len(prompt) * scale")
    assert scores(reward, "") == [Score(24.0)]
    reward = written("def reward(**given):\n    return {'reward': 1, 'answer': ' '.join(sorted(given))}")
    assert scores(reward, "") == [Score(1.0, answer="answer extra prompt response")]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_whoever_follows_hears_of_every_score_and_of_failures_by_cause(written, kind):
    reward = written(f"{kind} reward(response):\n    return 1.0 if response != 'x' else 1 / 0")
    told = []
    with following(3, lambda how: told.append((how.responses, how.line("scoring", 0.0)))):
        scores(reward, "a", "x", "x")
    assert [responses for responses, _ in told] == [0, 1, 2, 3]
    assert told[0][1] == "scoring: 0 of 3 responses"
    failed = "no reward for 2 responses; the cause: ZeroDivisionError: division by zero"
    assert told[-1][1] == f"scoring: 3 of 3 responses, 0.0 s each; {failed}"


STOPPED = """
import signal, sys
from bapo.process import stops
from bapo.tasks.task import following
from bapo.tasks.verify.scorers import FunctionReward
from bapo.types import Problem, Score

reward, heard = FunctionReward("slow:reward"), []
asked = [(Problem("p", "2+2=", "4"), str(number)) for number in range(100)]
with stops.listening(heard.append), following(100):
    try:
        reward.scores(asked)
    except stops.StopAsked:
        heard.append("left")
assert (sys.modules["slow"].calls, heard) == (["0", "1"], [signal.SIGTERM, "left"])
sys.modules["slow"].calls.clear()
with stops.listening(heard.append), following(5):  # it would be over before anybody minds
    assert reward.scores(asked[:5]) == [Score(1.0)] * 5
assert heard[2:] == [signal.SIGTERM]
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_stop_ends_scoring_between_two_calls_if_the_rest_would_take_long(tmp_path, kind):
    """In a process of its own, because signals belong to the process."""
    (tmp_path / "slow.py").write_text(
        f"import signal, time\ncalls = []\n{kind} reward(response):\n    calls.append(response)\n"
        "    time.sleep(0.1)\n    len(calls) == 2 and signal.raise_signal(signal.SIGTERM)\n    return 1.0"
    )
    subprocess.run([sys.executable, "-c", STOPPED], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("return float('nan')", "ValueError: the reward function returned nan, which float32 cannot hold"),
        ("return float('inf')", "ValueError: the reward function returned inf, which float32 cannot hold"),
        ("return 1e39", "ValueError: the reward function returned 1e+39, which float32 cannot hold"),
        ("return 'high'", "TypeError: the reward function returned a str, not a number"),
        ("return None", "TypeError: the reward function returned a NoneType, not a number"),
        ("return {'score': 1}", "TypeError: the reward function returned a dict without the key 'reward': ['score']"),
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError", "RuntimeError"),
        ("import sys; sys.exit()", "SystemExit"),
        ("import sys; sys.exit('no key')", "SystemExit: no key"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import asyncio; raise asyncio.CancelledError('judge')", "CancelledError: judge"),
        ("raise type('Own', (BaseException,), {})('end')", "Own: end"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: exit(3)})()", "Mute"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_is_no_reward_is_a_failure(written, kind, code, failure):
    reward = written(f"{kind} reward(response):\n    if response == 'good': return 1\n    {code}")
    assert scores(reward, "bad", "good") == [Score(None, failure), Score(1.0)]


def test_async_functions_run_side_by_side_in_order_up_to_a_limit(written):
    code = """
        import asyncio
        running = most = 0
        async def reward(response):
            global running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1 / float(response))
            running -= 1
            return float(response)
    """
    reward = written(code, concurrency=5)
    assert [score.reward for score in scores(reward, *map(str, range(1, 21)))] == list(range(1, 21))
    assert sys.modules[reward.name.partition(":")[0]].most == 5


def test_an_async_call_has_a_time_limit_of_its_own(written):
    code = """
        import asyncio
        async def reward(response):
            if response == "own": raise TimeoutError("of the judge")
            await asyncio.sleep(60 if response == "slow" else 0)
            return 1
    """
    reward = written(code, seconds=0.2)
    expected = [Score(None, "timeout after 0.2 s"), Score(1.0), Score(None, "TimeoutError: of the judge")]
    assert scores(reward, "slow", "fast", "own") == expected


def test_one_event_loop_serves_all_batches(written):
    code = """
        import asyncio
        loops = set()
        class Judge:
            async def __call__(self, response):
                loops.add(asyncio.get_running_loop())
                return 1
        judge = Judge()
    """
    reward = written(code, "judge")
    for _ in range(3):
        assert scores(reward, "a", "b") == [Score(1.0)] * 2
    assert len(sys.modules[reward.name.partition(":")[0]].loops) == 1
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_what_cannot_be_found_or_called_is_explained(written):
    with pytest.raises(ValueError, match=r"no module 'nowhere_at_all' in .*test_what_cannot_be_found"):
        FunctionReward("nowhere_at_all:reward")
    with pytest.raises(ValueError, match="is not of the form module:function"):
        FunctionReward("rewards.py")
    with pytest.raises(ValueError, match=r"has no function 'reword'\. Did you mean reward\?"):
        written("def reward(response): return 1", "reword")
    with pytest.raises(ValueError, match=r"imports not_installed_here, which is missing\. Install it"):
        written("import not_installed_here")
    with pytest.raises(ValueError, match=r"failed: SyntaxError"):
        written("def reward(:")
    with pytest.raises(ValueError, match=r"requires the parameter 'solution_str'.*response, answer, prompt, extra"):
        written("def reward(solution_str): return 1")
    with pytest.raises(ValueError, match="concurrency=0"):
        written("def reward(response): return 1", concurrency=0)
    with pytest.raises(ValueError, match=r"importing reward_\w+ failed: SystemExit: 3\..*__main__"):
        written("import sys\nsys.exit(3)")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("grading.py:exact", r"For the function exact in grading.py, write grading:exact\."),
        ("grading.py", r"For the function exact or loose in grading.py, write grading:exact or grading:loose\."),
        ("grading", r"For the function exact or loose in grading.py, write grading:exact or grading:loose\."),
        ("sub/other.py:exact", r"For the function exact in sub/other.py, write sub.other:exact\."),
        ("/far/other.py:exact", r"start in the directory /far and write other:exact\."),
        ("nowhere.py", r"such as grading:exact\."),
        (":exact", r"such as grading:exact\."),
        ("marking:exact", r"no module 'marking' in .*Did you mean grading:exact\? Otherwise, start"),
    ],
)
def test_the_hint_names_the_file_and_the_function_that_are_there(written, given, hint):
    Path("grading.py").write_text("import nothing_of_that_name\ndef exact(response): ...\ndef loose(response): ...\n")
    Path("broken.py").write_text("def exact(:")
    with pytest.raises(ValueError, match=hint):
        FunctionReward(given)


TRL = {
    "plain": "{}def reward(completions, **kwargs):\n    return [float('4' in one) for one in completions]",
    "columns": "{}def reward(prompts, completions, solution, level, **kwargs):\n"
    "    return [level[0] * float(gold in one) for one, gold in zip(completions, solution)]",
    "gold": "{}def reward(completions, gold, **kwargs):\n"
    "    return [float(right in one) for one, right in zip(completions, gold)]",
    "ids": "{}def score(prompts, completions, completion_ids, answer, **kwargs):\n"
    "    return [float(gold in one) for one, gold in zip(completions, answer)]",
}


@pytest.mark.parametrize("kind", ["", "async "])
@pytest.mark.parametrize("style", TRL)
def test_a_function_of_trl_is_recognised_and_the_wrapper_that_is_shown_works(written, kind, style):
    code, called = TRL[style].format(kind), "score" if style == "ids" else "reward"
    with pytest.raises(ValueError, match=f"'.*:{called}' has the signature of TRL") as refused:
        written(code, called)
    said = str(refused.value)
    assert ("Token ids are not known here" in said) == (style == "ids")
    wrapper = "\n".join(line[4:] for line in said.splitlines() if line.startswith("    "))
    assert wrapper.count("\n") == 3
    name = re.search(r':(\w+)":', said)[1]
    reward = written(f"{code}\n\n{wrapper}", name)
    assert scores(reward, "it is 4", "5") == [Score(3.0 if style == "columns" else 1.0), Score(0.0)]


@pytest.mark.parametrize(
    ("code", "called", "extra"),
    [
        (
            "def eqn(completions, nums, target, **kw):\n"
            "    return [float(one == str(sum(n) - t)) for one, n, t in zip(completions, nums, target)]",
            "eqn",
            {"nums": [1, 5], "target": 2},
        ),
        (
            "def diff(prompts, completions, difficulty, **kw):\n"
            "    return [float(one == str(hard)) for one, hard in zip(completions, difficulty)]",
            "diff",
            {"difficulty": 4},
        ),
        (
            "def acc(completions, answer, **kw):\n    return [float(a == b) for a, b in zip(completions, answer)]",
            "acc",
            {"answer": "2+2 is 5", "prompts": "not ours", "index": 0},
        ),
        (
            "class Judge:\n"
            "    async def __call__(self, completions, answer, **kw):\n"
            "        return [float(a == b) for a, b in zip(completions, answer)]\n"
            "judge = Judge()",
            "judge",
            {},
        ),
        ("def bare(completions):\n    return [float(one == '4') for one in completions]", "bare", {"level": 3}),
        (
            "def few(completions, solution, level=(9,)):\n"
            "    return [float(a == b) * c / 3 for a, b, c in zip(completions, solution, level)]",
            "few",
            {"level": 3, "other": 1},
        ),
        (
            "def opt(completions=None, answer=None, **kw):\n    return [float(completions == answer)]",
            "opt",
            {"level": 3},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_the_wrapper_fits_the_parameters_and_the_columns(written, code, called, extra):
    with pytest.raises(ValueError, match="signature of TRL") as refused:
        written(code, called)
    wrapper = "\n".join(line[4:] for line in str(refused.value).splitlines() if line.startswith("    "))
    assert wrapper.count("\n") <= 4
    problem = Problem("p", "2+2=", "4", extra=extra)
    reward = written(f"{code}\n\n{wrapper}", "score")
    assert reward.scores([(problem, "4"), (problem, "5")]) == [Score(1.0), Score(0.0)]


def test_the_wrapper_gives_messages_where_the_prompt_is_a_chat(written):
    code = "def reward(completions, **kwargs):\n    return [float(one[0]['content'] == '4') for one in completions]"
    with pytest.raises(ValueError, match="signature of TRL") as refused:
        written(code)
    wrapper = "\n".join(line[4:] for line in str(refused.value).splitlines() if line.startswith("    "))
    chat = Problem("p", [{"role": "user", "content": "2+2="}], "4")
    assert written(f"{code}\n\n{wrapper}", "score").scores([(chat, "4"), (chat, "5")]) == [Score(1.0), Score(0.0)]


def test_a_function_that_takes_a_response_may_have_parameters_of_trl_besides(written):
    reward = written("def reward(response, completions=None, prompts=()):\n    return completions is None")
    assert scores(reward, "") == [Score(1.0)]


def test_a_task_of_an_async_function_that_exits_fails_its_batch_and_the_next_batch_is_scored(written):
    code = """
        import asyncio, sys
        async def part():
            sys.exit("quota")
        async def reward(response):
            if response == "bad":
                await asyncio.gather(part())
            await asyncio.sleep(0 if response == "good" else 30)
            return 1
    """
    reward = written(code)
    assert scores(reward, "good", "good") == [Score(1.0)] * 2
    assert scores(reward, "bad", "slow") == [Score(None, "SystemExit: quota")] * 2
    assert scores(reward, "good") == [Score(1.0)]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_ctrl_c_passes_through_a_reward(written, kind):
    code = f"""
        import os, signal, time
        {kind} reward(response):
            os.kill(os.getpid(), signal.SIGINT)
            {"await __import__('asyncio').sleep(30)" if kind == "async def" else "time.sleep(30)"}
    """
    with pytest.raises(KeyboardInterrupt):
        scores(written(code), "a", "b")
