"""Without CUDA, Triton kernels run under Triton's interpreter. It must be chosen before the first kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
