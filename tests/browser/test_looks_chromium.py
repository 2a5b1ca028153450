"""Every kind of page, wide and on a phone, light and dark: nothing sticks out, is cut off, overlaps or is too pale."""

import json
import shutil
from dataclasses import replace

import pytest

from bapo.diagnose.diagnosis import diagnose
from bapo.diagnose.diagnosis_page import html_page
from bapo.diagnose.dumps import Dump
from bapo.evaluate.estimates import results
from bapo.evaluate.results_page import page as eval_page
from bapo.report import write_report
from bapo.runs.history import Restart, record_restart
from tests.browser.conftest import PATIENCE
from tests.browser.looks import PHONE, WIDE, flaws
from tests.browser.test_eval_chromium import IDENTITY, ROWS
from tests.browser.test_report_chromium import unfolded
from tests.compared_runs import COMPARED
from tests.unit.diagnose.test_diagnosis import batch


def one_run(root):
    """A run on a cluster whose actors were restarted, so that its report has every table of one run."""
    run = shutil.copytree(COMPARED / "reuse-4/bapo/seed-0", root / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"cluster": {"rollouts": 2, "learners": 2}}))
    why = "it did not answer for 60 s while it sampled, so its process tree was ended and a new actor took its place"
    record_restart(run, Restart("rollout 1", why, responses=12, tokens=340), step=1)
    record_restart(run, Restart("learner", "rank 1 died", updates=4), step=2)
    write_report([run], root / "page.html")


def comparison(root):
    write_report([COMPARED], root / "page.html")


def evaluation(root):
    (root / "page.html").write_text(eval_page(ROWS, results(ROWS, IDENTITY)), encoding="utf-8")


def diagnosis(root):
    updates = [replace(batch(drift=0.15 * n, longer=2.0, seed=n), name=str(n)) for n in (1, 2, 3)]
    found = diagnose(Dump(updates, {"behavior_logprobs": "rollout_log_probs"}))
    (root / "page.html").write_text(html_page(found), encoding="utf-8")


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("write", [one_run, comparison, evaluation, diagnosis])
def test_a_page_looks_right_in_both_themes(watched, write, viewport, tmp_path):
    write(tmp_path)
    page = watched(
        (tmp_path / "page.html").as_uri(), ("file:", "data:", "blob:"), viewport=viewport, color_scheme="light"
    )
    page.wait_for_selector("html[data-theme=light][data-drawn]", timeout=PATIENCE)
    unfolded(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert flaws(page) == []
    if write is not evaluation:  # it has no plots to draw again
        page.evaluate("delete document.documentElement.dataset.drawn")
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-theme=dark][data-drawn]", timeout=PATIENCE)
    assert flaws(page) == []
