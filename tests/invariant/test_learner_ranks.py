"""One update by two ranks is the update of one process, though the ranks have different numbers of micro-batches."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from bapo.core.settings import ClipSettings
from bapo.learn.learner import Learner
from bapo.learn.settings import LearnerSettings
from bapo.learn.sft import sft_step
from bapo.types import Group, Problem, Status, Trajectory
from tests.processes import in_ranks
from tests.tiny.models import VOCABULARY, tiny

CLIP = ClipSettings(target_share=0.48, low=(0.8, 0.9), high=(1.05, 1.5))
CLIPS = {"searched": CLIP, "used": replace(CLIP, used_low=1.0), "push-once": ClipSettings.preset("push-once")}


def groups():
    """Six groups of three responses, the first two of them long."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for id in range(6):
        responses = []
        for index in range(3):
            length = (14 if id < 2 else 3) + index
            tokens = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
            logprobs = (-torch.rand(length, generator=generator) * 0.5 - 3).tolist()
            responses.append(
                Trajectory([5, 6], 0, tokens, logprobs, [1.0] * length, [0] * length, Status.STOPPED, float(index == 1))
            )
        made.append(Group(id, Problem(str(id), "", None), responses, uses=id % 2))
    return made


def learner(scope, ranks=None, clip="searched"):
    settings = LearnerSettings(
        clip=CLIPS[clip], scope=scope, reduction="sequence_mean", lr=1e-2, ess_reference=1.0, micro_tokens=40
    )
    return Learner(tiny(), settings, ranks=ranks)


def take_part(rank, directory, split, clip):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    mine = groups()[:split] if rank == 0 else groups()[split:]
    ours = learner("update", dist.group.WORLD, clip)
    update = ours.step(mine)
    torch.save([p.detach() for p in ours.model.parameters()], f"{directory}/{rank}.pt")
    with open(f"{directory}/{rank}.json", "w") as file:
        json.dump(update.metrics | {"version": update.version}, file)
    dist.destroy_process_group()


@pytest.mark.parametrize(("split", "clip"), [(2, "searched"), (6, "searched"), (2, "used"), (2, "push-once")])
def test_two_ranks_take_the_update_of_one_process(split, clip, tmp_path):
    whole = learner("update", clip=clip)
    metrics = whole.step(groups()).metrics
    if clip != "push-once":
        assert metrics["stop"] in (1, 2)  # the search ended inside its path, so that a wrong table would show
    assert metrics["lr"] < 0.9e-2  # the effective sample size is below 1, so that a rank's own would show
    in_ranks(take_part, 2, str(tmp_path), split, clip)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["version"] == 1
        bounds = ("clip_low", "clip_high") if found["tokens"] else ()
        for name in ("grad_norm", "response_ess", "lr", *bounds):
            assert math.isclose(found[name], metrics[name], rel_tol=1e-5), name
        for ours, theirs in zip(torch.load(tmp_path / f"{rank}.pt"), whole.model.parameters(), strict=True):
            assert_close(ours, theirs.detach(), rtol=0, atol=5e-5)


def learn_demonstrations(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    ours = learner("update", dist.group.WORLD)
    sft_step(ours, PAIRS[:1] if rank == 0 else PAIRS[1:])
    torch.save([p.detach() for p in ours.model.parameters()], f"{directory}/{rank}.pt")
    dist.destroy_process_group()


PAIRS = [([5], [7, 8, 9]), ([5, 6], [8] * 30), ([4], [11, 12])]


def test_two_ranks_take_the_supervised_update_of_one_process(tmp_path):
    whole = learner("update")
    sft_step(whole, PAIRS)
    in_ranks(learn_demonstrations, 2, str(tmp_path))
    for rank in range(2):
        for ours, theirs in zip(torch.load(tmp_path / f"{rank}.pt"), whole.model.parameters(), strict=True):
            assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)


def fail_on_one(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    ours = learner("update", dist.group.WORLD)
    mine = groups()[:2]
    if rank == 0:
        mine[0].trajectories[1].behavior_logprobs[3] = math.nan
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ours.step(mine)
    Path(directory, f"{rank}.txt").write_text(f"{caught.value} version {ours.version}")
    dist.destroy_process_group()


def test_bad_input_on_one_rank_ends_the_update_on_all_of_them(tmp_path):
    in_ranks(fail_on_one, 2, str(tmp_path))
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert "behavior_logprobs is nan" in told[0]
    assert "another rank cannot take part" in told[1]
    assert all(text.endswith("version 0") for text in told)
