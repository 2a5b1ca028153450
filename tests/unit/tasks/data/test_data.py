"""Data sets as problems: rows as people publish them, and everything that can be wrong with a file."""

import gzip
import json
import re
import sys
import time
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest

from bapo.tasks.data.columns import last_boxed
from bapo.tasks.data.problems import LoadReport, fill, fingerprint, load_problems, within, without_overlap
from bapo.tasks.data.sources import BOXED
from bapo.tasks.task import ProblemStream, Task
from bapo.tasks.verify.scorers import DataTask
from bapo.types import Problem, Score

REAL = Path(__file__).parents[3] / "data" / "problems"


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def real_rows(name):
    return [json.loads(line) for line in (REAL / name).read_text().splitlines()]


def answers(rows, tmp_path, **options):
    problems, _ = load_problems([lines(tmp_path / "rows.jsonl", rows)], **options)
    return [problem.answer for problem in problems]


def refusal(tmp_path, content, name="bad.jsonl", **options):
    """What loading a file with this content is refused with."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_problems([str(path)], **options)
    return str(caught.value)


def test_gsm8k_is_read_as_published():
    problems, report = load_problems([str(REAL / "gsm8k.jsonl")])
    assert [problem.answer for problem in problems] == ["72", "10", "1080"]
    assert problems[0].prompt.startswith("Natalia sold clips to 48")
    assert problems[0].source == "gsm8k"
    assert problems[0].id == "73429d562982300e"  # written down: an id may never change
    assert report == LoadReport(read=3, kept=3)
    assert str(report) == "3 rows read, 3 kept"


def test_verls_parquet_is_read_as_published(tmp_path):
    problems, _ = load_problems([parquet(tmp_path / "aime.parquet", real_rows("aime.jsonl"))])
    assert [problem.answer for problem in problems] == ["025", "809", "70"]
    assert [problem.source for problem in problems] == ["test-math-aime24", "test-math-aime24", "test-math-aime25"]
    assert problems[2].prompt == [{"role": "user", "content": real_rows("aime.jsonl")[2]["prompt"][0]["content"]}]
    assert problems[0].extra == {"ability": "math", "index": 1, "split": "test", "data_source": "test-math-aime24"}


def test_skywork_and_dapo_layouts(tmp_path):
    def row(question, truth, index):
        return {
            "data_source": "train-math-numinamath1.5",
            "prompt": [{"content": question, "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"index": index, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
        }

    rows = [row("Half?", '["\\\\frac{1}{2}"]', 0), row("Roots?", '["1", "-1"]', 1), row("Where?", "[0, 1]", 2)]
    problems, _ = load_problems([parquet(tmp_path / "math.parquet", rows)])
    assert [problem.answer for problem in problems] == ["\\frac{1}{2}", ["1", "-1"], "[0, 1]"]
    assert problems[0].extra["model_difficulty"] == {"DeepSeek-R1-Distill-Qwen-7B": 3}

    # DAPO-Math-17k: every question many times, its index a text
    repeated = [{**row(f"Question {i % 5}?", "34", 0), "extra_info": {"index": f"uuid-{i}"}} for i in range(500)]
    problems, report = load_problems([parquet(tmp_path / "dapo.parquet", repeated)])
    assert len(problems) == 5
    assert str(report) == "500 rows read, 5 kept; left out: 495 duplicates"


def test_layouts_may_be_mixed(tmp_path):
    rows = [
        {"problem": "a", "solution": r"so it is $\boxed{\frac{1}{\sqrt{2}}}$.", "level": 5},
        {"Problem": "b", "Answer": 204, "ID": "2024-I-1"},
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"prompt": "c", "question": None, "answer": "4"},
        {"prompt": None, "question": "d", "answer": "", "solution": r"\boxed 5"},
        {"question": "e", "final_answer": 2.5},
        {
            "messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "6!"}],
            "answer": ["6", "six"],
        },
    ]
    problems, _ = load_problems([lines(tmp_path / "mixed.jsonl", rows)])
    assert [problem.prompt for problem in problems] == [
        *("a", "b", "add\n\n1 2", "c", "d", "e"),
        [{"role": "user", "content": "f"}],
    ]
    expected = [r"\frac{1}{\sqrt{2}}", "204", "3", "4", "5", "2.5", ["6", "six"]]
    assert [problem.answer for problem in problems] == expected
    assert problems[0].extra == {"level": 5, "data_source": "mixed"}
    assert problems[1].extra == {"ID": "2024-I-1", "data_source": "mixed"}


def test_columns_can_be_named_with_dots_into_them(tmp_path):
    rows = [{"prompt": "wrong", "meta": {"task": {"text": "right"}}, "gold.answer": "7", "answer": "wrong"}]
    path = lines(tmp_path / "rows.jsonl", rows)
    (problem,), _ = load_problems([path], prompt_column="meta.task.text", answer_column="gold.answer")
    assert (problem.prompt, problem.answer) == ("right", "7")


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("reasoning\n#### -1,234.5", "-1234.5"),
        ("reasoning\n####  12 apples ", "12 apples"),
        ("#### is no mark\nhere", "#### is no mark\nhere"),
        (r"first \boxed{1}, then \boxed{\text{a}\}b}", r"\text{a}\}b"),
        (r"} \boxed{1 \boxed {2} 3} \{ {4} \boxed{5 {6}", "2"),
        ("1,2", "1,2"),
        (3.0, "3"),
        (9007199254740993, "9007199254740993"),
        (10**400, "1" + "0" * 400),
        ([1, 2], ["1", "2"]),
        (True, True),
        ({"tests": ["assert f(1) == 2"]}, {"tests": ["assert f(1) == 2"]}),
        ("[unclosed", "[unclosed"),
    ],
)
def test_gold_answers(tmp_path, value, answer):
    assert answers([{"prompt": "p", "answer": value}], tmp_path) == [answer]


def test_boxes_that_are_never_closed_cost_time_by_their_number_and_not_its_square():
    began = time.process_time()
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * 20_000) == "1"
    assert time.process_time() - began < 5


def test_every_format_gives_the_same_problems(tmp_path):
    rows = [{"prompt": 'Is "x, y"\nan "é"?', "answer": "ja"}, {"prompt": "q\u2028r", "answer": "nein"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\n  \n")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text(text)
    csv = 'prompt,answer\r\n"Is ""x, y""\nan ""é""?",ja\r\n\r\n"q\u2028r",nein\r\n'
    (tmp_path / "table.csv").write_text(csv, newline="")
    parquet(tmp_path / "table.parquet", rows)
    loaded = [load_problems([f"mine={path}"])[0] for path in sorted(tmp_path.iterdir())]
    assert len(loaded) == 6
    assert len({fingerprint(problems) for problems in loaded}) == 1
    assert [problem.prompt for problem in loaded[0]] == [row["prompt"] for row in rows]


def test_what_repeats_is_counted_and_the_first_answer_stands(tmp_path):
    rows = [
        {"prompt": "one", "answer": "1"},
        {"prompt": " one\n", "answer": "1"},
        {"prompt": [{"role": "user", "content": f"one {BOXED}"}], "answer": "2"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}], "answer": "2"},
        {"prompt": "  ", "answer": "1"},
        {"prompt": "two", "answer": None},
        {"prompt": "three", "solution": "a proof without a box"},
    ]
    problems, report = load_problems([lines(tmp_path / "rows.jsonl", rows)])
    assert [problem.answer for problem in problems] == ["1", "2"]
    assert (report.read, report.kept, report.duplicates, report.conflicting) == (7, 2, 1, 1)
    assert (report.without_prompt, report.without_answer) == (1, 2)
    assert "rows.jsonl, line 3: '1', then '2'" in str(report)


def test_a_template_survives_braces_and_is_put_once(tmp_path):
    template = "{prompt}\n" + BOXED
    assert fill(template, r"What is {x} in \boxed{}?") == r"What is {x} in \boxed{}?" + "\n" + BOXED
    assert fill(template, f"Sum? {BOXED}") == f"Sum? {BOXED}"
    assert [fill("{prompt}?", text) for text in ("Say it.", "What?")] == ["Say it.?", "What??"]
    assert fill("Q: {prompt}\nA:", "{prompt}") == "Q: {prompt}\nA:"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert [message["content"] for message in fill("<{prompt}>", chat)] == ["a", "b", "<c>"]
    assert chat[2]["content"] == "c"
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "1"}])
    with_it, without = load_problems([path], template=template)[0][0], load_problems([path])[0][0]
    assert with_it.prompt == f"p\n{BOXED}"
    assert with_it.id == without.id
    with pytest.raises(ValueError, match=r"no place for the prompt. Write {prompt} where the prompt belongs"):
        load_problems([path], template="Think hard.")


@pytest.mark.parametrize(
    ("content", "name", "place"),
    [
        (
            '{"prompt": "p", "answer": 1}\n{"prompt" 3}\n',
            "bad.jsonl",
            "line 2 is not valid JSON: Expecting ':' delimiter at column 11.",
        ),
        ('\n\n{"prompt": "p\r\n', "bad.jsonl", "line 3 is not valid JSON: Unterminated string starting at column 12."),
        (
            '{"prompt": "p", "answer": 1}\n{"prompt":\n',
            "bad.json",
            "line 2 is not valid JSON: Expecting value at column 11.",
        ),
        (
            '[\n{"prompt": "p", "answer": 1},\n{"prompt" 3}]',
            "bad.json",
            "line 3 is not valid JSON: Expecting ':' delimiter at column 11.",
        ),
    ],
)
def test_broken_json_is_placed_once_by_line_and_column_of_the_file(tmp_path, content, name, place):
    message = refusal(tmp_path, content, name)
    assert f"{name}, {place} " in message
    assert len(re.findall(r"\bline \d", message)) == 1
    assert re.search(r"[Rr]epair", message)


def test_broken_files_are_refused_with_place_reason_and_remedy(tmp_path):
    good = '{"prompt": "p", "answer": "1"}\n'
    message = refusal(tmp_path, good + '{"prompt": "half')
    assert "bad.jsonl, line 2 is not valid JSON" in message
    assert "Repair this one or remove it" in message
    assert "line 1 holds a JSON list" in refusal(tmp_path, "[1]\n")
    assert "item 2 holds a JSON int" in refusal(tmp_path, f"[{good}, 3]", "bad.json")
    assert "is not valid JSON" in refusal(tmp_path, "[" * 100_000, "deep.json")
    assert "is not valid JSON" in refusal(tmp_path, f"[{good}", "open.json")
    assert "line 2 is not UTF-8: it has byte 0xe9" in refusal(tmp_path, good.encode() + "é\n".encode("latin-1"))
    assert "line 1 is not UTF-8: it has byte 0xff" in refusal(tmp_path, good.encode("utf-16"))
    for empty in (b"", b"\n \n", b"\xef\xbb\xbf"):
        assert "has no rows" in refusal(tmp_path, empty)
    assert "has no rows" in refusal(tmp_path, "prompt,answer\n", "bad.csv")
    assert "line 3 has 3 fields, but the first line names 2" in refusal(
        tmp_path, "prompt,answer\na,1\na,b,c\n", "b.csv"
    )
    packed = gzip.compress(good.encode() * 1000)
    assert "damaged or incomplete" in refusal(tmp_path, packed[:60], "cut.jsonl.gz")
    assert "damaged or incomplete" in refusal(tmp_path, good, "plain.jsonl.gz")
    assert "cannot be read as parquet" in refusal(tmp_path, b"PAR1 no", "bad.parquet")
    assert "has the ending .xlsx" in refusal(tmp_path, good, "bad.xlsx")


def test_rows_that_make_no_problem_are_refused_with_the_columns_they_have(tmp_path):
    message = refusal(tmp_path, '{"text": "p", "meta": {"gold": "1"}}')
    assert "line 1 has no prompt" in message
    assert "prompt, question, problem" in message
    assert "It has text, meta (meta.gold)" in message
    assert "Name the right columns with prompt_column and answer_column" in message
    message = refusal(tmp_path, '{"prompt": "p", "gold": "1"}')
    assert "no answer: none of its columns is called reward_model.ground_truth, answer" in message
    message = refusal(tmp_path, '{"prompt": "p", "x": 1}', answer_column="reward_model.ground_truth")
    assert "there is no column for answer_column='reward_model.ground_truth'" in message
    assert "holds '3' (int)" in refusal(tmp_path, '{"prompt": 3, "answer": "1"}')
    picture = '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}'
    assert "only text can be read" in refusal(tmp_path, picture)
    message = refusal(tmp_path, '{"prompt": "p", "answer": null}')
    assert "gave no problem: 1 rows read, 0 kept; left out: 1 without an answer" in message


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = parquet(tmp_path / "p.parquet", [{"prompt": "p", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow. Install it with `pip install 'bapo\[data\]'`"):
        load_problems([path])


def test_values_that_json_cannot_hold_stay_out_of_extra(tmp_path):
    rows = [{"prompt": "p", "answer": "1", "image": b"\xff", "level": 2, "__index_level_0__": 3, "tags": ["a"]}]
    (problem,), _ = load_problems([parquet(tmp_path / "p.parquet", rows)])
    assert problem.extra == {"level": 2, "tags": ["a"], "data_source": "p"}


def test_answers_that_only_parquet_holds_become_text(tmp_path):
    rows = [{"prompt": name, "answer": Decimal(text)} for name, text in [("a", "72.00"), ("b", "0.25"), ("c", "1e30")]]
    problems, _ = load_problems([parquet(tmp_path / "numbers.parquet", rows)])
    assert [problem.answer for problem in problems] == ["72", "0.25", "1" + "0" * 30]
    answer = {"when": datetime(2024, 1, 2), "tests": [{"cost": Decimal("1.5")}]}
    (problem,), _ = load_problems([parquet(tmp_path / "dates.parquet", [{"prompt": "p", "answer": answer}])])
    assert problem.answer == {"when": "2024-01-02 00:00:00", "tests": [{"cost": "1.5"}]}


def test_half_a_character_is_refused_with_its_place(tmp_path):
    good = '{"prompt": "p", "answer": "1"}\n'
    for prompt in (r'"a\ud800"', r'[{"role": "user", "content": "a\ud800"}]'):
        message = refusal(tmp_path, good + f'{{"prompt": {prompt}, "answer": "1"}}')
        assert "bad.jsonl, line 2: column 'prompt' holds the lone surrogate \\ud800 at position 2" in message


def test_half_a_character_in_an_answer_is_refused_too(tmp_path):
    for answer in ("1\ud800", ["1", "2\ud800"]):
        message = refusal(tmp_path, json.dumps({"prompt": "a", "answer": answer}))
        assert "column 'answer' holds the lone surrogate \\ud800 at position 2" in message


@pytest.mark.parametrize("depth", [200, 900, 5_000, 200_000])
@pytest.mark.parametrize("column", ["prompt", "answer", "other"])
def test_deep_nesting_is_read_or_refused_with_its_place(tmp_path, column, depth):
    row = {"prompt": '"a"', "answer": '"1"', "other": '"b"', column: '{"a": [' * (depth // 2) + "]}" * (depth // 2)}
    path = tmp_path / "deep.jsonl"
    path.write_text("{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n")
    if depth < 500 and column != "prompt":
        assert fingerprint(load_problems([str(path)])[0])
    else:
        with pytest.raises(ValueError, match=r"deep\.jsonl, line 1"):
            load_problems([str(path)])


def test_nul_and_byte_order_marks_are_kept_or_refused_with_their_place(tmp_path):
    path = tmp_path / "marks.jsonl"
    path.write_text("\ufeff" + json.dumps({"prompt": "a\0b", "answer": "1"}) + "\n", encoding="utf-8")
    (found,), _ = load_problems([str(path)])
    assert found.prompt == "a\0b"
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")  # two files put together
    with pytest.raises(ValueError, match=r"marks\.jsonl, line 2 is not valid JSON.*BOM"):
        load_problems([str(path)])


def test_a_body_comes_before_its_question(tmp_path):
    rows = [  # SVAMP's columns
        {"Body": "Each pack costs 76 dollars. You get 25 off", "Question": "How much is a pack?", "Answer": 51.0},
        {"Body": "Ed has 2 books.", "Question": "How many?", "Answer": 2.0},
        {"Body": " ", "Question": "What is 1 + 1?", "Answer": 2.0},
    ]
    path = lines(tmp_path / "svamp.jsonl", rows)
    problems, _ = load_problems([path])
    assert [(one.prompt, one.answer) for one in problems] == [
        ("Each pack costs 76 dollars. You get 25 off. How much is a pack?", "51"),
        ("Ed has 2 books. How many?", "2"),
        ("What is 1 + 1?", "2"),
    ]
    named, _ = load_problems([path], prompt_column="Question")
    assert [one.prompt for one in named] == ["How much is a pack?", "How many?", "What is 1 + 1?"]
    assert named[1].extra["Body"] == "Ed has 2 books."
    broken = [{"Body": "a\ud800", "Question": "b", "Answer": 1}]
    with pytest.raises(ValueError, match="column 'Body' holds the lone surrogate"):
        load_problems([lines(tmp_path / "broken.jsonl", broken)])


def problem(name, prompt, answer="1"):
    return Problem(id=name, prompt=prompt, answer=answer)


def test_length_filter_keeps_the_bound_itself():
    problems = [problem("a", "one two"), problem("b", "one two three"), problem("c", "one")]
    kept, left_out = within(problems, lambda prompt: len(prompt.split()), 2)
    assert [p.id for p in kept] == ["a", "c"]
    assert [p.id for p in left_out] == ["b"]


def test_fingerprint_changes_with_anything_that_matters():
    base = [problem("a", "p"), problem("b", [{"role": "user", "content": "q"}])]
    variants = [
        base[::-1],
        base[:1],
        [problem("a", "p", "2"), base[1]],
        [problem("a", "p "), base[1]],
        [problem("c", "p"), base[1]],
        [replace(base[0], extra={"level": 1}), base[1]],
    ]
    prints = {fingerprint(problems) for problems in [base, *variants]}
    assert len(prints) == 7
    assert fingerprint([problem("a", "p", {"when": datetime(2024, 1, 2)})])
    assert fingerprint(list(base)) == fingerprint(base)
    assert fingerprint([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing


def test_a_saved_cursor_continues_identically():
    problems = [problem(str(i), f"p{i}") for i in range(7)]
    whole = ProblemStream(problems, seed=3)
    expected = [p.id for p in whole.draw(40)]
    assert sorted(expected[:7]) == sorted(expected[7:14]) == [str(i) for i in range(7)]
    assert expected[:7] != expected[7:14]
    for stop in (0, 3, 7, 20):
        begun = ProblemStream(problems, seed=3)
        before = [p.id for p in begun.draw(stop)]
        resumed = ProblemStream(problems, seed=3, cursor=begun.cursor)
        assert before + [p.id for p in resumed.draw(40 - stop)] == expected
    # written down: the order is part of what a checkpoint promises
    assert "".join(expected[:7]) == "1250634"


def length_scorer(responses):
    return [Score(float(len(text))) for _, text in responses]


def test_a_data_task_is_a_task():
    task: Task = DataTask([problem("a", "p")], [problem("b", "q")], length_scorer)
    assert [p.id for p in task.train] == ["a"]
    assert task.scores([(task.test[0], "xyz"), (task.train[0], "")]) == [Score(3.0), Score(0.0)]


def test_test_problems_are_not_trained_on(tmp_path):
    train, _ = load_problems([str(REAL / "gsm8k.jsonl")], template="Question: {prompt}")
    test, _ = load_problems([lines(tmp_path / "t.jsonl", real_rows("gsm8k.jsonl")[1:2])], template="{prompt} " + BOXED)
    kept, left_out = without_overlap(train, test)
    assert [p.answer for p in kept] == ["72", "1080"]
    assert [p.answer for p in left_out] == ["10"]
    # problems from elsewhere have other ids: their text is compared
    assert len(without_overlap([problem("x", f"q  {BOXED}")], [problem("y", "q")])[1]) == 1
