"""Data sets as demonstrations: what a model is to imitate, from every layout."""

import json
from pathlib import Path

import pytest

from bapo.tasks.data.problems import load_demonstrations
from bapo.tasks.data.sources import BOXED

REAL = Path(__file__).parents[3] / "data" / "problems"


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_solutions_become_what_a_model_should_write():
    found, report = load_demonstrations([f"gsm8k={REAL / 'gsm8k.jsonl'}"])
    assert str(report) == "3 rows read, 3 kept"
    assert found[0].prompt.endswith(f"altogether in April and May? {BOXED}")
    assert found[0].response == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n\\boxed{72}"
    )
    assert found[2].response.endswith("$36 * 30 = $1080.\n\\boxed{1080}")
    untouched, _ = load_demonstrations([str(REAL / "gsm8k.jsonl")], box_answers=False)
    assert untouched[2].response.endswith("$<<36*30=1080>>1080.\n#### 1,080")
    assert untouched[2].id != found[2].id
    assert untouched[2].id.split("-")[0] == found[2].id.split("-")[0]


def test_layouts(tmp_path):
    chat = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    rows = [
        {"prompt": "p", "response": "r <<kept>>"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "c"},
        {"instruction": "i", "input": "", "output": "o"},
        {"problem": "m", "solution": "worked", "answer": "5"},
        {"messages": chat},
        {"messages": chat[:2]},
        {"prompt": "p", "response": "r <<kept>>"},
        {"prompt": "p", "response": "another"},
        {"prompt": "", "response": "r"},
    ]
    found, report = load_demonstrations([lines(tmp_path / "rows.jsonl", rows)])
    assert [(d.prompt, d.response) for d in found] == [
        ("p", "r <<kept>>"),
        ([{"role": "user", "content": "q"}], "c"),
        ("i", "o"),
        ("m", "worked"),
        (chat[:4], "d"),
        ("p", "another"),
    ]
    assert len({d.id for d in found}) == 6
    assert str(report) == "9 rows read, 6 kept; left out: 1 duplicates, 1 without a prompt, 1 without an answer"


def test_a_response_out_of_messages_answers_those_and_not_the_first_turn_beside_them(tmp_path):
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    row = {"prompt": "a", "messages": chat}
    path = lines(tmp_path / "rows.jsonl", [row, {"prompt": "a", "messages": chat[-1:]}])
    found, _ = load_demonstrations([path])
    assert [(d.prompt, d.response) for d in found] == [(chat[:3], "d"), ("a", "d")]
    (named,), _ = load_demonstrations([lines(tmp_path / "named.jsonl", [row])], prompt_column="prompt")
    assert (named.prompt, named.response) == ("a", "d")
    (given,), _ = load_demonstrations([lines(tmp_path / "given.jsonl", [row | {"response": "r"}])])
    assert (given.prompt, given.response) == ("a", "r")


def test_of_two_assistant_turns_at_the_end_the_first_belongs_to_the_prompt(tmp_path):
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))]
    (found,), _ = load_demonstrations([lines(tmp_path / "rows.jsonl", [{"messages": chat}, {"messages": chat[1:]}])])
    assert (found.prompt, found.response) == (chat[:2], "c")


def test_named_columns_and_errors(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"extra_info": {"question": "q", "answer": "a"}, "prompt": "x"}])
    named = {"prompt_column": "extra_info.question", "response_column": "extra_info.answer"}
    (found,), _ = load_demonstrations([path], **named, template="<{prompt}>")
    assert (found.prompt, found.response) == ("<q>", "a")
    with pytest.raises(
        ValueError, match=r"line 1 has no response.*response, completion.*Name the right columns with prompt_column"
    ):
        load_demonstrations([path])
    with pytest.raises(ValueError, match=r"column 'response' holds '3' \(int\). A response must be text"):
        load_demonstrations([lines(tmp_path / "bad.jsonl", [{"prompt": "p", "response": 3}])])
    with pytest.raises(ValueError, match="gave no demonstration: 1 rows read, 0 kept"):
        load_demonstrations([lines(tmp_path / "bad.jsonl", [{"prompt": "p", "response": " "}])])
