"""learn.kl on CUDA: the reference stays where the run began, in both precisions, and a resumed run is the whole run."""

import copy
from dataclasses import replace

import pytest
import torch

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.reference import Reference, initial
from bapo.models.layers import LoraSettings, add_lora
from tests.tiny.models import tiny
from tests.tiny.runs import assert_resumes_bit_for_bit
from tests.unit.learn.test_learner import sampled_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SETTINGS = LearnerSettings(objective="grpo", temperature=0.8, lr=1e-3, kl=0.5, micro_tokens=60)
WAYS = [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)]


def model_of(lora, dtype):
    start = tiny("qwen2", vocab_size=64, initializer_range=0.1).to("cuda", dtype)
    plain = copy.deepcopy(start).double()
    if lora:
        add_lora(start, LoraSettings(rank=4), seed=1)
    return start, plain


def learner_of(start, settings=SETTINGS):
    kept = initial(start)
    learner = Learner(start, settings)
    learner.reference = Reference(kept, learner.whole, settings)
    return learner


@torch.no_grad()
def exact_logprobs(plain, trajectory):
    """From the logits of the initial weights in float64."""
    sequence = torch.tensor([trajectory.prompt + trajectory.tokens], device="cuda")
    table = (plain(sequence).logits[0] / SETTINGS.temperature).log_softmax(-1)
    begin = len(trajectory.prompt)
    return table[torch.arange(begin - 1, len(table) - 1), sequence[0, begin:]].cpu()


def responses_of(groups):
    return [trajectory for group in groups for trajectory in group.trajectories]


@pytest.mark.parametrize(("lora", "dtype"), WAYS)
def test_log_probs_stay_those_of_the_initial_weights_while_the_policy_moves(lora, dtype):
    start, plain = model_of(lora, dtype)
    learner = learner_of(start)
    assert learner.packed == (dtype == torch.bfloat16)
    for version in range(4):
        groups = sampled_groups(start, version=version)
        learner.step(groups)
    known = torch.cat([torch.tensor(t.reference_logprobs) for t in responses_of(groups)]).double()
    exact = torch.cat([exact_logprobs(plain, t) for t in responses_of(groups)])
    now = torch.cat([exact_logprobs(copy.deepcopy(start).double(), t) for t in responses_of(groups)])
    error, moved = (known - exact).abs().mean(), (now - exact).abs().mean()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)
    assert moved > 3 * error


@pytest.mark.parametrize(("lora", "dtype"), WAYS)
def test_at_the_start_the_policy_is_its_reference_bit_for_bit(lora, dtype):
    start, _ = model_of(lora, dtype)
    learner = learner_of(start, replace(SETTINGS, micro_tokens=10_000))
    groups = sampled_groups(start)
    assert learner.step(groups).metrics["kl_reference"] == 0
    assert learner.step(groups).metrics["kl_reference"] > 0


@pytest.mark.parametrize("more", [{}, {"kl_reference": "every 3", "kl_in_reward": 0.02, "entropy": 0.01}])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_resumes_bit_for_bit(rank, more, tmp_path):
    assert_resumes_bit_for_bit(
        tmp_path,
        device="cuda",
        model={"dtype": "bfloat16", "lora": {"rank": rank}},
        rollout={"prompts": 8},
        learn={"batch_groups": 8, "micro_tokens": 1000, "kl": 0.1, **more},
        eval={"problems": 8},
    )
