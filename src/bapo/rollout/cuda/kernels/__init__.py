"""Triton kernels of the CUDA engine: the parts of a decoding step that are not matrix products."""
