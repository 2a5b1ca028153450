"""The judge: a client that talks to a real server on this machine."""

import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bapo.cli import run
from bapo.config.recipe import check
from bapo.config.run import Config
from bapo.tasks import judge as module
from bapo.tasks.judge import Judge
from bapo.types import Problem
from tests.judge_server import JudgeServer
from tests.processes import free_port, started

SERVER = Path(__file__).parents[2] / "judge_server.py"
PROBLEM = Problem("p", "Say hello.", "hello")
KEY = "sk-0123456789abcdef"


@pytest.fixture
def server():
    with JudgeServer() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def opened():
    """Makes judges, and closes them."""
    made = []

    def open_judge(url, **settings):
        made.append(Judge(**{"url": url, "model": "m", "rubric": "Be kind.", "retries": 2} | settings))
        return made[-1]

    yield open_judge
    for one in made:
        one.close()


@pytest.fixture
def soon(monkeypatch):
    """A server is asked again at once."""
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)


def scored(judge, *texts):
    return judge.scores([(PROBLEM, text) for text in texts])


def test_a_reward_is_the_share_of_the_best_score_and_costs_are_counted(server, opened):
    judge = opened(server.url, best=20.0)
    first, second, same = scored(judge, "abc", "<say=**Score:** 5, no:\nscore = 7.5>", "abc")
    assert (first.reward, second.reward, same) == (3 / 20, 7.5 / 20, first)
    assert first.written == 5
    assert len(server.heard) == 2  # equal responses are judged once
    path, key, model, system, user = server.heard[0]
    assert (path, key, model) == ("/v1/chat/completions", None, "m")
    assert system == "Be kind.\n\nEnd your reply with a line of the form\nScore: N\nwhere N is a number from 0 to 20."
    assert user.startswith("Problem:\nSay hello.\n\nReference answer:\nhello\n\nResponse:\n")
    taken = judge.take()
    assert taken["judge_requests"] == 2
    assert 0 < taken["judge_seconds"] <= taken["judge_slowest"]
    assert judge.take() == {"judge_requests": 0}


def test_what_is_no_score_is_a_failure_and_never_a_reward_of_0(server, opened, soon):
    texts = {
        "<say=Very good.>": "the judge's reply has no line with a score",
        "<say=Score: 11>": "the judge's score is not from 0 to 10",
        "<say=Score: -3>": "the judge's score is not from 0 to 10",
        "<status=401>": "the judge answered with status 401",
        "<status=500>": "the judge answered with status 500, 3 times",
        "<moved>": "the judge answered with status 307",
        "<huge>": "the judge cannot be reached: ValueError, 3 times",
    }
    scores = scored(opened(server.url), *texts)
    assert [score.reward for score in scores] == [None] * len(texts)
    assert [score.failure for score in scores] == list(texts.values())


@pytest.mark.parametrize("text", ["<busy>", "<torn>"])
def test_a_server_that_is_busy_or_breaks_off_is_asked_again(server, opened, soon, text):
    (score,) = scored(opened(server.url), text)
    assert score.reward == len(text) % 11 / 10


@pytest.mark.parametrize("text", ["<wait=9>", "<trickle>"])
def test_a_request_has_a_time_limit_whatever_the_server_sends(server, opened, text):
    began = time.monotonic()
    (score,) = scored(opened(server.url, seconds=0.3, retries=0), text)
    assert score.reward is None
    assert time.monotonic() - began < 5


def test_no_message_repeats_a_key_and_it_goes_nowhere_unencrypted(server, opened, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (score,) = scored(opened(server.url, key_variable="JUDGE_KEY", retries=0), "<status=403>")  # it says the key back
    assert server.heard[0][1] == f"Bearer {KEY}"
    assert KEY not in score.failure
    with pytest.raises(ValueError, match="unencrypted") as refused:
        opened("http://example.org/v1", key_variable="JUDGE_KEY")
    assert KEY not in str(refused.value)
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n{KEY}")
    with pytest.raises(ValueError, match="holds no key") as refused:
        opened(server.url, key_variable="JUDGE_KEY")
    assert KEY not in str(refused.value)


def test_scores_that_were_recorded_are_not_asked_for_again(server, opened):
    lines = []
    scores = scored(opened(server.url), "a", "bb", "<say=none>")
    again = opened(server.url)
    first = opened(server.url)
    first.remember([], lines.extend)
    assert scored(first, "a", "bb", "<say=none>") == scores
    again.remember([*lines, {"content": 1}, {}], lines.extend)
    asked = len(server.heard)
    assert scored(again, "bb", "a", "<say=none>", "ccc")[:2] == scores[1::-1]
    assert len(server.heard) == asked + 2  # the failure, and what is new
    assert sorted(line["reward"] for line in lines) == [0.1, 0.2, 0.3]
    other = opened(server.url, rubric="Be strict.")
    other.remember(lines, lines.extend)
    assert other.identity != again.identity
    scored(other, "a")
    assert len(server.heard) == asked + 3


def served(port, log):
    return subprocess.Popen([sys.executable, str(SERVER), str(port), str(log), "noisy"])


def test_a_server_that_is_killed_and_started_again_costs_nothing(tmp_path, opened):
    port, log, lines = free_port(), tmp_path / "log", []
    servers = [served(port, log)]
    judge = opened(f"http://127.0.0.1:{port}/v1", retries=100)  # however slowly it starts
    judge.remember([], lines.extend)

    def kill_and_start():
        while not log.exists() or len(log.read_text().splitlines()) < 300:
            time.sleep(0.02)
        servers[0].kill()
        servers[0].wait()
        servers.append(served(port, log))

    watcher = threading.Thread(target=kill_and_start)
    watcher.start()
    try:
        scores = scored(judge, *(f"response {number}" for number in range(1000)))
    finally:
        watcher.join()
        for one in servers:
            one.kill()
            one.wait()
    assert [score.failure for score in scores if score.reward is None] == []
    recorded = {line["content"]: line["reward"] for line in lines}
    assert len(lines) == len(recorded) == 1000
    assert sorted(recorded.values()) == sorted(score.reward for score in scores)
    given = {tuple(line.split()) for line in log.read_text().splitlines()}
    assert {(content, str(round(10 * reward))) for content, reward in recorded.items()} <= given


DATA = {"name": "data", "train": ["train.jsonl"], "test": ["test.jsonl"], "reward": "judge"}


def task(server, **settings):
    return DATA | {"judge": {"url": server.url, "model": "m", "rubric": "rubric.txt", "retries": 1} | settings}


def test_a_run_that_is_killed_asks_nothing_twice_and_is_the_run_that_was_not(here, server):
    server.noisy = True
    (here / "rubric.txt").write_text("Be kind.")
    recipe = {"steps": 3, "checkpoint_every": 1, "threads": 1, "task": task(server), "eval": {"problems": 2, "k": 2}}
    recipe |= {"rollout": {"prompts": 4, "responses": 4, "max_tokens": 24}, "learn": {"batch_groups": 4}}
    (here / "a.json").write_text(json.dumps(recipe))
    running = started("train", "a.json", "--out", "killed", log="said", cwd=here)
    while not (here / "killed/checkpoints/step-000001").exists():
        assert running.is_alive()
        time.sleep(0.02)
    wanted = len(Path("killed/judged.jsonl").read_text().splitlines()) + 3
    while len(Path("killed/judged.jsonl").read_text().splitlines()) < wanted:
        assert running.is_alive()
        time.sleep(0.005)
    running.kill()
    running.join()
    assert run(["resume", "killed"]) == 0
    lines = [json.loads(line)["content"] for line in Path("killed/judged.jsonl").read_text().splitlines()]
    assert len(lines) == len(set(lines))
    asked = len(server.heard)
    Path("whole").mkdir()
    shutil.copy("killed/judged.jsonl", "whole")
    assert run(["train", "a.json", "--out", "whole"]) == 0
    assert len(server.heard) == asked
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert Path("whole", name).read_bytes() == Path("killed", name).read_bytes(), name
    rollouts = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines() if "reward" in line]
    sampled = [line for line in rollouts if line["kind"] == "rollout"]
    assert [line["judge_written"] for line in sampled] == [5 * 4 * line["rollout/finished_groups"] for line in sampled]
    timing = [json.loads(line)["judge_requests"] for line in Path("killed/timing.jsonl").read_text().splitlines()]
    assert timing[0] > 0


def test_no_file_of_a_run_and_no_line_on_the_screen_holds_the_key(here, server, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (here / "rubric.txt").write_text("Be kind.")
    recipe = {"steps": 1, "out": "run", "threads": 1, "task": task(server, key_variable="JUDGE_KEY")}
    recipe |= {"rollout": {"prompts": 2, "responses": 2, "max_tokens": 8}, "learn": {"batch_groups": 2}}
    (here / "a.json").write_text(json.dumps(recipe | {"eval": {"problems": 2, "k": 1}}))
    assert run(["train", "a.json", "--dry-run"]) == 0
    assert run(["train", "a.json"]) == 0
    (here / "rubric.txt").write_text("Be strict.")
    assert run(["resume", "run", "--steps", "2"]) == 3
    (here / "rubric.txt").write_text("Be kind.")
    assert run(["resume", "run", "--steps", "2"]) == 0
    assert run(["report", "run", "--out", "report.html"]) == 0
    server.shutdown()
    server.server_close()
    assert run(["train", "a.json", "--out", "failed", "--steps", "1"]) == 1
    monkeypatch.delenv("JUDGE_KEY")
    assert run(["train", "a.json", "--out", "none"]) == 2
    said = capfd.readouterr()
    assert "the run sends prompts and responses and the key in JUDGE_KEY to http://127.0.0.1" in said.out + said.err
    assert "says something else now" in said.err
    assert "which holds no key" in said.err
    assert {heard[1] for heard in server.heard} == {f"Bearer {KEY}"}
    held = [path for path in here.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert (held, KEY in said.out + said.err) == ([], False)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"url": "http://me:secret@here/v1"}, "holds a password"),
        ({"url": "https://here/v1?key=secret"}, "holds a password, a query"),
        ({"url": "file:///secret"}, "is no http or https address"),
        ({"url": "http://here:secret/v1"}, "is no http or https address"),
        ({"key_variable": "sk-secret"}, "is no name of an environment variable"),
        ({"url": ""}, "needs task.judge.url"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_secrets_in_them_are_not_repeated(settings, told):
    judge = {"url": "http://here/v1", "model": "m", "rubric": "r"} | settings
    _, wrong = check(Config, {"task": DATA | {"judge": judge}})
    assert told in " ".join(wrong)
    assert "secret" not in " ".join(wrong)


def test_a_judge_that_nobody_asks_is_refused():
    _, wrong = check(Config, {"task": DATA | {"reward": "math", "judge": {"model": "m"}}})
    assert "task.judge.model is for task.reward='judge'" in wrong[0]


def test_callers_share_the_requests_and_none_waits_for_a_slow_one_of_another(server, opened):
    lines, judge = [], opened(server.url)
    judge.remember([], lines.extend)
    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(scored, judge, "<wait=1.5>", "both")
        quick = [threads.submit(scored, judge, "a", "both") for _ in range(2)]
        expected = quick[0].result()
        assert [quick[1].result(), slow.done()] == [expected, False]
        assert slow.result()[1] == expected[1]
    assert len(lines) == len(server.heard) == 3, "what two callers ask is asked once"
