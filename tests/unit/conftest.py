"""A directory to start from."""

import json

import pytest

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory but for train.jsonl and test.jsonl."""
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path
