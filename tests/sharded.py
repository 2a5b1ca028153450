"""Learners alone and on several ranks, for the same groups: what tests of sharded learners share.

With BAPO_RANKS_ON=cuda, all ranks share the first GPU. NCCL refuses two ranks on one device of one host, so each says
that its host is another one; then they talk through sockets, as ranks of several machines do.
"""

import os
from dataclasses import replace

import torch

from bapo.core.settings import ClipSettings
from bapo.learn.fsdp import ShardedLearner, gathered
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.ranks import join, leave
from bapo.models.layers import LoraSettings, add_lora
from bapo.types import Group, Problem, Status, Trajectory
from tests.tiny.models import VOCABULARY, tiny

CPU, DEVICE = torch.device("cpu"), torch.device(os.environ.get("BAPO_RANKS_ON", "cpu"))
CLIP = ClipSettings(target_share=0.48, low=(0.8, 0.9), high=(1.05, 1.5))
SETTINGS = LearnerSettings(clip=CLIP, reduction="sequence_mean", lr=1e-2, ess_reference=1.0, micro_tokens=40)


def with_lora(dtype=torch.float32):
    model = tiny().to(dtype)
    add_lora(model, LoraSettings(rank=4), seed=3)
    with torch.no_grad():  # B starts at zero, and then A has no gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


CASES = {
    "searched": (SETTINGS, tiny),
    "used tokens": (replace(SETTINGS, clip=replace(CLIP, used_low=1.0)), tiny),
    "push once": (replace(SETTINGS, objective="push_once", reduction="token_mean"), tiny),
    "brake": (replace(SETTINGS, objective="brake", sensor="update", options={"delta": 0.5}), tiny),
    "brake, previous": (replace(SETTINGS, objective="brake", options={"delta": 0.5}), tiny),
    "brake beside a search": (replace(SETTINGS, clip=replace(CLIP, brake=0.5), micro_tokens=4096), tiny),
    "weighed": (replace(SETTINGS, clip=replace(CLIP, target_share=0.9, remainder="weigh")), tiny),
    "one micro-batch": (replace(SETTINGS, micro_tokens=4096), tiny),
    "checkpointed": (replace(SETTINGS, activation_checkpointing=True), tiny),
    "tied head": (SETTINGS, lambda: tiny(tie_word_embeddings=True)),
    "biased, untied": (SETTINGS, lambda: tiny("qwen2")),
    "low rank": (replace(SETTINGS, activation_checkpointing=True), with_lora),
    "balanced": (replace(SETTINGS, reduction="balanced", objective="push_once"), tiny),
    "opsm beside a search": (replace(SETTINGS, opsm=0.01), tiny),
    "masked": (replace(SETTINGS, truncated="mask"), tiny),
    "entropy, held": (replace(SETTINGS, entropy=0.5, entropy_target=9.0), tiny),
    "gspo": (replace(SETTINGS, objective="gspo", clip=ClipSettings()), tiny),
    "limited": (replace(SETTINGS, anchor_limit=0.2), tiny),
    "bfloat16": (SETTINGS, lambda: tiny(tie_word_embeddings=True).bfloat16()),
    "low rank, bfloat16": (SETTINGS, lambda: with_lora(torch.bfloat16)),
}


ROUNDED = ("bfloat16", "low rank, bfloat16")


def groups(seed=5, count=6):
    """Groups of three responses. Those of the first two are long, and the longest of them is cut off."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for id in range(count):
        responses = []
        for index in range(3):
            length = (14 if id < 2 else 3) + index
            tokens = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
            status = Status.TRUNCATED if id < 2 and index == 2 else Status.STOPPED
            logprobs = (-torch.rand(length, generator=generator) * 0.5 - 3).tolist()
            responses.append(
                Trajectory([5, 6], 0, tokens, logprobs, [1.0] * length, [0] * length, status, float(index == 1))
            )
        made.append(Group(id, Problem(str(id), "", None), responses, uses=id % 2))
    return made


def overflowing(seed=5):
    """The same, with a reward so large that the gradient norm overflows, unless advantages are scaled."""
    made = groups(seed)
    made[3].trajectories[1].reward = 1e30
    return made


def alone(case="searched", device=DEVICE):
    settings, model = CASES[case]
    return Learner(model().to(device), settings)


def sharded(ranks, case="searched"):
    settings, model = CASES[case]
    dtype = torch.bfloat16 if case in ROUNDED else torch.float32
    return ShardedLearner(model(), settings, ranks=ranks, device=DEVICE, dtype=dtype)


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def gradients(learner):
    """AdamW's first moment of every weight that was updated: 0.1 times the clipped gradient after the first update."""
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    pairs = zip(learner.optimizer.weights, learner.optimizer.masters, strict=True)
    kept = {names[id(weight)]: learner.optimizer.moments(master) for weight, master in pairs}
    return {name: gathered(moments["exp_avg"]).clone() for name, moments in kept.items() if moments}


def joined(rank, size, directory, name="meeting", patience=60.0):
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return join(rank, size, meeting=f"file://{directory}/{name}", device=DEVICE, patience=patience)


__all__ = ["CASES", "ROUNDED", "alone", "gradients", "groups", "joined", "leave", "overflowing", "sharded", "weights"]
