"""The loss under verl's own registry: how it gets there, what it computes, what it refuses."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("verl")

import verl
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu

from bapo import ClipSettings
from bapo.adapters.verl import BapoPolicyLossConfig, bapo_policy_loss, hook_engine
from bapo.core.bounds import StopReason
from bapo.core.settings import CLIP_OPTIONS
from tests.adapters.logged import core as core_on
from tests.adapters.logged import logged
from tests.adapters.verl import tiny


def tokens(seed=5):
    """The logged batch under verl's names."""
    return dict(zip(("log_prob", "old_log_prob", "advantages", "response_mask"), logged(seed), strict=True))


def actor(**options):
    """verl's ActorConfig for one loss call of its own."""
    return tiny.actor_config(*tiny.bapo_options(scope="microbatch", **options))


def core(given, advantages=None, **options):
    """The core on the same tokens."""
    advantages = given["advantages"] if advantages is None else advantages
    return core_on((given["log_prob"], given["old_log_prob"], advantages, given["response_mask"]), **options)


@pytest.mark.parametrize(
    ("loaded_by", "environment", "line"),
    [
        ("entry point", {}, "import verl"),
        (
            "VERL_USE_EXTERNAL_MODULES",
            {"VERL_USE_EXTERNAL_MODULES": "bapo.adapters.verl", "VERL_USE_EXTERNAL_PLUGINS": "none"},
            "import verl",
        ),
        (
            "external_lib",
            {"VERL_USE_EXTERNAL_PLUGINS": "none"},
            "from verl.utils.import_utils import import_external_libs; import_external_libs('bapo.adapters.verl')",
        ),
    ],
)
def test_loaded_by_each_of_verls_ways(loaded_by, environment, line):
    check = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get; print(get('bapo').__module__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{line}; {check}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split()[-1:] == ["bapo.adapters.verl"], done.stderr[-2000:]


def test_registered_under_its_name():
    assert get_policy_loss_fn("bapo") is bapo_policy_loss


@pytest.mark.parametrize(
    "settings",
    [{"target_share": 0.5}, {"preset": "paper"}, {"preset": "released-script", "target_share": 0.41}],
)
def test_bounds_loss_and_gradient_are_the_cores(settings):
    given = tokens()
    config = actor(**settings)
    loss, metrics = get_policy_loss_fn("bapo")(**given, loss_agg_mode="token-mean", config=config)
    loss.backward()
    out, gradient = core(given, settings=ClipSettings.from_options(**settings))
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(given["log_prob"].grad, gradient, rtol=0, atol=1e-6)
    for name in ("clip_low", "clip_high", "share", "share_at_start", "share_at_end", "clip_fraction_positive"):
        assert metrics[f"bapo/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-6)


def test_rollout_is_weights_multiply_loss_and_signal():
    given, weights = tokens(1), torch.rand(6, 9, generator=torch.Generator().manual_seed(3)) * 2
    loss, metrics = bapo_policy_loss(**given, config=actor(target_share=0.5), rollout_is_weights=weights)
    loss.backward()
    out, gradient = core(given, given["advantages"] * weights, settings=ClipSettings(target_share=0.5))
    unweighted, _ = core(given, settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert metrics["bapo/share"] != pytest.approx(unweighted.bounds.share.item(), abs=1e-4)
    assert_close(given["log_prob"].grad, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_averaging_is_verls(mode):
    """With bounds fixed at 0.8 and 1.2 and its dual clip, every aggregation equals that of verl's vanilla loss."""
    given = tokens(2)
    fixed = actor(low="[0.8,0.8]", high="[1.2,1.2]", dual_clip=3.0)
    ours, _ = bapo_policy_loss(**given, loss_agg_mode=mode, config=fixed)
    theirs, _ = get_policy_loss_fn("vanilla")(**given, loss_agg_mode=mode, config=tiny.actor_config())
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert agg_loss(torch.ones(6, 9), given["response_mask"], mode) != 0


def test_the_renamed_loss_of_bypass_mode_is_ours_for_our_options_only():
    given = tokens()
    renamed = actor(target_share=0.5)
    object.__setattr__(renamed.policy_loss, "loss_mode", "bypass_mode")
    ignored = torch.full((6, 9), 7.0)  # the ratio itself is to the policy that sampled
    loss, metrics = get_policy_loss_fn("bypass_mode")(
        **given, loss_agg_mode="token-mean", config=renamed, rollout_is_weights=ignored
    )
    out, _ = core(given, settings=ClipSettings(target_share=0.5))
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert metrics["bapo/clip_high"] == out.bounds.high.item()

    _, theirs = get_policy_loss_fn("bypass_mode")(
        **given, loss_agg_mode="token-mean", config=tiny.actor_config(), rollout_is_weights=None
    )
    assert "bapo/clip_high" not in theirs


def test_rejection_sampling_of_bypass_mode_takes_tokens_out():
    given = tokens()
    rollout = "actor_rollout_ref.actor.policy_loss.rollout_correction"
    options = [
        *tiny.bapo_options(scope="microbatch", target_share=0.5),
        f"+{rollout}._target_=verl.trainer.config.RolloutCorrectionConfig",
        f"+{rollout}.bypass_mode=true",
        f"+{rollout}.rollout_rs=token_k1",
        f"+{rollout}.rollout_rs_threshold='0.7_1.5'",
    ]
    _, metrics = bapo_policy_loss(**given, config=tiny.actor_config(*options))
    _, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=given["log_prob"].detach(),
        rollout_log_prob=given["old_log_prob"],
        response_mask=given["response_mask"],
        rollout_rs="token_k1",
        rollout_rs_threshold="0.7_1.5",
    )
    kept = kept.bool()
    assert 0 < kept.sum() < given["response_mask"].sum()
    out, _ = core({**given, "response_mask": kept}, settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)


def test_the_remainder_is_weighed_as_in_the_core():
    given, settings = tokens(), {"target_share": 0.9, "remainder": "weigh"}
    loss, metrics = bapo_policy_loss(**given, loss_agg_mode="token-mean", config=actor(**settings))
    loss.backward()
    out, gradient = core(given, settings=ClipSettings(**settings))
    assert metrics["bapo/negative_weight"] == pytest.approx(out.bounds.negative_weight.item(), abs=1e-6) != 1
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(given["log_prob"].grad, gradient, rtol=0, atol=1e-6)


def test_every_clip_setting_is_an_option():
    ours = {field.name for field in dataclasses.fields(BapoPolicyLossConfig)}
    assert {"objective", "preset", "scope", "dual_clip", *CLIP_OPTIONS} <= ours


def test_refusals_say_what_to_set():
    given = tokens()
    with pytest.raises(ValueError, match=r"_target_=bapo\.adapters\.verl\.BapoPolicyLossConfig"):
        bapo_policy_loss(**given, config=tiny.actor_config("actor_rollout_ref.actor.policy_loss.loss_mode=bapo"))
    with pytest.raises(ValueError, match="scope=microbatch"):
        bapo_policy_loss(**given, config=tiny.actor_config(*tiny.bapo_options(objective="grpo")))
    epsilons = tiny.actor_config(*tiny.bapo_options(), "actor_rollout_ref.actor.clip_ratio_high=0.28")
    with pytest.raises(ValueError, match=r"clip_ratio_high=0\.28 would be ignored"):
        bapo_policy_loss(**given, config=epsilons)
    with pytest.raises(ValueError, match="loss_mode=bapo"):
        BapoPolicyLossConfig(loss_mode="vanilla")
    with pytest.raises(ValueError, match="loss_type=ppo_clip"):
        BapoPolicyLossConfig(rollout_correction={"bypass_mode": True, "loss_type": "reinforce"})
    with pytest.raises(ValueError, match=r"target_share=1\.5 exceeds 1"):
        BapoPolicyLossConfig(target_share=1.5)
    with pytest.raises(ValueError, match="scope='updates' is not known"):
        BapoPolicyLossConfig(scope="updates")


def engine_with(config):
    """verl's own engine class, hooked, as far as a refusal before its first pass needs it."""
    from verl.workers.engine.base import BaseEngine

    hook_engine()
    engine = BaseEngine()
    engine.engine_config = config
    engine.get_data_parallel_group = lambda: None
    return engine


def train(engine, rows=4, **options):
    loss = functools.partial(bapo_policy_loss, config=tiny.actor_config(*tiny.bapo_options(**options)))
    data = tiny.batch()[:rows].clone()
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    return engine.train_batch(data, loss)


def test_engines_whose_bounds_would_not_be_those_of_the_update_are_refused():
    from verl.workers.config.engine import EngineRouterReplayConfig, McoreEngineConfig, VeOmniEngineConfig

    dynamic = McoreEngineConfig(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=64)
    with pytest.raises(ValueError, match=r"dynamic_context_parallel=True.*bounds of its own\. Set .*scope=microbatch"):
        train(engine_with(dynamic))
    recording = VeOmniEngineConfig(router_replay=EngineRouterReplayConfig(mode="R2"))
    with pytest.raises(ValueError, match=r"mode='R2'.*Set .*scope=microbatch, or router_replay\.mode=R3"):
        train(engine_with(recording))
    # What is not refused goes on to verl's own method, which this bare engine does not have.
    replaying = VeOmniEngineConfig(router_replay=EngineRouterReplayConfig(mode="R3"))
    for engine, options in (
        (dynamic, {"scope": "microbatch"}),
        (recording, {"scope": "microbatch"}),
        (recording, {"rows": 2}),
        (replaying, {}),
        (McoreEngineConfig(router_replay=EngineRouterReplayConfig(mode="R2")), {}),
    ):
        with pytest.raises(NotImplementedError):
            train(engine_with(engine), **options)


def test_the_reasons_for_these_refusals_are_still_in_verl():
    engines = Path(verl.__file__).parent / "workers" / "engine"
    dynamic = (engines / "megatron" / "transformer_impl.py").read_text()
    assert "return mpu.get_dynamic_data_context_parallel_groups(group_size=1)" in dynamic
    assert 'and data.get("routed_experts", None) is None' in dynamic  # Megatron records only what it does not have
    recording = (engines / "veomni" / "transformer_impl.py").read_text()
    assert 'if self._router_replay_mode == "R2" and forward_only:' in recording


def test_the_launch_script_is_a_configuration_verl_accepts():
    """Every option of examples/verl_bapo.sh, composed by hydra as `fully_async_main` would."""
    import importlib.resources
    import re
    from pathlib import Path

    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    script = (Path(__file__).parents[3] / "examples" / "verl_bapo.sh").read_text()
    options = re.findall(r"^ {4}(\+?[a-z_.]+=\S+) \\$", script, re.MULTILINE)
    assert len(options) > 40
    folder = importlib.resources.files(verl) / "experimental" / "fully_async_policy" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("fully_async_ppo_trainer", overrides=[re.sub(r"[\"'$]", "", option) for option in options])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, BapoPolicyLossConfig)
    assert actor.policy_loss.clip_settings == ClipSettings.preset("weak-model")
    assert config.async_training.partial_rollout
    assert config.async_training.staleness_threshold == 0.5
