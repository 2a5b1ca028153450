"""One logged batch through every adapter whose framework installs on CPU: the bounds, loss and gradient of the core.

Each framework is called where it keeps its losses: through its registry, its class, its trainer or its client. Those
that are not in this environment are skipped; `make test-integrations` has environments for all of them.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings
from bapo.adapters.shared import settings_of
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, in_float64, logged, some_unmoved

SETTINGS = {
    "gradient measure": {"target_share": 0.5},
    "paper": {"preset": "paper"},
    "weak-model": {"preset": "weak-model", "target_share": 0.41},
    "released-script": {"preset": "released-script", "target_share": 0.41},  # low_first, the order of the authors' code
}


def through_verl(batch, options, uses=None):
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from bapo.adapters import verl as adapter
    from tests.adapters.verl import tiny

    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    config = tiny.actor_config(*tiny.bapo_options(scope="microbatch", **options))
    given = dict(zip(names, batch, strict=True))
    reset = adapter._update_under_way.set(adapter._Update(None, uses))
    try:
        return get_policy_loss_fn("bapo")(**given, loss_agg_mode="token-mean", config=config)
    finally:
        adapter._update_under_way.reset(reset)


def through_trinity(batch, options):
    pytest.importorskip("trinity")
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

    names = ("logprob", "old_log_probs", "advantages", "response_mask")
    loss_fn = POLICY_LOSS_FN.get("bapo.adapters.trinity.BapoPolicyLossFn")(backend="verl", **options)
    return loss_fn(**dict(zip(names, batch, strict=True)))


def through_skyrl(batch, options):
    pytest.importorskip("skyrl")
    from tests.adapters.skyrl.load import load_skyrl

    ppo_utils = load_skyrl()
    from skyrl.train.config import AlgorithmConfig

    from bapo.adapters.skyrl import register

    logprobs, behavior, advantages, mask = batch
    advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantages, mask.float(), "token_mean", 6, 9)
    register("bapo-parity", **options)
    try:
        loss_fn = ppo_utils.PolicyLossRegistry.get("bapo-parity")
        return loss_fn(logprobs, None, advantages, AlgorithmConfig(), mask.float(), behavior)
    finally:
        ppo_utils.PolicyLossRegistry.unregister("bapo-parity")


def through_openrlhf(batch, options, uses=None):
    pytest.importorskip("openrlhf")
    from tests.adapters.openrlhf.load import load_openrlhf

    load_openrlhf()
    from bapo.adapters.openrlhf import policy_loss

    logprobs, behavior, advantages, mask = batch
    loss_fn = policy_loss(**options)(is_correction_level="token")
    loss_fn.uses = uses
    loss, *_ = loss_fn(logprobs, behavior, advantages, mask.float(), rollout_log_probs=behavior)
    return loss, {name: value.item() for name, value in loss_fn.metrics.items()}


def through_tinker(batch, options, uses=None):
    pytest.importorskip("tinker")
    from tinker import types

    from bapo.adapters.tinker import bapo_loss

    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([0] * len(mask)),
            loss_fn_inputs={"logprobs": behavior, "advantages": advantages, "mask": mask.float()}
            | ({} if uses is None else {"uses": torch.full_like(mask, uses, dtype=torch.int64)}),
        )
        for behavior, advantages, mask in zip(*batch[1:], strict=True)
    ]
    return bapo_loss(**options)(data, list(batch[0]))


def through_areal(batch, options, uses=None):
    """AReaL's own loss function; its engine is in tests/adapters/areal."""
    pytest.importorskip("areal")
    from areal.trainer.ppo.actor import grpo_loss_fn

    from bapo.adapters.areal import WithinBounds

    losses = []

    class OneBatch:
        device, data_parallel_group = torch.device("cpu"), None

        def eval_batch(self, data, loss_fn, loss_weight_fn):
            loss_fn(batch[0].detach(), torch.zeros(6, 9), data)

        def train_batch(self, data, loss_fn, loss_weight_fn):
            losses.append(loss_fn(batch[0], torch.zeros(6, 9), data))
            return {}

    class Engine(WithinBounds, OneBatch):
        clip_settings = settings_of(**options)

    data = {"logprobs": batch[1], "prox_logp": batch[1], "advantages": batch[2], "loss_mask": batch[3]}
    if uses is not None:
        data["uses"] = torch.full_like(batch[3], 0, dtype=torch.int64) + uses
    loss_fn = functools.partial(grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
    ours = not torch.distributed.is_initialized()
    if ours:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        metrics = Engine().train_batch(data, loss_fn, None)
    finally:
        if ours:
            torch.distributed.destroy_process_group()
    return losses[0], metrics


class Logged(torch.nn.Module):
    """In the model's place: the logged log-probs, as TRL asks a model for them."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = logprobs

    def forward(self, input_ids, **kwargs):
        return SimpleNamespace(log_probs=self.logprobs, entropy=torch.zeros(6, 9))


def through_trl(batch, options, uses=None):
    pytest.importorskip("trl")
    import tempfile

    from tests.adapters.trl import tiny

    logprobs, behavior, advantages, mask = batch
    with tempfile.TemporaryDirectory() as out:
        single = {"per_device_train_batch_size": 6, "num_generations": 2, "gradient_accumulation_steps": 1}
        args = tiny.config(out, loss_type="bnpo", **single, **{f"bapo_{name}": x for name, x in options.items()})
        words, data = tiny.tokenizer(), tiny.prompts()
        trainer = tiny.BapoTrainer(tiny.model(), tiny.digits, args, train_dataset=data, processing_class=words)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._step = trainer._update.first = uses or 0  # one micro-batch to a generation
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.ones(6, 9, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": behavior,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(Logged(logprobs), inputs)
    trainer._log_update()
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


FRAMEWORKS = {
    "verl": through_verl,
    "trinity": through_trinity,
    "skyrl": through_skyrl,
    "openrlhf": through_openrlhf,
    "tinker": through_tinker,
    "areal": through_areal,
    "trl": through_trl,
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bounds_loss_and_gradient_are_the_cores(framework, settings):
    batch = logged()
    loss, metrics = FRAMEWORKS[framework](batch, SETTINGS[settings])
    [gradient] = torch.autograd.grad(loss, batch[0])
    out, expected = core(batch, settings=ClipSettings.from_options(**SETTINGS[settings]))
    assert metrics["bapo/clip_low"] == pytest.approx(out.bounds.low.item(), abs=1e-6)
    assert metrics["bapo/clip_high"] == pytest.approx(out.bounds.high.item(), abs=1e-6)
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_search_moves_a_bound(settings):
    out, _ = core(logged(), settings=ClipSettings.from_options(**SETTINGS[settings]))
    assert StopReason(int(out.bounds.stop)) not in (StopReason.START, StopReason.NO_SIGNAL)


def test_the_order_of_the_search_matters():
    options = SETTINGS["released-script"]
    low_first, _ = core(logged(), settings=ClipSettings.from_options(**options))
    high_first, _ = core(logged(), settings=ClipSettings.from_options(**options, order="high_first"))
    assert low_first.bounds.low != high_first.bounds.low


HONOURING = ("verl", "openrlhf", "tinker", "areal", "trl")
"""Frameworks whose hook knows how often a token was trained on."""


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("framework", HONOURING)
def test_used_tokens_are_clipped_as_in_the_core(framework, settings):
    batch, options = some_unmoved(logged()), {**SETTINGS[settings], "used_low": 1.0}
    loss, metrics = FRAMEWORKS[framework](batch, options, uses=1)
    [gradient] = torch.autograd.grad(loss, batch[0])
    used = torch.ones_like(batch[3], dtype=torch.int64)
    out, expected = core(in_float64(batch), settings=ClipSettings.from_options(**options), uses=used)
    assert metrics["bapo/clip_low"] == pytest.approx(out.bounds.low.item(), abs=1e-6)
    assert metrics["bapo/clip_high"] == pytest.approx(out.bounds.high.item(), abs=1e-6)
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(gradient.double(), expected, rtol=0, atol=1e-6)
    at_the_bound = batch[3] & (batch[0] == batch[1]) & (batch[2] < 0)
    assert at_the_bound.sum() > 3
    assert (gradient[at_the_bound] == 0).all()


BRAKED = {"half": (5, 0.1), "fully": (5, 0.03), "not": (1, 0.03)}
"""How far the brake goes -> the seed of the batch, whose negative tokens have fallen by 0.05 or risen, and delta."""


@pytest.mark.parametrize("how_far", BRAKED)
@pytest.mark.parametrize("framework", HONOURING)
def test_the_brake_on_used_tokens_is_the_cores(framework, how_far):
    seed, delta = BRAKED[how_far]
    batch = some_unmoved(logged(seed))
    loss, metrics = FRAMEWORKS[framework](batch, {"objective": "brake", "brake": delta}, uses=1)
    used = torch.ones_like(batch[3], dtype=torch.int64)
    out = assert_the_cores(batch, loss, metrics, objective="brake", delta=delta, uses=used)
    assert metrics["bapo/clip_low"] == pytest.approx(0.8)
    assert metrics["bapo/used_low"] == pytest.approx(out.bounds.used_low.item(), abs=1e-6)
    assert_as_far(how_far, out.bounds.used_low.item())


@pytest.mark.parametrize("how_far", BRAKED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_brake_on_all_tokens_is_the_cores(framework, how_far):
    seed, delta = BRAKED[how_far]
    batch = some_unmoved(logged(seed))
    loss, metrics = FRAMEWORKS[framework](batch, {"objective": "brake_all", "brake": delta})
    out = assert_the_cores(batch, loss, metrics, objective="brake_all", delta=delta)
    assert metrics["bapo/clip_low"] == pytest.approx(out.bounds.low.item(), abs=1e-6)
    assert_as_far(how_far, out.bounds.low.item())


def assert_the_cores(batch, loss, metrics, **options):
    """Loss, gradient, share and drift are those of the core in float64, which is given back."""
    [gradient] = torch.autograd.grad(loss, batch[0])
    out, expected = core(in_float64(batch), **options)
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert metrics["bapo/drift"] == pytest.approx(out.bounds.drift.item(), abs=1e-6)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(gradient.double(), expected, rtol=0, atol=1e-6)
    return out


def assert_as_far(how_far, low):
    assert {"half": 0.85 < low < 0.95, "fully": low == 1, "not": low == pytest.approx(0.8)}[how_far]


@pytest.mark.parametrize("framework", HONOURING)
def test_the_brake_on_fresh_tokens_is_grpo_bit_for_bit(framework):
    results = []
    for objective, uses in (("brake", 0), ("grpo", None)):
        batch = some_unmoved(logged())
        loss, metrics = FRAMEWORKS[framework](batch, {"objective": objective}, uses=uses)
        for name, expected in {"bapo/drift": 0.0, "bapo/used_low": pytest.approx(0.8)}.items():
            if objective == "brake":
                assert metrics.pop(name) == expected
        results.append((loss.item(), torch.autograd.grad(loss, batch[0])[0].tolist(), metrics))
    assert results[0] == results[1]


@pytest.mark.parametrize("framework", HONOURING)
def test_fresh_tokens_are_clipped_as_without_the_rule_bit_for_bit(framework):
    results = []
    for rule, uses in (({"used_low": 1.0}, 0), ({}, None)):
        batch = logged()
        loss, metrics = FRAMEWORKS[framework](batch, {**SETTINGS["weak-model"], **rule}, uses=uses)
        results.append((loss.item(), torch.autograd.grad(loss, batch[0])[0].tolist(), metrics))
    assert results[0] == results[1]


@pytest.mark.parametrize("rule", [{"used_low": 1.0}, {"brake": 0.2}], ids=str)
def test_areal_clips_fresh_and_used_tokens_of_one_micro_batch(rule):
    batch, uses = some_unmoved(logged()), torch.arange(6)[:, None] % 3
    options = {"target_share": 0.5, **rule}
    loss, metrics = through_areal(batch, options, uses=uses)
    [gradient] = torch.autograd.grad(loss, batch[0])
    out, expected = core(in_float64(batch), settings=ClipSettings(**options), uses=uses.expand(6, 9))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert_close(gradient.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name not in HONOURING])
@pytest.mark.parametrize(
    ("options", "rule"), [({"used_low": 1.0}, r"used_low=1\.0"), ({"objective": "brake"}, r"brake=0\.03")]
)
def test_frameworks_that_do_not_tell_the_uses_refuse_the_rule(framework, options, rule):
    with pytest.raises(ValueError, match=f"{rule} sets a bound for tokens that were trained on before, but.*brake_all"):
        FRAMEWORKS[framework](logged(), options)
