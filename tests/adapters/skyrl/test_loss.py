"""The loss out of SkyRL's own registry, called as its worker calls it."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("skyrl")

import cloudpickle
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import AlgorithmConfig

from bapo import ClipSettings
from bapo.adapters.skyrl import BapoPolicyLoss, register
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, logged
from tests.adapters.skyrl.load import metrics_in_worker


@pytest.fixture
def registered():
    """A loss under its name in SkyRL's registry, for one test."""
    names = []

    def make(**options):
        names.append(f"bapo-{len(names)}")
        register(names[-1], **options)
        return ppo_utils.PolicyLossRegistry.get(names[-1])

    yield make
    for name in names:
        ppo_utils.PolicyLossRegistry.unregister(name)


def scaled(advantages, mask, reduction):
    """As SkyRL's trainer scales a mini-batch of these tokens."""
    return ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages, mask.float(), reduction, micro_batch_size=len(mask), max_seq_len=mask.shape[1]
    )


def called(loss_fn, batch, *, reduction="token_mean", config=None, old=None, rollout=True):
    """As `PolicyWorkerBase._forward_backward_micro` calls it."""
    logprobs, behavior, advantages, mask = batch
    return loss_fn(
        logprobs,
        behavior + 7.0 if old is None else old,  # not the policy that sampled
        scaled(advantages, mask, reduction),
        config=config or AlgorithmConfig(policy_loss_type="bapo"),
        loss_mask=mask.float(),
        rollout_logprobs=behavior if rollout else None,
    )


@pytest.mark.parametrize("settings", [{"target_share": 0.5}, {"preset": "released-script", "dual_clip": 3.0}])
def test_bounds_loss_and_gradient_are_the_cores(registered, settings):
    batch = logged()
    loss, metrics = called(registered(**settings), batch)
    loss.backward()
    options = {name: settings[name] for name in ("dual_clip",) if name in settings}
    chosen = ClipSettings.preset("released-script") if "preset" in settings else ClipSettings(target_share=0.5)
    out, gradient = core(batch, settings=chosen, **options)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(batch[0].grad, gradient, rtol=0, atol=1e-6)
    for name in ("clip_low", "clip_high", "share", "share_at_start", "share_at_end", "clip_fraction_positive"):
        assert metrics[f"bapo/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-6)
    assert metrics[f"bapo/stop/{StopReason(int(out.bounds.stop)).name.lower()}"] == 1


def test_the_search_of_the_parity_test_is_a_real_one():
    out, _ = core(logged(), settings=ClipSettings(target_share=0.5))
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)


def test_under_sequence_mean_the_loss_is_the_sequence_mean_and_the_share_weighs_responses(registered):
    batch = logged()
    fixed = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
    loss, metrics = called(registered(**fixed), batch, reduction="sequence_mean")
    out, _ = core(batch, settings=ClipSettings(**fixed), reduction="sequence_mean")
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert metrics["bapo/share"] != pytest.approx(out.bounds.share.item(), abs=1e-3)


def test_fixed_bounds_are_skyrls_own_loss(registered):
    batch, behavior = logged(2), logged(2)[1]
    ours, _ = called(registered(low=(0.8, 0.8), high=(1.2, 1.2)), batch)
    regular = AlgorithmConfig(policy_loss_type="regular")
    theirs, _ = called(ppo_utils.PolicyLossRegistry.get("regular"), batch, config=regular, old=behavior)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


def test_micro_batches_add_up_to_the_mini_batch(registered):
    """Padding-only micro-batches included: SkyRL adds them to give every rank the same number."""
    whole = logged()
    fixed = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
    loss_fn, config = registered(**fixed), AlgorithmConfig(policy_loss_type="bapo")
    advantages = scaled(whole[2], whole[3], "token_mean")
    parts = [slice(0, 2), slice(2, 6), slice(0, 2)]
    masks = [whole[3][:2], whole[3][2:], torch.zeros_like(whole[3][:2])]
    losses = [
        loss_fn(whole[0][part], whole[1][part], advantages[part], config, mask.float(), whole[1][part])[0]
        for part, mask in zip(parts, masks, strict=True)
    ]
    out, _ = core(whole, settings=ClipSettings(**fixed))
    assert losses[2] == 0
    assert sum(losses).item() == pytest.approx(out.loss.item(), abs=1e-6)


def test_a_window_solves_from_the_last_calls(registered):
    loss_fn = registered(target_share=0.5, window=2)
    for seed in (2, 5, 4):
        batch = logged(seed)
        _, metrics = called(loss_fn, [*batch[:2], batch[2] * batch[3].sum(), batch[3]])  # what SkyRL divides by
    together = [torch.cat(pair) for pair in zip(logged(5), logged(4), strict=True)]
    out, _ = core(together, settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert metrics["bapo/clip_high"] == out.bounds.high.item()


def test_ratio_to_old_lets_skyrls_correction_weigh_the_signal(registered):
    batch = logged()
    rollout = batch[1] + 0.3 * torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    config = AlgorithmConfig(policy_loss_type="bapo")
    config.off_policy_correction.tis_ratio_type = "token"
    config.off_policy_correction.token_tis_ratio_clip_high = 1.5
    loss_fn = registered(target_share=0.5, ratio_to="old")
    advantages = scaled(batch[2], batch[3], "token_mean")
    loss, metrics = loss_fn(batch[0], batch[1], advantages, config, batch[3].float(), rollout)
    weights = (batch[1] - rollout).exp().clamp(max=1.5)
    out, _ = core([*batch[:2], batch[2] * weights, batch[3]], settings=ClipSettings(target_share=0.5))
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert any("tis" in name for name in metrics)


def test_workers_get_it_by_cloudpickle_with_a_window_of_their_own(registered):
    loss_fn = registered(target_share=0.5, window=3)
    travelled = cloudpickle.loads(cloudpickle.dumps(loss_fn))
    called(loss_fn, logged(2))
    _, metrics = called(travelled, logged())
    out, _ = core(logged(), settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)


def test_a_ray_worker_finds_it_in_skyrls_registry():
    """Registered on the driver, used in another process: what `PolicyWorkerBase.__init__` does."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        register("bapo", target_share=0.5)
        task = ray.remote(metrics_in_worker).remote(*(tensor.detach() for tensor in logged()))
        metrics = ray.get(task, timeout=300)
    finally:
        ray.shutdown()
        ppo_utils.PolicyLossRegistry.unregister("bapo")
    out, _ = core(logged(), settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/clip_high"] == out.bounds.high.item()
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)


def test_refusals_say_what_to_set(registered):
    with pytest.raises(ValueError, match=r"eps_clip_high=0\.28 would be ignored"):
        called(registered(), logged(), config=AlgorithmConfig(eps_clip_high=0.28))
    with pytest.raises(ValueError, match=r"generator\.sampling_params\.logprobs=1"):
        called(registered(), logged(), rollout=False)
    twice = AlgorithmConfig()
    twice.off_policy_correction = dataclasses.replace(twice.off_policy_correction, tis_ratio_type="token")
    with pytest.raises(ValueError, match="would correct twice"):
        called(registered(), logged(), config=twice)
    with pytest.raises(ValueError, match="ratio_to='sampler' is not known"):
        BapoPolicyLoss(ratio_to="sampler")
    with pytest.raises(ValueError, match=r"used_low=1\.0 .* which of its update_epochs_per_batch it is in"):
        BapoPolicyLoss(used_low=1.0)
    with pytest.raises(ValueError, match=r"eps_clip_low=0\.2 is not a clip setting"):
        BapoPolicyLoss(eps_clip_low=0.2)
