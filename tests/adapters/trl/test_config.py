"""Options are checked when they are given, and TRL when it is imported."""

import dataclasses
import subprocess
import sys

import pytest

pytest.importorskip("trl")

from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from bapo import ClipSettings
from bapo.adapters.trl import BapoConfig, BapoTrainer, check_trl
from bapo.config.known_names import UNSET
from bapo.core.settings import CLIP_OPTIONS, brake_settings
from tests.adapters.trl.tiny import config, digits, model, prompts, tokenizer


def test_defaults_are_the_cores(tmp_path):
    """The brake, or the search if one of its options is given."""
    assert config(tmp_path).clip_settings == brake_settings()
    assert config(tmp_path, bapo_brake=0.1).clip_settings == brake_settings(delta=0.1)
    assert config(tmp_path, bapo_objective="bapo").clip_settings == ClipSettings()
    assert config(tmp_path, bapo_order="high_first").clip_settings == ClipSettings()
    assert config(tmp_path, bapo_target_share=0.5, bapo_brake=0.1).clip_settings == ClipSettings(
        target_share=0.5, brake=0.1
    )
    assert config(tmp_path).bapo_scope == "update"


@pytest.mark.parametrize("name", ["paper", "weak-model", "released-script"])
def test_presets_are_the_cores_and_single_options_go_on_top(tmp_path, name):
    assert config(tmp_path, bapo_preset=name).clip_settings == ClipSettings.preset(name)
    changed = config(tmp_path, bapo_preset=name, bapo_target_share=0.3, bapo_high=[1.3, 1.5]).clip_settings
    assert (changed.target_share, changed.high) == (0.3, (1.3, 1.5))
    assert changed.low == ClipSettings.preset(name).low


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_sampling_level": "sequence"}, "Set importance_sampling_level='token'"),
        ({"loss_type": "cispo"}, "Use one of grpo, bnpo, dr_grpo, dapo"),
        ({"epsilon": 0.3}, "BAPO chooses both bounds"),
        ({"epsilon_high": 0.28}, r"To clip at these epsilons, write bapo_low=\[0.8, 0.8\], bapo_high=\[1.28, 1.28\]"),
        ({"delta": 2.9, "bapo_preset": "paper"}, r"Set delta >= 3\.0, or end bapo_high at delta"),
        ({"delta": 1.1}, r"delta=1\.1 caps every ratio"),
        ({"bapo_scope": "batch"}, "bapo_scope='batch' is not known"),
        ({"bapo_preset": "papr"}, "Did you mean 'paper'"),
        ({"bapo_preset": "push-once"}, "does not search for bounds. It is an objective: 'push_once'"),
        ({"bapo_objective": "push-once"}, "Did you mean 'push_once'"),
        ({"bapo_objective": "grpo", "bapo_preset": "paper"}, "preset='paper' is of objective='bapo', which searches"),
        (
            {"bapo_objective": "grpo", "bapo_low": [0.6, 0.9]},
            "objective='grpo' does not search. Give two equal numbers",
        ),
        ({"bapo_target_share": 1.4}, "target_share=1.4 exceeds 1"),
        ({"bapo_low": [0.9, 0.6]}, "is not ordered"),
        ({"bapo_high": [1.2]}, "must be a pair"),
        ({"bapo_measure": "loss"}, "Choose one of: gradient, surrogate"),
        ({"bapo_remainder": "weigh"}, r"options bapo_\*: remainder='weigh' would be ignored: TRL's own loss"),
        ({"bapo_remainder": "keep"}, "Choose one of: leave, weigh"),
        ({"bapo_objective": "brake", "bapo_used_low": 1.0}, r"objective='brake' does not: it takes low, high, brake"),
        ({"bapo_brake": -1.0}, r"options bapo_\*: brake=-1\.0 must be a finite number of at least 1e-6"),
        ({"bapo_used_low": 1.2}, r"options bapo_\*: used_low=1\.2 must be a number between 0 and 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_liger_is_allowed_where_trl_applies_only_its_layers(tmp_path, monkeypatch):
    assert config(tmp_path, use_liger_kernel=True).use_liger_kernel
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", GRPOTrainer._compute_loss, raising=False)  # as up to 1.13
    with pytest.raises(ValueError, match=r"use_liger_kernel=True is not supported with TRL .* install TRL 1\.15"):
        config(tmp_path, use_liger_kernel=True)


def test_every_clip_setting_is_an_option(tmp_path):
    ours = {field.name for field in dataclasses.fields(BapoConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
    assert ours == {f"bapo_{name}" for name in ("objective", "preset", *CLIP_OPTIONS, "scope")}
    assert config(tmp_path, bapo_remainder="leave").clip_settings == ClipSettings()
    assert config(tmp_path, bapo_objective="bapo", bapo_brake=0.1, bapo_brake_on="all").clip_settings == ClipSettings(
        brake=0.1, brake_on="all"
    )


def test_a_grpo_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a BapoConfig"):
        BapoTrainer(
            model(), digits, config(tmp_path, GRPOConfig), train_dataset=prompts(), processing_class=tokenizer()
        )


def test_options_work_on_a_command_line(tmp_path):
    flags = (
        f"--output_dir {tmp_path} --bf16 false --use_cpu --bapo_preset paper --bapo_low 0.7 0.9 --bapo_scope microbatch"
        " --bapo_used_low 1"
    )
    (parsed,) = HfArgumentParser(BapoConfig).parse_args_into_dataclasses(flags.split())
    assert parsed.clip_settings == ClipSettings(low=(0.7, 0.9), measure="surrogate", used_low=1.0)
    assert parsed.bapo_scope == "microbatch"
    with pytest.raises(SystemExit):
        HfArgumentParser(BapoConfig).parse_args_into_dataclasses(["--help"])


def test_a_changed_trl_fails_at_import_with_the_tested_versions():
    check_trl(GRPOTrainer, "1.16.0")

    class Changed(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return self.policy_loss(model, inputs)

    with pytest.raises(ImportError, match=r"tested with TRL 1\.16, but TRL 9\.0 is installed.*_compute_loss"):
        check_trl(Changed, "9.0")

    class Older(GRPOTrainer):  # the signature up to TRL 1.6, which returns two values
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False
        ):
            return (input_ids[:, -logits_to_keep:],) * (1 + compute_entropy)

    with pytest.raises(ImportError, match=r"TRL 1\.6 is installed.*_get_per_token_logps_and_entropies.*pip install"):
        check_trl(Older, "1.6")
    with pytest.raises(ImportError, match="get_high_entropy_mask"):
        check_trl(type("Emptied", (GRPOTrainer,), {"get_high_entropy_mask": None}), "9.0")
    script = "import trl; del trl.GRPOTrainer._compute_loss; import bapo.adapters.trl"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: bapo.adapters.trl was tested with TRL 1.16" in done.stderr


def test_without_trl_the_import_says_what_to_install():
    script = "import sys; sys.modules['trl'] = None; import bapo.adapters.trl"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'bapo[trl]'" in done.stderr


def test_the_table_of_names_says_what_trl_does_if_nothing_is_set():
    set_by_trl = {one.name: one.default for one in dataclasses.fields(GRPOConfig)}
    assert {name: set_by_trl[name] for name in UNSET["trl"]} == UNSET["trl"]
