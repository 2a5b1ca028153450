import asyncio
import itertools
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import pytest

from bapo.tasks.task import following
from bapo.tasks.verify.functions import DOES_NOT_APPLY, FunctionReward, IsolatedReward
from bapo.tasks.verify.scorers import names_of, open_scorer
from bapo.types import Problem, ResponseText, Score

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
from bapo.tasks.verify.functions import FunctionReward
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


def side_by_side(*calls):
    """What calls in a thread each return, in the order in which they end."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in as_completed([threads.submit(call) for call in calls])]


def test_callers_share_a_function_and_none_waits_for_the_slow_call_of_another(written):
    code = """
        import asyncio
        running = most = 0
        async def reward(response):
            global running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(float(response))
            running -= 1
            return float(response)
    """
    reward = written(code, concurrency=5)
    asked = [("0.6", "0.01"), *[("0.02",) * 4] * 4]
    found = side_by_side(*[lambda texts=texts: scores(reward, *texts) for texts in asked])
    assert found == [*[[Score(0.02)] * 4] * 4, [Score(0.6), Score(0.01)]]
    assert sys.modules[reward.name.partition(":")[0]].most == 5
    plain = written("import time\ndef reward(response):\n    time.sleep(0.01)\n    return float(response)")
    found = side_by_side(*[lambda n=n: scores(plain, str(n)) for n in range(4)])
    assert sorted(each[0].reward for each in found) == list(range(4))


def test_what_an_async_function_breaks_is_a_failure_for_all_who_wait(written):
    code = """
        import asyncio, sys
        async def part():
            await asyncio.sleep(0.2)
            sys.exit("quota")
        async def reward(response):
            if response == "bad":
                await asyncio.gather(part())
            await asyncio.sleep(0 if response == "good" else 30)
            return 1
    """
    reward = written(code)
    found = side_by_side(*[lambda text=text: scores(reward, "good", text) for text in ("bad", "slow", "slower")])
    assert found == [[Score(1.0), Score(None, "SystemExit: quota")]] * 3
    assert scores(reward, "good") == [Score(1.0)]


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
    with pytest.raises(ValueError, match=r"requires the parameter 'text'.*response, answer, prompt, extra"):
        written("def reward(text): return 1")
    with pytest.raises(ValueError, match=r"importing reward_\w+ failed: SystemExit: 3\..*__main__"):
        written("import sys\nsys.exit(3)")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("grading.py:exact", r"Write the name of a file .* a function: grading:exact\."),
        ("grading", r"grading:score\."),
        ("sub/other.py:exact", r"sub\.other:exact\."),
        ("/far/other.py:exact", r"Start in the directory /far, and write .* other:exact\."),
        (":exact", r"my_rewards:exact\."),
        ("marking:exact", r"no module 'marking' in .* Start from the directory that holds its file"),
    ],
)
def test_the_hint_says_how_to_write_the_name(written, given, hint):
    with pytest.raises(ValueError, match=hint):
        FunctionReward(given)


CHAT = Problem("c", [{"role": "user", "content": "2+2="}], "4", extra={"solution": "#### 4", "level": 3})
TRL = {
    "plain": "{}def reward(completions, **kwargs):\n    return [float('4' in one) for one in completions]",
    "columns": "{}def reward(prompts, completions, answer, level, **kwargs):\n"
    "    assert prompts == ['2+2='] * 2 and kwargs['log_metric']('n', 1) is None\n"
    "    return [hard / 3 * float(gold in one) for one, gold, hard in zip(completions, answer, level)]",
    "ids": "{}def reward(completion_ids):\n    return [float(len(ids) == 3) for ids in completion_ids]",
    "group": "{}def reward(completions):\n"
    "    return [float(len(one) == max(map(len, completions))) for one in completions]",
    "optional": "{}def reward(completions=None, solution=None, **kw):\n"
    "    return [float(gold in one) for one, gold in zip(completions, solution)]",
}


@pytest.mark.parametrize("kind", ["", "async "])
@pytest.mark.parametrize("style", TRL)
def test_a_function_of_trl_gets_lists_of_the_responses_to_one_problem(written, kind, style):
    reward = written(TRL[style].format(kind))
    asked = [(PROBLEM, ResponseText("it is 4", [5, 6, 7])), (PROBLEM, ResponseText("5", [8, 7]))]
    assert reward.scores(asked) == [Score(1.0), Score(0.0)]


@pytest.mark.parametrize("kind", ["", "async "])
def test_a_function_of_trl_gets_messages_where_the_prompt_is_a_chat_and_columns_as_they_are(written, kind):
    code = f"""
        calls = []
        {kind}def reward(prompts, completions, solution, level, **kwargs):
            calls.append((prompts, completions, solution, level))
            return [None if one[0]["content"] == "?" else one[0]["content"] == gold[5:]
                    for one, gold in zip(completions, solution, strict=True)]
    """
    reward = written(code)
    found = reward.scores([(CHAT, "4"), (CHAT, "?"), (PROBLEM, "4"), (CHAT, "5")])
    calls = sys.modules[reward.name.partition(":")[0]].calls
    assert calls[0] == (
        [CHAT.prompt] * 2,
        [[{"role": "assistant", "content": text}] for text in ("4", "?")],
        ["#### 4"] * 2,
        [3] * 2,
    )
    assert found[:2] == [Score(1.0), Score(None, DOES_NOT_APPLY)]
    assert found[2] == Score(None, "TypeError: string indices must be integers, not 'str'")  # text has no messages
    assert found[3] == Score(0.0)


@pytest.mark.parametrize("kind", ["", "async "])
def test_where_a_function_of_trl_fails_on_a_group_only_the_response_that_it_fails_on_is_lost(written, kind):
    reward = written(f"{kind}def reward(completions, **kwargs):\n    return [1 / len(one) for one in completions]")
    expected = [Score(1.0), Score(None, "ZeroDivisionError: division by zero"), Score(0.5)]
    assert scores(reward, "a", "", "bb") == expected
    reward = written(f"{kind}def reward(completions, **kwargs):\n    return [1.0]")
    assert scores(reward, "a", "b") == [Score(1.0)] * 2
    reward = written(f"{kind}def reward(completions, **kwargs):\n    return []")
    assert scores(reward, "a") == [Score(None, "ValueError: the reward function returned 0 rewards for 1 completions")]


def test_what_only_the_trainer_of_trl_has_is_refused_before_the_run(written):
    with pytest.raises(ValueError, match=r"requires the parameter 'trainer_state', which is not available"):
        written("def reward(completions, trainer_state): return [trainer_state.global_step]")
    assert scores(written("def reward(completions, trainer_state=None): return [1]"), "") == [Score(1.0)]


@pytest.mark.parametrize("kind", ["", "async "])
def test_a_function_of_verl_gets_what_verl_gives_it(written, kind):
    code = f"""
        {kind}def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            assert (data_source, ground_truth, extra_info["level"]) == ("gsm8k", ["4", "four"], 3)
            extra_info["num_turns"] = 1
            return {{"score": solution_str in ground_truth, "acc": 0.5, "pred": solution_str}}
    """
    reward = written(code, "compute_score")
    extra = {"level": 3, "data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": ["4", "four"]}}
    problem = Problem("p", "2+2=", "4", extra=extra)
    assert reward.scores([(problem, "four"), (problem, "5")]) == [Score(1.0, answer="four"), Score(0.0, answer="5")]
    assert "num_turns" not in extra
    reward = written(
        f"{kind}def compute_score(solution_str, ground_truth):\n    return solution_str == ground_truth",
        "compute_score",
    )
    assert scores(reward, "4") == [Score(1.0)]


@pytest.mark.parametrize("kind", ["", "async "])
def test_a_function_that_fails_is_called_again_as_often_as_told(written, kind, monkeypatch):
    code = f"""
        calls = 0
        {kind}def reward(response):
            global calls
            calls += 1
            if calls < int(response):
                raise ConnectionError("busy")
            return calls
    """
    waits = []

    async def waited(seconds):
        waits.append(seconds)

    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("asyncio.sleep", waited)
    assert scores(written(code, retries=2), "3") == [Score(3.0)]
    assert scores(written(code, retries=1), "3") == [Score(None, "ConnectionError: busy")]
    assert waits == [1, 2, 1]


PARTS = """
    def right(response, answer):
        if response == "?": raise ValueError("no number")
        return {"reward": response == answer, "answer": response}
    def brief(completions, **kwargs):
        return [None if one == "none" else -len(one) for one in completions]
    async def solution(solution_str):
        return 10.0
"""


def test_several_rewards_are_added_with_their_weights_and_each_is_known_by_name(written):
    module = written(PARTS, "right").name.partition(":")[0]
    names = [f"{module}:{name}" for name in ("right", "brief", "solution")]
    options = {"opens_thinking": False, "seconds": 5.0, "memory_mb": 256}
    verifier = open_scorer(names, weights=[2.0, 0.5, 0.25], **options)
    told = []
    with following(4, lambda how: told.append((how.responses, how.asked))):
        found = verifier.scores([(PROBLEM, text) for text in ("4", "555", "?", "none")])
    assert found[0] == Score(2 - 0.5 + 2.5, answer="4", rewards={"right": 1.0, "brief": -1.0, "solution": 10.0})
    assert found[1] == Score(-1.5 + 2.5, answer="555", rewards={"right": 0.0, "brief": -3.0, "solution": 10.0})
    assert found[2] == Score(None, "right: ValueError: no number")
    assert found[3] == Score(2.5, answer="none", rewards={"right": 0.0, "brief": None, "solution": 10.0})
    assert [how for how in told if how[0] in (0, 4)] == [(0, 4), *[(0, 4), (4, 4)] * 3]
    assert verifier.takes_columns  # of the functions of TRL and verl
    verifier.close()
    alone = open_scorer(names[1:2], **options)
    assert alone.scores([(PROBLEM, "none"), (PROBLEM, "4")]) == [Score(None, DOES_NOT_APPLY), Score(-1.0)]
    assert names_of(["math", "one:math", "one:length", "two.more:length"]) == [
        *("math", "one.math", "one.length", "two.more.length")
    ]


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


# In a process of its own

HARMFUL = """
import asyncio, ctypes, os, re, signal, subprocess, sys, time
kept = []
def act(text):
    what, _, value = text.partition(" ")
    match what:
        case "exit": os._exit(int(value))
        case "leave": sys.exit("no quota")
        case "crash": ctypes.string_at(0)
        case "sleep": time.sleep(float(value))
        case "regex": re.match("(a+)+$", "a" * 64 + "b")
        case "memory": bytearray(2**40)
        case "grow":
            while True: kept.append(bytearray(2**22))
        case "leak": kept.append(bytearray(36 * 2**20))
        case "alarm":
            signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(30)
        case "pid": return os.getpid()
        case "parent": return os.getppid()
        case "child": return subprocess.Popen(["sleep", "60"]).pid
    return 1.0
def plain(response):
    return act(response)
async def waiting(response):
    await asyncio.sleep(0.01)
    return act(response)
def lists(completions, completion_ids, **kwargs):
    return [act(one) * len(ids) for one, ids in zip(completions, completion_ids)]
"""


@pytest.fixture(scope="module")
def isolated(tmp_path_factory):
    """One process for each of the functions above, with 3 s and 64 MB for a response."""
    place, made = tmp_path_factory.mktemp("isolated"), dict[str, IsolatedReward]()
    (place / "harmful.py").write_text(HARMFUL)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.chdir(place)

        def open_one(function):
            if function not in made:
                made[function] = opened.enter_context(IsolatedReward(f"harmful:{function}", seconds=3, memory_mb=64))
            return made[function]

        yield open_one


@pytest.mark.parametrize("function", ["plain", "waiting"])
def test_a_function_that_harms_its_process_loses_no_other_response(isolated, function):
    harm = {
        "exit 3": "crash: exit status 3",
        "regex": "timeout after 3 s" if function == "plain" else "timeout after 5 s",  # in C, where no handler runs
    }
    if function == "plain":
        harm |= {"exit 0": "crash: exit status 0", "crash": "crash: signal 11", "leave": "SystemExit: no quota"}
        harm |= dict.fromkeys(("memory", "grow"), "memory limit of 64 MB")
        harm["alarm"] = "ZeroDivisionError: division by zero"  # alarms are its own
    asked = [text for one in harm for text in (one, "good")]
    found = isolated(function).scores([(PROBLEM, text) for text in asked])
    assert found == [Score(1.0) if text == "good" else Score(None, harm[text]) for text in asked]


def test_callers_share_an_isolated_process_and_lose_only_what_is_their_own(isolated):
    reward = isolated("waiting")
    calls = [("good", "exit 3", "good"), ("good", "pid"), ("child", "good", "exit 4")]
    found = side_by_side(*[lambda texts=texts: (texts, scores(reward, *texts)) for texts in calls])
    for texts, scored in found:
        for text, score in zip(texts, scored, strict=True):
            assert score.failure == (f"crash: exit status {text[-1]}" if "exit" in text else "")
            assert (score.reward is None) == ("exit" in text)
    (pids,) = ({one[0].reward for one in side_by_side(*[lambda: scores(reward, "pid")] * 3)},)
    assert len(pids) == 1


def test_nobody_waits_for_the_slow_call_of_another_in_an_isolated_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(
        "import asyncio\nasync def reward(response):\n    await asyncio.sleep(float(response))\n    return 1.0"
    )
    with IsolatedReward("late:reward", seconds=20) as reward:
        ended = side_by_side(*[lambda text=text: (text, scores(reward, text)) for text in ("2", "0.01", "0.02")])
    assert ended[-1][0] == "2"
    assert all(scored == [Score(1.0)] for _, scored in ended)


def test_a_function_of_lists_loses_only_the_response_that_kills_its_process(isolated):
    asked = [(PROBLEM, ResponseText(text, [1] * n)) for n, text in enumerate(("good", "exit 1", "good", "leave"), 1)]
    asked += [(CHAT, ResponseText("good", [1]))]
    found = isolated("lists").scores(asked)
    assert [score.reward for score in found] == [1.0, None, 3.0, None, None]
    assert [score.failure for score in found[1:4:2]] == ["crash: exit status 1", "SystemExit: no quota"]
    assert found[4].failure.startswith("AttributeError: 'list' object has no attribute 'partition'")


def test_one_process_lives_long_never_forks_and_is_replaced_before_a_leak_costs_a_response(isolated):
    reward = isolated("plain")
    first, parent, *_ = (score.reward for score in scores(reward, "pid", "parent", "good"))
    assert parent == os.getpid()  # nothing is between us
    assert scores(reward, "pid") == [Score(first)]
    found = [score.reward for score in scores(reward, "leak", "pid", "leak", "pid", "leak", "pid")]
    assert found[::2] == [1.0] * 3
    assert len({first, *found[1::2]}) == 4  # 36 MiB are past half of the limit


def test_what_a_function_starts_ends_with_its_process(isolated):
    reward = isolated("plain")
    started, _ = scores(reward, "child", "exit 1")
    assert gone(int(started.reward))


@pytest.mark.parametrize("code", ["plain", "waiting"])
def test_an_isolated_function_ends_when_its_owner_is_killed_even_in_a_c_loop(tmp_path, code):
    (tmp_path / "harmful.py").write_text(HARMFUL)
    body = f"""
        from bapo.tasks.verify.functions import IsolatedReward
        from bapo.types import Problem
        reward = IsolatedReward("harmful:{code}", seconds=60)
        print(int(reward.scores([(Problem("p", "", ""), "pid")])[0].reward), flush=True)
        reward.scores([(Problem("p", "", ""), "regex")])
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(body)], cwd=tmp_path, stdout=subprocess.PIPE) as owner:
        worker = int(owner.stdout.readline())
        assert not gone(worker, 0.3)
        owner.kill()
        assert gone(worker)


def gone(pid, seconds=8.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_stop_does_not_wait_for_an_isolated_function(tmp_path):
    """In a process of its own, because signals belong to the process."""
    (tmp_path / "harmful.py").write_text(HARMFUL)
    body = """
        import os, signal
        from bapo.process import stops
        from bapo.tasks.task import following
        from bapo.tasks.verify.functions import IsolatedReward
        from bapo.types import Problem, Score
        reward, heard, problem = IsolatedReward("harmful:plain", seconds=30), [], Problem("p", "", "")
        before = reward.scores([(problem, "pid")])
        stop = lambda how: how.responses == 1 and os.kill(os.getpid(), signal.SIGTERM)
        with stops.listening(heard.append), following(99, stop):
            try:
                reward.scores([(problem, "sleep 0.3")] * 99)
            except stops.StopAsked:
                heard.append("left")
        assert heard == [signal.SIGTERM, "left"], heard
        assert reward.scores([(problem, "pid")]) != before  # another process
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(body)], cwd=tmp_path, check=True, timeout=60)


def test_what_cannot_be_isolated_is_told_in_the_same_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lost.py").write_text("def score(completions, trainer_state): ...\ndef wrong(text): ...")
    (tmp_path / "deadly.py").write_text("import os\nos._exit(5)")
    for name in ("nowhere:score", "lost:wrong", "lost:score", "lost:scor"):
        with pytest.raises(ValueError, match="reward function") as here:
            FunctionReward(name)
        with pytest.raises(ValueError, match="reward function") as there:
            IsolatedReward(name)
        assert str(there.value) == str(here.value)
    with pytest.raises(ValueError, match=r"deadly:score died 3 times while it started \(.*exit status 5"):
        IsolatedReward("deadly:score")
