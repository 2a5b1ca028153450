"""Few modules take kernels, and a machine without CUDA never imports one."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[4] / "src" / "bapo"
ON_CPU = """
import sys, torch
from bapo import ClipSettings, bounds_from_table, policy_loss, solve_bounds, token_logprobs, update_table
ones, every = torch.ones(4), torch.ones(4, dtype=torch.bool)
policy_loss(-ones.requires_grad_(), -ones, ones, every).loss.backward()
bounds_from_table(update_table(-ones, -ones, ones, every, ClipSettings()), ClipSettings())
solve_bounds(ones.detach(), ones, every, ClipSettings())
token_logprobs(torch.ones(4, 2), torch.ones(3, 2), torch.zeros(4, dtype=torch.long))
print(sorted(name for name in sys.modules if name.startswith(("bapo.core.kernels.", "triton"))))
"""


def test_a_machine_without_cuda_imports_no_kernel():
    environment = {"PYTHONPATH": str(SOURCES.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ON_CPU], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "[]\n", done.stderr


METHOD = {"core/bounds.py", "core/logprobs.py", "core/loss.py"}
"""Each has the torch code beside its kernels, and asks `usable` which of the two to take."""
LAYERS = {
    "learn/fused/layer.py",
    "learn/fused/linear.py",
    "rollout/cuda/decoder.py",
    "rollout/cuda/kernels/eight_bits.py",
}
"""Layers of sampler and learner, which run on CUDA only and share the kernels of norm and gate."""


def test_only_those_that_choose_and_the_fused_layers_know_the_kernels():
    users = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bapo.core.kernels")
    }
    assert {user for user in users if not user.startswith("core/kernels/")} == METHOD | LAYERS
