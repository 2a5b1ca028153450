"""Triton kernels of the fused layers: everything in a pass, and in the step after it, that is not a matrix product."""
