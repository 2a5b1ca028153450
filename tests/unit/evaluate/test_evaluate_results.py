"""Figures, page, progress and directory of an evaluation, from rows written by hand."""

import io
import json
import re
from html.parser import HTMLParser
from math import nan

import pytest
from rich.console import Console

from bapo.config.errors import ConfigError, DamagedError
from bapo.evaluate import avg_at_k, maj_at_k, pass_at_k
from bapo.evaluate.directory import opened
from bapo.evaluate.estimates import figures, powers_up_to, problem_figures, results
from bapo.evaluate.options import Settings
from bapo.evaluate.progress import EvaluationView, failure_note, results_table
from bapo.evaluate.results_page import page
from bapo.rollout.engine import Sampled

IDENTITY = {"model": "m", "k": 4, "temperature": 0.6, "max_tokens": 9, "seed": 0, "versions": {"bapo": "0"}}


def response(reward, *, tokens=5, answer=None, status="stopped", text="so", failure="", entropy=0.5):
    return {
        "text": text,
        "tokens": tokens,
        "status": status,
        "reward": reward,
        "failure": failure,
        "answer": answer,
        "entropy": entropy,
    }


def row(id, *responses, data="d", prompt="1+1?", reference="2"):
    return {
        "data": data,
        "id": id,
        "source": data,
        "prompt": prompt,
        "reference": reference,
        "responses": list(responses),
    }


EASY = row(
    "easy",
    response(1.0, answer="2"),
    response(1.0, answer="2", tokens=7),
    response(0.0, answer="3", tokens=9, status="truncated"),
    response(None, failure="timeout after 5 s", entropy=None, tokens=100),
)
HARD = row(
    "hard",
    response(0.0),
    response(1.0, answer="4", tokens=3, entropy=1.0),
    response(0.0, answer="5"),
    response(None, failure="timeout after 5 s"),
)


def test_figures_by_hand():
    found = figures([EASY, HARD])
    rewards = [[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert (found["problems"], found["responses"]) == (2, 8)
    assert found["avg"] == vars(avg_at_k(rewards))
    assert {int(j): e["value"] for j, e in found["pass"].items()} == {j: pass_at_k(rewards, j).value for j in (1, 2, 4)}
    # 2 wins two to one in the first; 4 and 5 tie in the second
    assert found["maj"]["value"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["maj"] == vars(maj_at_k(rewards, [["2", "2", "3", None], [None, "4", "5", None]]))
    assert found["truncated"]["value"] == 1 / 8
    assert found["length"] == pytest.approx((5 + 7 + 9 + 100 + 5 + 3 + 5 + 5) / 8)
    assert found["length_correct"] == pytest.approx((5 + 7 + 3) / 3)
    assert found["length_wrong"] == pytest.approx((9 + 100 + 5 + 5 + 5) / 5)
    assert found["entropy"] == pytest.approx((0.5 * (5 + 7 + 9 + 5 + 5 + 5) + 1.0 * 3) / 39)  # over tokens
    assert found["failures"] == 2
    assert found["failure_causes"] == {"timeout after 5 s": 2}
    assert found["answered"] == 5 / 8


def test_the_line_of_a_problem_by_hand():
    line = problem_figures(EASY)
    assert (line["avg"], line["solved"], line["verdicts"], line["maj"]) == (0.5, 2, "■■□×", 1.0)
    assert (line["most_frequent"], line["truncated"], line["failures"]) == ("2", 1, 1)
    silent = problem_figures(row("s", response(0.0), response(1.0)))
    assert (silent["maj"], silent["most_frequent"]) == (None, None)


def test_without_answers_there_is_no_majority():
    rows = [row("a", response(1.0), response(0.0)), row("b", response(0.0), response(0.0), data="e")]
    assert figures(rows)["maj"] is None
    found = results([*rows, row("c", response(1.0, answer="x"), response(0.0), data="e")], IDENTITY)
    assert found["data_sets"]["d"]["maj"] is None
    assert found["data_sets"]["e"]["maj"]["value"] == 0.5  # b has no votes and counts 0, c is right
    assert found["mean_over_data_sets"]["maj"] is None
    assert found["overall"]["maj"] is None  # d could not vote, which is no wrong vote
    assert "maj@k is missing where the verifier does not extract the answers" in page(rows, found)


def test_data_sets_and_problems_are_averaged_apart():
    rows = [row(str(i), response(1.0)) for i in range(3)] + [row("x", response(0.0), data="e")]
    found = results(rows, IDENTITY)
    assert found["overall"]["avg"]["value"] == pytest.approx(3 / 4)
    assert found["mean_over_data_sets"]["avg"] == pytest.approx(1 / 2)
    assert list(found["data_sets"]) == ["d", "e"]
    json.dumps(found, allow_nan=False)


def test_powers():
    assert [powers_up_to(k) for k in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_the_table_of_the_terminal():
    rows = [EASY, HARD, row("x", response(0.0), response(0.0), response(0.0), response(1.0), data="other")]
    lines = results_table(results(rows, IDENTITY)).splitlines()
    assert [line.split()[0] for line in lines] == ["problems", "d", "other", "overall"]
    assert "avg@4" in lines[0]
    assert "0.375 [" in lines[1]
    assert "–" in lines[2]  # no answers to vote with
    assert len({len(line) for line in lines}) == 1


def test_what_the_verifier_failed_on_most_is_said():
    other = row("x", *[response(None, failure="no\nmodule 'x'")] * 3, response(1.0), data="other")
    note = failure_note(results([EASY, HARD, other], IDENTITY))
    assert (
        note
        == "the verifier failed on 5 of 12 responses, which count 0; the most frequent cause (3 times): no module 'x'"
    )
    assert failure_note(results([row("x", response(1.0))], IDENTITY)) == ""


# The page


class Tags(HTMLParser):
    """The tags of a page, and what is in its scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes


def test_nothing_a_model_or_a_data_set_says_becomes_markup():
    evil = "</pre></script><script>alert(1)</script><img src=x onerror='alert(1)'>\"&\0\ud800\u202e"
    hostile = response(0.0, text=evil, answer=evil, failure=evil)
    failed = response(None, text=evil, failure=evil)
    rows = [row(evil, hostile, failed, data=evil, prompt=evil, reference={evil: evil})]
    document = page(rows, results(rows, {**IDENTITY, "model": evil}))
    assert "alert(1)" in document
    tags, harmless = Tags(), Tags()
    tags.feed(document.encode("utf-8").decode("utf-8"))  # a lone surrogate would not survive
    harmless.feed(page([EASY], results([EASY], IDENTITY)))
    assert tags.tags.count("script") == harmless.tags.count("script")
    assert "img" not in tags.tags
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "\0" not in document


def test_the_page_lists_the_hardest_first_and_every_response():
    rows = [EASY, HARD]
    document = page(rows, results(rows, IDENTITY))
    assert document.index("<code>hard</code>") < document.index("<code>easy</code>")
    assert document.count('class="response"') == 8
    assert "2 × timeout after 5 s" in document
    assert "<td>0.375 [" in document
    assert "responses.jsonl" not in document


def test_a_page_of_many_long_responses_stays_small():
    def long(reward):
        return response(reward, text="a" * 5000 + "halfway" + "z" * 5000)

    rows = [row(str(i), *[long(0.0)] * 6, *[long(1.0)] * 2) for i in range(20)]
    found = results(rows, IDENTITY)
    assert page(rows, found).count("halfway") == 160
    two_each = page(rows, found, budget=500_000)
    assert two_each.count("halfway") == 40
    assert "responses.jsonl has all of them" in two_each
    cut = page(rows, found, budget=100_000)
    assert cut.count("[… ") == 40
    assert max(map(len, re.findall("a+", cut))) == 100_000 // 40 // 2
    assert len(cut) < 200_000


# Progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_plain_progress_counts_only_what_it_did_itself():
    now = [100.0]
    stream = io.StringIO()
    settings = Settings("m", ("d",), k=4)
    with EvaluationView(settings, "out", 10, [EASY] * 2, stream, clock=lambda: now[0]) as progress:
        with progress.sampling("d"):
            assert progress.remaining == ""
        now[0] += 30
        progress.saved([HARD] * 2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "m: 10 problems, 4 responses each, temperature 0.6, in out"
    assert lines[1] == "2 of 10 problems were already done"
    assert lines[2] == "4/10 problems  d avg@4 0.375  eta 1:30"  # 6 left at 15 s each


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    settings = Settings("m", ("d",), k=4)
    with EvaluationView(settings, "out", 2, [], stream) as progress:
        with progress.sampling("d"):
            progress.saved([EASY])
        progress.saved([HARD])
    assert "2/2 problems" in stream.getvalue()
    assert "avg@4 0.375" in stream.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    assert EvaluationView(settings, "out", 2, [], stream).live is None


def test_progress_within_a_chunk_in_lines():
    now = [0.0]
    stream = io.StringIO()
    with EvaluationView(Settings("m", ("d",), k=4), "out", 2, [], stream, clock=lambda: now[0]) as progress:
        for seconds in (20, 50):
            with progress.sampling("d") as watch:
                now[0] += seconds
                watch(Sampled(3, 8, 1_000))
    assert stream.getvalue().splitlines()[1:] == ["sampling: 3/8 responses, 1,000 tokens, 20 tokens/s"]


def test_progress_within_a_chunk_below_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    stream = Terminal()

    def shown():
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as capture:
            console.print(progress.frame())
        return capture.get().splitlines()

    settings = Settings("m", ("d",), k=4)
    with EvaluationView(settings, "out", 2, [], stream, clock=lambda: now[0]) as progress:
        assert [line.strip() for line in shown()[1:]] == [""]
        with progress.sampling("d") as watch:
            watch(Sampled(0, 8, 0))
            assert [line.strip() for line in shown()[1:]] == [""]
            now[0] += 10
            watch(Sampled(3, 8, 1_000))
            assert [line.strip() for line in shown()[1:]] == ["sampling: 3/8 responses, 1,000 tokens, 100 tokens/s"]
        assert [line.strip() for line in shown()[1:]] == [""]
        progress.saved([EASY] * 2)
        assert len(shown()) == 1  # no empty line is left behind


# The directory


CHUNKS = [("d", ["a", "b"]), ("d", ["c"]), ("e", ["a", "b"])]
ROWS = [row(id, response(1.0), data=data) for id, data in zip("abcab", "dddee", strict=True)]


@pytest.mark.parametrize(("kept", "complete"), [(0, 0), (1, 0), (2, 2), (3, 3), (4, 3), (5, 5)])
@pytest.mark.parametrize("rest", [b"", b'{"data": "d", "id', b"\0\0\0\n"])
def test_only_whole_chunks_are_kept(tmp_path, kept, complete, rest):
    with opened(tmp_path, {"k": 1}) as directory:
        for rows in (ROWS[:2], ROWS[2:3], ROWS[3:]):
            directory.append(rows)
        whole = b"".join(directory.responses.read_bytes().splitlines(keepends=True)[:kept])
        directory.responses.write_bytes(whole + rest)
        assert directory.complete(CHUNKS) == ROWS[:complete]
        assert directory.complete(CHUNKS) == ROWS[:complete]
        assert len(directory.responses.read_bytes().splitlines()) == complete


def test_lines_that_are_not_ours_are_an_error(tmp_path):
    with opened(tmp_path, {"k": 1}) as directory:
        directory.append(ROWS[1::-1])
        with pytest.raises(DamagedError, match="1 responses to problem 'b' of d, and not 1 to 'a' of d"):
            directory.complete(CHUNKS)
        directory.responses.write_bytes(b"[]\n" + json.dumps(ROWS[0]).encode() + b"\n")
        with pytest.raises(DamagedError, match="the chunk that begins in line 1 is not as it was written"):
            directory.complete(CHUNKS)
        (tmp_path / "chunks.jsonl").unlink()  # as an earlier version left it
        with pytest.raises(DamagedError, match="line 1 is damaged"):
            directory.complete(CHUNKS)
        with pytest.raises(ValueError, match="not JSON compliant"):
            directory.append([row("a", response(nan))])


def test_more_lines_than_problems_are_an_error(tmp_path):
    with opened(tmp_path, {"k": 1}) as directory:
        directory.append([*ROWS, ROWS[0]])
        with pytest.raises(DamagedError, match="6 lines for 5 problems"):
            directory.complete(CHUNKS)


def test_one_process_at_a_time(tmp_path):
    with (
        opened(tmp_path, {"k": 1}),
        pytest.raises(ConfigError, match="another process is at work"),
        opened(tmp_path, {"k": 1}),
    ):
        pass
    with opened(tmp_path, {"k": 1}):
        pass


def test_the_key_that_differs_is_named_even_in_depth(tmp_path):
    with opened(tmp_path, {"k": 1, "versions": {"torch": "1"}}):
        pass
    with (
        pytest.raises(ConfigError, match=r"versions\.torch='1', but this one has '2': another version"),
        opened(tmp_path, {"k": 1, "versions": {"torch": "2"}}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"new=None, but this one has 3"),
        opened(tmp_path, {"k": 1, "versions": {"torch": "1"}, "new": 3}),
    ):
        pass


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "evaluation"
    with pytest.raises(ConfigError, match=r"cannot be written to: .*Choose another place"), opened(place, {"k": 1}):
        pass
