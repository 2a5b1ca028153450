"""The loss in the registries of other verl versions.

`make test-integrations` unpacks them under <environment>/older, one folder each; they are no part of the environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close

pytest.importorskip("verl")

import verl

from bapo import ClipSettings
from bapo.config.known_names import UNSET
from bapo.config.words import flat
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, logged

OLDER = Path(sys.prefix) / "older"


def run(version, out, **options):
    """A loss call inside that version, in a process of its own."""
    if not (OLDER / f"verl-{version}").is_dir():
        pytest.skip(f"no {OLDER}/verl-{version}; make test-integrations puts it there")
    paths = os.pathsep.join([str(OLDER / f"verl-{version}"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "tests.adapters.verl.older", json.dumps({"out": str(out), "options": options})],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "VERL_LOGGING_LEVEL": "ERROR"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )


def called(version, out, **options):
    """What the loss returns inside that version."""
    done = run(version, out, **options)
    assert done.returncode == 0, done.stderr[-6000:]
    found = torch.load(out, weights_only=True)
    assert found["version"] == version
    return found


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0"])
def test_bounds_loss_and_gradient_are_the_cores_in_the_order_of_the_authors_code(version, tmp_path):
    found = called(version, tmp_path / "returned.pt", preset="released-script", target_share=0.41, dual_clip=3.0)
    settings = ClipSettings.from_options("released-script", target_share=0.41)
    out, gradient = core(logged(), settings=settings, dual_clip=3.0)
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    loss, metrics = found["returned"]
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(found["gradient"], gradient, rtol=0, atol=1e-6)
    assert metrics["bapo/clip_low"] == out.bounds.low.item()
    assert metrics["bapo/clip_high"] == out.bounds.high.item()


def test_the_table_of_names_says_what_verl_does_if_nothing_is_set():
    written = Path(verl.__file__).with_name("trainer") / "config" / "_generated_ppo_trainer.yaml"
    tables = ("actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.")
    tables += ("algorithm.", "data.", "trainer.")
    known = [(key, value) for key, value in flat(yaml.safe_load(written.read_text())) if key.startswith(tables)]
    for name, value in UNSET["verl"].items():
        assert value in [other for key, other in known if key.endswith(f".{name}")], name
