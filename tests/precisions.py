"""The precisions that kernels are tried in.

Triton's interpreter takes its time, so without CUDA one of them must do. tests/gpu/test_precisions_cuda.py runs the
same tests in all of them.
"""

import torch

ON_GPU = torch.cuda.is_available()
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
COARSE = [torch.bfloat16, torch.float16] if ON_GPU else [torch.bfloat16]
