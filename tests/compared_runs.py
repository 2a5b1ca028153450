"""A few real, tiny runs laid out as `bapo compare` does: SETTING/OBJECTIVE/seed-N."""

from bapo.config import parse_config

TINY = {
    "steps": 3,
    "threads": 1,
    "device": "cpu",
    "rollout": {"prompts": 4, "responses": 4},
    "learn": {"batch_groups": 4, "warmup_updates": 0, "lr": 3e-4},
    "eval": {"problems": 4, "k": 2, "every": 1},
}
ARMS = {
    ("reuse-2", "bapo"): ({"name": "bapo"}, {"reuse": 2}, (0, 1)),
    ("reuse-2", "grpo"): ({"name": "grpo", "preset": None}, {"reuse": 2}, (0, 1)),
    ("reuse-4", "bapo"): ({"name": "bapo"}, {"reuse": 4}, (0,)),
    ("reuse-4", "clip_higher"): ({"name": "clip_higher", "preset": None}, {"reuse": 4}, (0,)),
    ("partial", "bapo"): ({"name": "bapo"}, {"reuse": 2, "partial_budget": 400}, (0,)),
}


def make(root):
    """Train them all; a few seconds."""
    from bapo.train.run import start

    for (setting, objective), (loss, off, seeds) in ARMS.items():
        for seed in seeds:
            out = root / setting / objective / f"seed-{seed}"
            values = {**TINY, "out": str(out), "seed": seed, "objective": loss, "offpolicy": off}
            if setting == "partial":
                values["steps"] = 6
            start(parse_config(values, source="test"), plain=True)
    return root
