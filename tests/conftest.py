"""Without CUDA, Triton kernels run under Triton's interpreter. It must be chosen before the first kernel is defined."""

import os

import pytest
import torch

from tests import compared_runs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Real runs to read; copy them before changing any."""
    return compared_runs.make(tmp_path_factory.mktemp("compared") / "grid")
