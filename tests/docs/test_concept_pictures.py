"""The pictures of concepts and of the first page, on run directories and on the table that they are drawn from."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.compared_runs import COMPARED

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def concepts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        spec = importlib.util.spec_from_file_location("docs_concepts", DOCS / "concepts.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        del sys.modules[spec.name], sys.modules["figures"]


def test_the_first_picture_is_that_of_the_table(concepts):
    rows = concepts.rows_of_results()
    assert rows["8x-1e-4", "brake"] == (0.664, 0.021)
    assert rows["8x-1e-4", "grpo"] == (0.499, 0.017)
    assert rows["1x-3e-5", "either"] == (0.715, 0.015)
    assert len(rows) == 2 + 2 * 7
    assert (DOCS / "pictures" / "passes.svg").read_text() == concepts.passes_picture()


@pytest.mark.parametrize("name", ["passes.svg", "staleness.svg", "parking.svg", "bounds.svg"])
def test_pictures_are_sound_and_fetch_nothing(name):
    text = (DOCS / "pictures" / name).read_text()
    ET.fromstring(text)
    assert text.count("http") == 1  # the namespace


def test_every_age_of_an_update_has_a_cell(concepts):
    run = COMPARED / "partial" / "bapo" / "seed-0"
    updates = concepts.lines_of(run, "update")
    cells = sum(sum(tokens > 0 for tokens in update["staleness_histogram"]) for update in updates)
    assert concepts.staleness_picture(run).count(f'fill="{concepts.BLUE}" opacity') == cells > len(updates) / 2


def test_the_bounds_of_every_update_are_drawn(concepts):
    run = COMPARED / "reuse-4" / "bapo" / "seed-0"
    root = ET.fromstring(concepts.bounds_picture(run))
    lines = [line for line in root.iter("{http://www.w3.org/2000/svg}polyline") if line.get("class") == "bold"]
    assert len(lines) == 4
    assert {len(line.get("points").split()) for line in lines} == {len(concepts.lines_of(run, "update"))}


def test_parts_of_a_response_are_as_long_as_their_tokens(concepts, tmp_path):
    trajectories = [{"versions": [0] * 10 + [4] * 30}, {"versions": [3] * 40}]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"trajectories": trajectories}) + "\n")
    root = ET.fromstring(concepts.parking_picture(tmp_path))
    parts = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("height") == "20"]
    first, second = (float(part.get("width")) + 1 for part in parts)  # one pixel is left between parts
    assert second == pytest.approx(3 * first, abs=0.2)
    assert [text for text in root.itertext() if text.startswith("version")] == ["version 0", "version 4"]
