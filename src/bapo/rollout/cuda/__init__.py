"""The engine for NVIDIA GPUs: CUDA graphs over a decoder of our own."""
