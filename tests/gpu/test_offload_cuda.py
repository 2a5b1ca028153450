"""An optimizer whose masters and moments are on the host: the bits of one on the device, in less memory."""

import gc

import pytest
import torch
from torch.nn import Linear

from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.optimizer import LANES, PART, FlatOptimizer
from tests.tiny.batches import flat_batch, on_cuda
from tests.tiny.models import tiny
from tests.tiny.optimizers import tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
WIDTH = 8192  # of a matrix with 2^26 numbers: four parts, and a bias that does not decay, in a fifth


def matrix():
    torch.manual_seed(0)
    return Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)


def test_long_vectors_on_their_way_give_the_bits_of_those_on_the_device():
    optimizers = [FlatOptimizer(matrix().parameters(), offload=offload, **OPTIONS) for offload in (False, True)]
    generator = torch.Generator("cuda").manual_seed(0)
    for update in range(3):
        norms = []
        drawn = [torch.randn(w.shape, generator=generator, device="cuda") for w in optimizers[0].weights]
        for optimizer in optimizers:
            for weight, gradient in zip(optimizer.weights, drawn, strict=True):
                weight.main_grad.copy_(gradient)
            norms.append(optimizer.clip(0.5 if update else 1e9))
            optimizer.step(1e-3)
        assert torch.equal(*norms)
        resident, offloaded = map(tensors_of, optimizers)
        assert resident.keys() == offloaded.keys()
        assert {tensor.device.type for tensor in offloaded.values()} == {"cpu"}
        assert all(torch.equal(resident[name].cpu(), tensor) for name, tensor in offloaded.items())
        assert all(torch.equal(*pair) for pair in zip(*(o.weights for o in optimizers), strict=True))


def test_it_leaves_6_of_18_bytes_on_the_device():
    def held(offload):
        gc.collect()
        before = torch.cuda.memory_allocated()
        kept = FlatOptimizer(matrix().parameters(), offload=offload, **OPTIONS)
        return torch.cuda.memory_allocated() - before, kept

    numbers = WIDTH * (WIDTH + 1)
    resident, offloaded = (held(offload)[0] for offload in (False, True))
    assert resident == pytest.approx(18 * numbers, rel=1e-3)
    assert offloaded == pytest.approx(6 * numbers + LANES * 3 * 4 * PART, rel=1e-3)


def test_a_learner_with_it_takes_the_same_updates_and_either_goes_on_from_the_other(tmp_path):
    def learner(offload):
        model = tiny("qwen2", hidden_size=256, head_dim=64).bfloat16().cuda()
        return Learner(model, LearnerSettings(lr=1e-3, micro_tokens=120, offload_optimizer=offload))

    def updates(one, seeds):
        return [one.step_on([on_cuda(flat_batch([40, 30, 20], seed))]).metrics["loss"] for seed in seeds]

    resident, offloaded = learner(False), learner(True)
    assert updates(resident, range(3)) == updates(offloaded, range(3))
    assert resident.fingerprint() == offloaded.fingerprint()
    for name, one in (("resident", resident), ("offloaded", offloaded)):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
    saved = [(tmp_path / name / "shard-00001.safetensors").read_bytes() for name in ("resident", "offloaded")]
    assert saved[0] == saved[1]
    changed = learner(True), learner(False)
    for one, name in zip(changed, ("resident", "offloaded"), strict=True):
        one.load(tmp_path / name, version=3)
    expected = updates(resident, range(3, 5))
    assert [updates(one, range(3, 5)) for one in changed] == [expected, expected]
    assert {one.fingerprint() for one in changed} == {resident.fingerprint()}


def test_a_run_with_it_is_the_run_without_it(tmp_path):
    from bapo.train.run import start

    for offload in (False, True):
        values = {
            "steps": 2,
            "device": "cuda",
            "out": str(tmp_path / str(offload)),
            "model": {"dtype": "bfloat16"},
            "rollout": {"prompts": 8, "responses": 4},
            "learn": {"batch_groups": 8, "offload_optimizer": offload},
            "eval": {"problems": 8, "k": 2, "every": 0},
        }
        start(parse(Config, values, source="test"), plain=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes(), name
