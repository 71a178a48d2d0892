"""Kernels for CUDA: from source, CuPy, Triton and Numba."""
