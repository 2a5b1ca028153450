import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bapo.process.limited import call_once
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import Score

HOSTILE = "tests.hostile_verifiers:verify"


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(HOSTILE, workers=2, seconds=1, memory_mb=512) as pool:
        yield pool


def one(pool, response, answer="a"):
    return pool.scores([(answer, response)])[0]


def processes():
    """Every process of this machine that is a worker of ours, as (pid, state)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found.append((int(entry.name), state[0], int(state[1]), b"bapo.process.limited_worker" in command))
    return found


def children():
    """Direct children of this process: zombies, and workers."""
    return [
        (pid, state) for pid, state, parent, worker in processes() if parent == os.getpid() and (worker or state == "Z")
    ]


def gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_scores_come_in_the_order_of_the_responses(pool):
    responses = [("x", "sleep 0.2"), *(("a", f"t{i % 7}" if i % 3 else "a") for i in range(200))]
    scores = pool.scores(responses)
    assert [score.answer for score in scores] == [text for _, text in responses]
    assert [score.reward for score in scores[1:]] == [float(text == "a") for _, text in responses[1:]]
    assert pool.scores([]) == []


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        ("spin", "timeout after 1 s"),
        ("power", "timeout after 1 s"),
        ("memory", "memory limit of 512 MB"),
        ("kill SIGKILL", "crash: signal 9"),
        ("kill SIGSEGV", "crash: signal 11"),
        ("exit 3", "crash: exit status 3"),
        ("leave 3", "SystemExit: 3"),
        ("raise oh no", "ValueError: oh no"),
    ],
)
def test_a_hostile_answer_fails_with_its_cause_and_the_next_one_is_scored(pool, response, failure):
    assert pool.scores([("a", response), ("a", "a")]) == [Score(None, failure), Score(1.0, answer="a")]


def test_a_verifier_that_ignores_every_polite_signal_is_killed():
    with VerifierPool(HOSTILE, workers=1, seconds=0.2) as pool:
        started = time.monotonic()
        assert one(pool, "deaf").failure == "timeout after 0.2 s"
        assert time.monotonic() - started < 10
        assert one(pool, "a").reward == 1.0


def test_what_is_no_score_is_a_failure(pool):
    assert "NaN" in one(pool, "nan").failure
    assert "1e+39" in one(pool, "huge").failure
    assert "must be a Score" in one(pool, "number").failure
    assert "cannot leave the sandbox" in one(pool, "object").failure


def test_any_text_arrives_as_it_is(pool):
    for text in ["", "\x00", "\ud800", "\u202eabc", "ü" * 100, "\\" * 99, json.dumps("{}")]:
        assert one(pool, f"whoami {text}").answer == f"whoami {text}"
    assert one(pool, "x" * 5_000_000).reward == 0.0


def test_callers_in_several_threads_get_their_own_scores(pool):
    texts = [[f"{caller}.{i}" for i in range(200)] for caller in range(4)]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda asked: pool.scores([("a", text) for text in asked]), texts))
    assert [[score.answer for score in scores] for scores in found] == texts


def test_a_verifier_may_print(pool, capfd):
    assert one(pool, "print").reward == 0.0
    assert capfd.readouterr() == ("", "")


def test_a_worker_lives_long_and_imports_no_torch():
    with VerifierPool(HOSTILE, workers=1) as pool:
        assert one(pool, "torch").reward == 0.0
        first = one(pool, "pid").reward
        pool.scores([("a", f"t{i}") for i in range(2000)])
        assert one(pool, "pid").reward == first
        assert one(pool, "calls").reward == 2004.0


def test_equal_pairs_are_verified_once():
    with VerifierPool(HOSTILE, workers=1) as pool:
        assert pool.scores([("a", "b")] * 50 + [("a", "c")]) == [Score(0.0, answer="b")] * 50 + [Score(0.0, answer="c")]
        assert one(pool, "calls").reward == 3.0


def test_what_one_answer_leaves_in_memory_is_not_charged_to_the_next():
    with VerifierPool(HOSTILE, workers=1, memory_mb=512) as pool:
        rewards = [score.reward for score in pool.scores([("a", f"leak {i}") for i in range(8)])]
    assert rewards == [
        1.0,
        2.0,
        3.0,
        1.0,
        2.0,
        3.0,
        1.0,
        2.0,
    ]  # 120 MB each: past half the limit a fresh process follows


def test_many_hostile_answers_cost_little_more_than_their_time_limits():
    with VerifierPool(HOSTILE, workers=2, seconds=0.2) as pool:
        started = time.monotonic()
        scores = pool.scores(
            [("a", f"spin {i}") for i in range(20)] + [("a", f"kill SIGSEGV{' ' * i}") for i in range(20)]
        )
        assert time.monotonic() - started < 10  # 20 x 0.2 s over two workers is 2 s
    assert all(score.reward is None for score in scores)


def test_callers_share_the_workers_and_none_waits_for_a_slow_answer_of_another():
    with VerifierPool(HOSTILE, workers=2, seconds=3) as pool, ThreadPoolExecutor(3) as threads:
        one(pool, "a")
        slow = threads.submit(pool.scores, [("a", "spin")])
        quick = [threads.submit(pool.scores, [("a", "a"), ("a", "b")]) for _ in range(2)]
        assert [[score.reward for score in each.result()] for each in quick] == [[1.0, 0.0]] * 2
        assert not slow.done()
        assert slow.result() == [Score(None, "timeout after 3 s")]


def test_nothing_is_left_behind_by_close():
    before = children()
    pool = VerifierPool(HOSTILE, workers=3, seconds=1)
    pool.scores([("a", f"kill SIGKILL{' ' * i}") for i in range(5)] + [("a", "spin")])
    assert len(children()) == len(before) + 3
    pool.close()
    pool.close()
    assert children() == before
    with pytest.raises(ValueError, match="was closed"):
        pool.scores([("a", "a")])


def test_a_forgotten_pool_ends_its_workers():
    before = children()
    pool = VerifierPool(HOSTILE, workers=1)
    one(pool, "a")
    del pool
    gc.collect()
    assert children() == before


def owner(body):
    """A program that owns a pool, started as a process; its first line of output tells the worker's pid."""
    code = f"""
        from bapo.tasks.verify.sandbox import VerifierPool
        pool = VerifierPool({HOSTILE!r}, workers=1, seconds=3)
        print(int(pool.scores([("a", "pid")])[0].reward), flush=True)
        {body}
    """
    root = Path(__file__).parents[4]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        start_new_session=True,
    )


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_workers_end_when_their_owner_is_killed(busy):
    body = 'pool.scores([("a", "spin")])' if busy else "import time; time.sleep(60)"
    with owner(body) as process:
        worker = int(process.stdout.readline())
        assert not gone(worker, 0.2)
        process.kill()
        assert gone(worker, 8.0)  # a busy one at its own time limit


def test_workers_end_with_a_process_that_forgets_them():
    with owner("pass") as process:
        worker = int(process.stdout.readline())
        assert process.wait(10) == 0
        assert gone(worker)


def test_ctrl_c_reaches_the_owner_at_once_and_not_the_workers():
    body = """
        import signal, threading, os, time
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        try:
            pool.scores([("a", "spin"), ("a", "spin again")])
        except KeyboardInterrupt:
            print(time.monotonic() - started, pool.scores([("a", "a")])[0].reward, flush=True)
    """
    with owner(textwrap.dedent(body).strip().replace("\n", "\n        ")) as process:
        worker = int(process.stdout.readline())
        seconds, reward = process.stdout.readline().split()
        assert float(seconds) < 2.5
        assert reward == "1.0"
        assert gone(worker)
    with VerifierPool(HOSTILE, workers=1) as pool:
        worker = int(one(pool, "pid").reward)
        os.kill(worker, signal.SIGINT)
        assert one(pool, "pid").reward == worker


def test_a_verifier_that_cannot_be_had_is_named_at_once():
    with pytest.raises(ValueError, match=r"tests\.nothing:verify cannot be used: ModuleNotFoundError"):
        VerifierPool("tests.nothing:verify", workers=1)
    with pytest.raises(ValueError, match="has no attribute 'verifi'"):
        VerifierPool("tests.hostile_verifiers:verifi", workers=1)


def test_a_single_call_in_a_process_of_its_own():
    assert call_once("math:gcd", 12, 18, seconds=5) == 6
    with pytest.raises(ValueError, match=r"math:gcd: TypeError"):
        call_once("math:gcd", "x", seconds=5)


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """Makes a verifier whose first imports, as many as told, end their process."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def make(deaths):
        (tmp_path / "deaths").write_text("." * deaths)
        code = f"""
            import os, pathlib, signal
            left = pathlib.Path({str(tmp_path / "deaths")!r})
            if left.read_text():
                left.write_text(left.read_text()[1:])
                os.kill(os.getpid(), signal.SIGKILL)
            def verify(answer, response):
                if response == "end":
                    os.killpg(os.getpgrp(), signal.SIGKILL)  # keeper and child
                return {{"reward": 1.0}}
        """
        (tmp_path / "dying_verifier.py").write_text(textwrap.dedent(code))
        return "dying_verifier:verify"

    return make


def test_a_worker_that_dies_while_it_starts_is_started_again(dying):
    with VerifierPool(dying(2), workers=1) as pool:
        assert one(pool, "a") == Score(1.0)
    assert call_once(dying(2), 1, 2, seconds=5) == {"reward": 1.0}


def test_a_worker_that_always_dies_while_it_starts_is_told_in_words(dying):
    with pytest.raises(ValueError, match=r"died 3 times while it started \(.*exit status -9\).*fewer workers"):
        VerifierPool(dying(99), workers=1)


def test_a_worker_that_cannot_be_started_again_leaves_failures_not_the_end_of_the_run(dying, tmp_path):
    with VerifierPool(dying(0), workers=1) as pool:
        (tmp_path / "deaths").write_text("." * 99)
        scores = pool.scores([("a", "end"), ("a", "b"), ("a", "c")])
        assert scores[0] == Score(None, "crash: signal 9")
        assert all("died 3 times while it started" in score.failure for score in scores[1:])
        (tmp_path / "deaths").write_text("")
        assert one(pool, "a") == Score(1.0)
