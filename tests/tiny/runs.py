"""The configuration of a tiny run: the embedded model, four steps, sixteen responses in each."""

from bapo.config.recipe import parse_config

SMALL = {
    "steps": 4,
    "threads": 1,
    "device": "cpu",
    "rollout": {"prompts": 4, "responses": 4},
    "learn": {"batch_groups": 4},
    "eval": {"problems": 4, "k": 2, "every": 0},
}


def configured(out, **sections):
    """A small run in `out`, with these keys put in."""
    values = {**SMALL, "out": str(out)}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values and isinstance(section, dict) else section
    return parse_config(values, source="test")
