"""The configuration of a tiny run: the embedded model, four steps, sixteen short responses in each."""

import shutil

from bapo.config.recipe import parse
from bapo.config.run import Config

SMALL = {
    "steps": 4,
    "threads": 1,
    "device": "cpu",
    "rollout": {"prompts": 4, "responses": 4, "max_tokens": 48},
    "learn": {"batch_groups": 4},
    "eval": {"problems": 4, "k": 2, "every": 0},
}


def configured(out, **sections):
    """A small run in `out`, with these keys put in."""
    values = {**SMALL, "out": str(out)}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values and isinstance(section, dict) else section
    return parse(Config, values, source="test")


def assert_resumes_bit_for_bit(place, **sections):
    """A run of four steps that goes on from its checkpoint after two is the run that was never killed."""
    from bapo.train.run import resume, start

    whole, killed = place / "whole", place / "killed"
    off_policy = {"reuse": 2, "partial_budget": 600, "replay_fraction": 0.3}
    start(configured(whole, steps=4, checkpoint_every=2, offpolicy=off_policy, **sections), plain=True)
    shutil.copytree(whole, killed)
    (killed / "summary.json").unlink()
    shutil.rmtree(killed / "checkpoints" / "step-000004")
    resume(killed, plain=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
