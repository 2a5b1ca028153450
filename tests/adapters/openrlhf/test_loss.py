"""OpenRLHF's own loss at our bounds, and the documented patch on OpenRLHF's own file."""

import ast
import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("openrlhf")

from openrlhf.models.loss import PolicyLoss

from bapo import ClipSettings
from bapo.adapters.openrlhf import policy_loss
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, in_float64, logged, some_unmoved

PAGE = Path(__file__).parents[3] / "docs" / "adapters" / "openrlhf.md"
ACTOR = "openrlhf/trainer/ray/ppo_actor.py"


def called(loss_fn, batch, *, rollout=True, **loss_batch_info):
    """As `ActorPPOTrainer.training_step` calls it; the recomputed log-probs are not the sampler's."""
    logprobs, behavior, advantages, mask = batch
    return loss_fn(
        logprobs,
        behavior + 0.1 if rollout else behavior,
        advantages,
        action_mask=mask.float(),
        rollout_log_probs=behavior if rollout else None,
        **loss_batch_info,
    )


@pytest.mark.parametrize("correction", ["token", "seq"])
@pytest.mark.parametrize("per_token", [True, False])
def test_bounds_loss_and_gradient_are_the_cores(per_token, correction):
    batch = logged()
    loss_fn = policy_loss(target_share=0.5)(token_level_loss=per_token, is_correction_level=correction)
    assert isinstance(loss_fn, PolicyLoss)
    loss, clip_ratio, _, _, filtered = called(loss_fn, batch)
    loss.backward()
    reduction = "token_mean" if per_token else "sequence_mean"
    out, gradient = core(batch, settings=ClipSettings(target_share=0.5), reduction=reduction)
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(batch[0].grad, gradient, rtol=0, atol=1e-6)
    assert clip_ratio.item() == pytest.approx(out.metrics["clip_fraction"].item(), abs=1e-6)
    assert filtered == 0  # to the policy that sampled, OpenRLHF's correction has nothing to correct
    for name in ("clip_low", "clip_high", "share"):
        assert loss_fn.metrics[f"bapo/{name}"].item() == pytest.approx(out.metrics[name].item(), abs=1e-6)


def test_the_authors_settings_with_openrlhfs_dual_clip():
    batch = logged()
    loss, *_ = called(policy_loss("released-script")(dual_clip=3.0, is_correction_level="token"), batch)
    loss.backward()
    out, gradient = core(batch, settings=ClipSettings.preset("released-script"), dual_clip=3.0)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(batch[0].grad, gradient, rtol=0, atol=1e-6)


def test_fixed_bounds_are_openrlhfs_own_loss():
    batch, info = logged(2), {"dp_size": 2, "batch_num_tokens": 60.0, "global_batch_size": 8.0}
    ours = called(policy_loss(low=(0.8, 0.8), high=(1.2, 1.2), ratio_to="old")(), batch, rollout=False, **info)
    theirs = called(PolicyLoss(), batch, rollout=False, **info)
    assert ours[0].item() == pytest.approx(theirs[0].item(), abs=1e-7)
    assert ours[1:] == theirs[1:]


def test_a_window_solves_from_the_last_calls():
    loss_fn = policy_loss(window=2, target_share=0.5)(is_correction_level="token")
    for seed in (2, 5, 4):
        called(loss_fn, logged(seed))
    together = [torch.cat(pair) for pair in zip(logged(5), logged(4), strict=True)]
    out, _ = core(together, settings=ClipSettings(target_share=0.5))
    assert loss_fn.metrics["bapo/share"].item() == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert loss_fn.metrics["bapo/clip_high"] == out.bounds.high


@pytest.mark.parametrize("rule", [{"used_low": 1.0}, {"brake": 0.1}, {"brake": 0.03}], ids=str)
def test_several_epochs_are_those_of_the_core(rule):
    """The learner moves between epochs; from the second one on, every token was trained on before."""
    loss_fn = policy_loss(target_share=0.5, **rule)(is_correction_level="token")
    plain = policy_loss(target_share=0.5)(is_correction_level="token")
    drift = torch.Generator().manual_seed(1)
    for epoch in range(3):
        batch = some_unmoved(logged())
        moved = batch[0].detach() + epoch * 0.1 * torch.randn(6, 9, generator=drift)
        batch = (moved.requires_grad_(), *batch[1:])
        loss_fn.uses = epoch
        loss, *_ = called(loss_fn, batch)
        [gradient] = torch.autograd.grad(loss, batch[0])
        uses = torch.full_like(batch[3], epoch, dtype=torch.int64)
        settings = ClipSettings(target_share=0.5, **rule)
        out, expected = core(in_float64(batch), settings=settings, uses=uses)
        assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
        assert_close(gradient.double(), expected, rtol=0, atol=1e-6)
        assert loss_fn.metrics["bapo/share"].item() == pytest.approx(out.bounds.share.item(), abs=1e-6)
        [without] = torch.autograd.grad(called(plain, batch)[0], batch[0])
        assert torch.equal(gradient, without) == (epoch == 0)


def test_the_brake_looks_at_the_whole_window():
    """An update of two micro-batches: the second one's bounds are those of both together, in float64."""
    loss_fn, seeds = policy_loss(objective="brake", brake=0.2, window=2)(is_correction_level="token"), (5, 4)
    loss_fn.uses = 1
    for seed in seeds:
        batch = some_unmoved(logged(seed))
        loss, *_ = called(loss_fn, batch)
    [gradient] = torch.autograd.grad(loss, batch[0])
    pairs = zip(*(some_unmoved(logged(seed)) for seed in seeds), strict=True)
    together = in_float64([torch.cat(pair) for pair in pairs])
    uses = torch.ones_like(together[3], dtype=torch.int64)
    out, expected = core(together, objective="brake", delta=0.2, uses=uses)
    assert 0.82 < out.bounds.used_low < 1
    assert loss_fn.metrics["bapo/used_low"].item() == pytest.approx(out.bounds.used_low.item(), abs=1e-6)
    share = together[3].sum() / batch[3].sum()  # each loss is divided by its own tokens
    assert_close(gradient.double(), expected[6:] * share, rtol=0, atol=1e-6)


def test_refusals_say_what_to_set():
    with pytest.raises(ValueError, match=r"--actor\.policy_loss_type ppo"):
        policy_loss()(policy_loss_type="gspo")
    with pytest.raises(ValueError, match=r"eps_clip_low_high=0\.2 0\.28 would be ignored"):
        policy_loss()(clip_eps_high=0.28)
    with pytest.raises(ValueError, match=r"--algo\.advantage\.is_correction_level token"):
        called(policy_loss()(), logged(), rollout=False)
    with pytest.raises(ValueError, match="ratio_to='sampler' is not known"):
        policy_loss(ratio_to="sampler")
    with pytest.raises(ValueError, match="remainder='weigh' would be ignored: OpenRLHF's own loss"):
        policy_loss(remainder="weigh")()
    with pytest.raises(ValueError, match=r"used_low=1\.0\) has to know the epoch, but nobody has set `uses`"):
        called(policy_loss(used_low=1.0)(is_correction_level="token"), logged())
    with pytest.raises(ValueError, match=r"policy_loss\(brake=0\.03\) has to know the epoch"):
        called(policy_loss(objective="brake")(is_correction_level="token"), logged())


@pytest.fixture
def patched(tmp_path):
    """OpenRLHF's own actor file with the documented patch applied, as a syntax tree."""
    [folder] = importlib.util.find_spec("openrlhf").submodule_search_locations
    copy = tmp_path / ACTOR
    copy.parent.mkdir(parents=True)
    copy.write_text((Path(folder).parent / ACTOR).read_text())
    [patch] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "bapo.diff").write_text(patch)
    done = subprocess.run(["git", "apply", "bapo.diff"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.parse(copy.read_text())


def test_the_documented_patch_gives_the_actor_our_loss(patched):
    """The lines it adds, and the actor's own lines that build and call a loss, run as they stand."""
    added = [
        node for node in patched.body if "bapo" in ast.unparse(node) or ast.unparse(node).startswith("PolicyLoss =")
    ]
    names = {}
    exec(compile(ast.Module(added, []), "added", "exec"), names)

    def statement(target):
        """The one assignment in the file that starts so."""
        [node] = [
            node
            for node in ast.walk(patched)
            if isinstance(node, ast.Assign) and ast.unparse(node).lstrip("(").startswith(target)
        ]
        return compile(ast.Module([node], []), ACTOR, "exec")

    arguments = SimpleNamespace(eps_clip_low_high=(0.2, 0.2), dual_clip=None, loss_agg_mode="token-mean")
    arguments.policy_loss_type = "ppo"
    correction = SimpleNamespace(is_correction_level="token", is_correction_mode="mask", is_correction_gating="ratio")
    correction.is_correction_threshold = (0.5, 5.0)
    actor = SimpleNamespace(args=SimpleNamespace(actor=arguments, algo=SimpleNamespace(advantage=correction)))
    names["self"] = actor
    exec(statement("self.actor_loss_fn ="), names)

    batch = logged()
    [epochs] = [
        node
        for node in ast.walk(patched)
        if isinstance(node, ast.For) and ast.unparse(node.body[0]) == "self.actor_loss_fn.uses = epoch"
    ]
    assert ast.unparse(epochs).startswith("for epoch in range(self.max_epochs):")
    exec(compile(ast.Module(epochs.body[:1], []), ACTOR, "exec"), {**names, "epoch": 3})
    assert actor.actor_loss_fn.uses == 3

    experience = SimpleNamespace(action_mask=batch[3].float(), rollout_log_probs=batch[1], info={})
    names |= {"action_log_probs": batch[0], "old_action_log_probs": batch[1] + 0.1, "advantages": batch[2]}
    names |= {"experience": experience, "loss_batch_info": {"dp_size": 1, "batch_num_tokens": batch[3].sum()}}
    exec(statement("actor_loss, clip_ratio,"), names)
    [report] = [
        node
        for node in ast.walk(patched)
        if isinstance(node, ast.Expr) and "actor_loss_fn.metrics" in ast.unparse(node)
    ]
    exec(compile(ast.Module([report], []), ACTOR, "exec"), names)

    out, _ = core(batch, objective="brake", uses=torch.full_like(batch[3], 3, dtype=torch.int64))
    assert names["actor_loss"].item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert experience.info["bapo/used_low"].item() == pytest.approx(out.bounds.used_low.item(), abs=1e-6)
    assert all(value.dim() == 0 for value in experience.info.values())  # OpenRLHF then averages them over tokens
