"""The table of docs/reference/sizes.md is the script's, and its arithmetic that of the optimizer."""

from pathlib import Path

import async_schedule
import cluster_sizes
import memory
import pytest
import torch

from bapo.learn.optimizer import Optimizer
from tests.processes import script

ROOT = Path(__file__).parents[2]


def table(*options):
    result = script(ROOT / "tools" / "memory.py", *options)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_page_shows_what_the_script_prints():
    printed = table()
    assert printed in (ROOT / "docs" / "reference" / "sizes.md").read_text()
    # 0.494 billion parameters, 18 bytes each, in GiB
    assert "| Qwen2.5-0.5B | 0.49 B | 12 KiB | 6.8 GiB | all | 8.3 GiB |" in printed


def test_a_reference_takes_two_more_bytes_where_all_weights_are_trained():
    printed = table("--kl")
    for trained, held in (("all", "9.2 GiB"), ("all, offloaded", "4.1 GiB"), ("LoRA 64", "1.5 GiB")):  # 0.92 GiB more
        assert f"| Qwen2.5-0.5B | 0.49 B | 12 KiB | 6.8 GiB | {trained} | {held} |" in printed


def test_a_trained_16_bit_weight_takes_18_bytes():
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    weight.sum().backward()
    gradients = [master.grad for master in optimizer.masters]
    assert weight.grad is None
    optimizer.step(1e-3)
    moments = [
        moment for moment in optimizer.moments(optimizer.masters[0]).values() if moment.numel() == weight.numel()
    ]
    held = {tensor.data_ptr(): tensor for tensor in [weight, *optimizer.masters, *gradients, *moments]}
    assert sum(tensor.numel() * tensor.element_size() for tensor in held.values()) == 18 * weight.numel()


@pytest.fixture(scope="module")
def sizes():
    return cluster_sizes, memory.MODELS


def test_the_cluster_page_shows_the_tables_of_several_gpus(sizes):
    module, models = sizes
    page = (ROOT / "docs" / "reference" / "sizes.md").read_text()
    assert module.memory_table(models, micro_tokens=16384) in page
    assert module.transfer_table(models) in page
    seven = module.step_table(models, module.LAYOUTS[:1]).splitlines()
    assert len(seven) == 6
    assert all(line in page for line in seven)


def test_a_rank_holds_its_share_of_16_bytes_and_what_is_gathered(sizes):
    module, models = sizes
    shape = models["R1-Distill-Qwen-7B"]
    # hidden 3584, intermediate 18944, 28 query and 4 key heads of 128, biases on query, key and value, two norms
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944 + 3584 + 2 * 512 + 2 * 3584
    root = 2 * 152064 * 3584 + 3584
    assert shape.parameters() == 28 * layer + root
    held = module.rank_bytes(shape, ranks=4, micro_tokens=16384)
    assert held["shards"] == 4 * (28 * layer + root)
    assert held["gathered"] == 4 * layer + 2 * root + 2 * layer + 2 * root


def test_speeds_follow_from_bytes_and_operations(sizes):
    module, models = sizes
    shape = models["R1-Distill-Qwen-7B"]
    parameters = shape.parameters()
    # 15.2 GB of weights at 70% of 3.35 TB/s: 6.5 ms; 28 layers x 2 x 4 heads x 128 x 2 bytes of keys per token
    speeds = module.engine_speeds(shape, 1)
    assert speeds.weights == pytest.approx(2 * parameters / 2.345e12)
    assert speeds.context == pytest.approx(57344 / 2.345e12)
    assert module.learn_speed(shape, 4) == pytest.approx(4 * 0.4 * 989e12 / (8 * parameters))
    # weights in 16 bits: 25 GB/s to the host, 10 GB/s into shared memory; float32 shards of three other ranks by NVLink
    assert module.giving_out(shape, 4) == pytest.approx(2 * parameters * (0.04 + 0.1) / 1e9 + 3 * parameters / 360e9)
    assert module.loading(shape, 1, remote=True) == pytest.approx(2 * parameters * (0.04 + 0.1 + 0.08) / 1e9)


def test_the_simulator_has_the_same_speeds(sizes):
    module, models = sizes
    for layout, known in zip(module.LAYOUTS, async_schedule.MODELS.values(), strict=True):
        shape = models[layout.model]
        speeds = module.engine_speeds(shape, layout.per_engine)
        assert (known["gpus"], known["per_engine"], known["prompts"]) == (
            layout.gpus,
            layout.per_engine,
            layout.prompts,
        )
        assert known["weights"] == pytest.approx(speeds.weights, rel=0.03)
        assert known["response"] == pytest.approx(speeds.response, rel=0.03)
        assert known["context"] == pytest.approx(speeds.context, rel=0.03)
        assert known["learn"] == pytest.approx(module.learn_speed(shape, 1), rel=0.03)
        assert known["gather"] == pytest.approx(module.giving_out(shape, layout.learners), rel=0.03)
        remote = layout.gpus > module.PER_MACHINE
        assert known["load"] == pytest.approx(module.loading(shape, layout.per_engine, remote=remote), rel=0.03)
