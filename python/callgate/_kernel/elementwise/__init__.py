"""Kernels from the code of one element, on the CPU and on CUDA."""
