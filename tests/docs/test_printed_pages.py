"""The pages of docs/reference/ that a script prints are what it prints today, and have every key and every objective.

Tests of metrics, names, modules and sizes are beside what they print.
"""

import re
import runpy
from pathlib import Path

import pytest
from pydantic import BaseModel

from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.core.objectives import OBJECTIVES

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {"train": Config, "sft": SftConfig}


def stored(name):
    return (DOCS / "reference" / f"{name}.md").read_text()


def keys(schema, prefix=""):
    """Every key of a configuration, by walking through an instance of it."""
    for name, value in schema:
        if isinstance(value, BaseModel):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("name", SCHEMAS)
def test_pages_of_keys_are_current(name):
    printed = runpy.run_path(str(DOCS / "keys.py"))["page"](name)
    assert stored(name) == printed, f"run: python docs/keys.py {name} > docs/reference/{name}.md"


@pytest.mark.parametrize("name", ["objectives", "problems"])
def test_pages_of_objectives_and_problems_are_current(name):
    printed = runpy.run_path(str(DOCS / f"{name}.py"))["page"]()
    assert stored(name) == printed, f"run: python docs/{name}.py > docs/reference/{name}.md"


@pytest.mark.parametrize(("name", "schema"), SCHEMAS.items())
def test_every_key_is_on_its_page_with_a_meaning(name, schema):
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", stored(name), flags=re.MULTILINE))
    assert set(rows) == set(keys(schema()))
    assert [key for key, meaning in rows.items() if not meaning.strip()] == []


def test_a_key_shows_type_and_default():
    page = stored("train")
    assert "| `steps` | whole number | `60` |" in page
    assert "| `learn.betas` | number, number |" in page
    assert "| `task.train` | list of text | empty |" in page
    assert "| `rollout.cache_tokens` | whole number or none | none |" in page


def test_every_objective_is_on_its_page_with_options_and_needs():
    page = stored("objectives")
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    assert list(sections) == list(OBJECTIVES)
    assert "Options: `low = 0.8`, `high = 1.28`, `used_low = none`." in sections["clip_higher"]
    assert "Options: none." in sections["topr"]
    assert [name for name, text in sections.items() if "(`uses`)" in text] == ["push_once", "brake"]
    assert "on all tokens" in sections["brake_all"]
    ours = {"push_once", "brake", "brake_all"}
    assert [name for name, text in sections.items() if name not in ours and "arXiv:" not in text] == []
