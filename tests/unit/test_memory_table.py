"""The table of docs/hardware.md is the script's, and its arithmetic that of the optimizer."""

from pathlib import Path

import torch

from bapo.learn.optimizer import Optimizer
from tests.processes import script

ROOT = Path(__file__).parents[2]


def table():
    result = script(ROOT / "benchmarks" / "memory.py")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_page_shows_what_the_script_prints():
    printed = table()
    assert printed in (ROOT / "docs" / "hardware.md").read_text()
    # 0.494 billion parameters, 18 bytes each, in GiB
    assert "| Qwen2.5-0.5B | 0.49 B | 12 KiB | 6.8 GiB | all | 8.3 GiB |" in printed


def test_a_trained_16_bit_weight_takes_18_bytes():
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    weight.sum().backward()
    gradients = [master.grad for master in optimizer.masters]
    assert weight.grad is None
    optimizer.step(1e-3)
    moments = [tensor for name, tensor in optimizer.tensors().items() if tensor.numel() == weight.numel()]
    held = {tensor.data_ptr(): tensor for tensor in [weight, *optimizer.masters, *gradients, *moments]}
    assert sum(tensor.numel() * tensor.element_size() for tensor in held.values()) == 18 * weight.numel()
