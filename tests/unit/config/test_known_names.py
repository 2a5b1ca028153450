"""Names from TRL and verl lead to the right keys, and the page about them is up to date."""

import re
import runpy
from pathlib import Path

import pytest

from bapo.cli import run
from bapo.config.known_names import NAMES, hint
from bapo.config.run import Config
from bapo.config.words import flat, leaves

ROOT = Path(__file__).parents[3]


def test_every_name_leads_to_a_key_that_exists_and_none_is_listed_twice():
    keys = set(leaves(Config))
    assert {known.key for known in NAMES} <= keys | {""}
    assert all(known.remark for known in NAMES if not known.key)
    for column in (0, 1):
        listed = [name.strip() for known in NAMES for name in known[column].split(",") if name]
        assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("learning_rate", "In TRL, learning_rate is what learn.lr is here."),
        ("num_generations", "rollout.responses"),
        ("actor_rollout_ref.actor.ppo_epochs", "In verl, ppo_epochs is what offpolicy.reuse is here."),
        ("rollout.n", "rollout.responses"),
        ("max_prompt_length", "In TRL and verl, max_prompt_length is what task.max_prompt_tokens is here."),
        ("clip_ratio_low", "low = 1 - epsilon"),
        ("learn.beta", "In TRL, beta is what learn.kl is here."),
        ("off_policy_mask_threshold", "In TRL, off_policy_mask_threshold is what learn.opsm is here."),
        ("kl_loss_coef", "In verl, kl_loss_coef is what learn.kl is here."),
        ("use_kl_in_reward", "In verl, use_kl_in_reward is what learn.kl_in_reward is here."),
        ("entropy_coeff", "In verl, entropy_coeff is what learn.entropy is here."),
        ("mask_truncated_completions", "In TRL, mask_truncated_completions is what learn.truncated is here."),
        ("ref_model_sync_steps", "In TRL, ref_model_sync_steps is what learn.kl_reference is here."),
        ("num_iterations", "offpolicy.reuse"),
    ],
)
def test_hints(key, expected, tmp_path, capsys):
    assert expected in hint(key)
    *tables, last = key.split(".")
    (tmp_path / "mine.toml").write_text(f"{'.'.join([*tables, last])} = 3\n")
    if not tables or tables == ["rollout"] or tables == ["learn"]:
        assert run(["train", str(tmp_path / "mine.toml")]) == 2
        of_the_recipe = capsys.readouterr().err
        assert f"{key} is not a known key." in of_the_recipe
        assert expected in of_the_recipe
    assert run(["train", f"--{key.replace('_', '-')}", "3"]) == 2
    assert expected in capsys.readouterr().err or tables == ["actor_rollout_ref", "actor"]


def test_a_name_that_another_table_has_is_meant_itself(capsys):
    assert run(["train", "--lr", "1e-5"]) == 2
    assert "lr is not a known key. Did you mean learn.lr?" in capsys.readouterr().err
    assert hint("no_such_thing") is None


def test_the_page_is_what_the_table_says():
    assert (ROOT / "docs" / "reference" / "names.md").read_text() == runpy.run_path(str(ROOT / "docs" / "names.py"))[
        "page"
    ]() + "\n"


def test_the_page_names_the_defaults_that_are_ours():
    values = dict(flat(Config().model_dump()))
    page = (ROOT / "docs/reference/names.md").read_text()
    page = page.split("## What differs if you set nothing")[1].split("## Names")[0]
    told = re.findall(r"`([a-z_.]+)` ([^`|]+?)(?:,? *(?=[`|]))", page.replace('`model.chat = "no"`', ""))
    shown = {key: text for key, text in told if key in values}
    assert shown.keys() >= {
        "learn.lr",
        "learn.schedule",
        "learn.betas",
        "offpolicy.reuse",
        "rollout.max_tokens",
        "seed",
    }
    for key, text in shown.items():
        value = values[key]
        parts = [float(part) if part.strip()[0].isdigit() else part for part in text.split(", ")]
        assert parts == (list(value) if isinstance(value, tuple | list) else [value]), key
