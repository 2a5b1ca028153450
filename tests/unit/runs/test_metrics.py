import runpy
from pathlib import Path

import pytest

from bapo.runs.metrics import METRICS, check_declared

ROOT = Path(__file__).parents[3]


def test_the_page_in_docs_is_the_generated_one():
    printed = runpy.run_path(str(ROOT / "docs" / "metrics.py"))["page"]()
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text() == printed


def test_undeclared_keys_are_refused():
    check_declared({"loss": 1.0, "eval/avg": 0.5, "reward/any": 1.0})
    with pytest.raises(KeyError, match="losss"):
        check_declared({"losss": 1.0})


def test_every_sentence_is_one():
    for key, sentence in METRICS.items():
        assert not sentence[0].islower() or sentence.startswith("avg@k"), key
        assert sentence.endswith("."), key
