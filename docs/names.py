"""Prints docs/reference/names.md: the keys here, beside what TRL and verl call the same thing.

python docs/names.py > docs/reference/names.md
"""

from __future__ import annotations

from bapo.config.known_names import NAMES

PREFACE = """\
The keys here, beside what TRL (`GRPOConfig`, `ModelConfig`, peft's `LoraConfig`) and verl call the same thing. A recipe
or a command line that uses one of their names gets the hint of this table. `bapo train --help` explains every key.

`bapo convert FILE …` goes by this table: it reads a script that calls TRL's `GRPOTrainer`, a GRPOConfig or verl's
settings as JSON or YAML, or a shell script that launches TRL or verl; a script of TRL may stand together with what it is
launched with. It writes the recipe, with TRL's or verl's own values where nothing is set. Beside every key stands which
setting it was made from, and at the end, line by line, which settings became none and why. The files are never run.
What a script computes when it runs is named as unknown, but for defaults of its options. Reward functions that stand in
it are copied into a module beside the recipe.

`bapo init trl` and `bapo init verl` write a script that stays inside TRL or verl and takes only the loss from bapo; see
[TRL](../adapters/trl.md) and [verl](../adapters/verl.md).

## What differs if you set nothing

| | TRL 1.16 | here |
|---|---|---|
| text prompts | stay as they are | become a user's message in the model's chat template, unless `model.chat = "no"` |
| groups whose responses all earn the same | stay in the batch and in the mean | are left out; the next step has more |
| passes over each rollout | `num_iterations` 1 | `offpolicy.reuse` 4 |
| learning rate | 1e-6, linear to 0 | `learn.lr` 3e-5, `learn.schedule` constant |
| warm-up | none | `learn.warmup_updates` 10 |
| Adam's betas | 0.9, 0.999 | `learn.betas` 0.9, 0.95 |
| mean of the loss | over tokens (`loss_type` dapo) | within each response, then over responses (`learn.reduction`) |
| longest response | 512 tokens | `rollout.max_tokens` 64 |
| KL penalty (`beta`), if set | k3 times the ratio (`use_bias_correction_kl`) | k3 (`learn.kl`), not times the ratio |
| activations | computed again in the backward pass | kept, unless `learn.activation_checkpointing` |
| checkpoints | all are kept | `checkpoint_keep` 2 |
| seed | 42 | `seed` 0 |

## Names
"""


def page() -> str:
    """The whole page."""
    rows = ["| TRL | verl | here | |", "|---|---|---|---|"]
    for known in NAMES:
        theirs = [", ".join(f"`{name.strip()}`" for name in names.split(",") if name) for names in known[:2]]
        rows.append(f"| {theirs[0]} | {theirs[1]} | {f'`{known.key}`' if known.key else '–'} | {known.remark} |")
    return "\n".join(["# Names that you know from TRL and verl", "", PREFACE, *rows])


if __name__ == "__main__":
    print(page())
