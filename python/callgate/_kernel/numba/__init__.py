"""Kernels that Numba compiles for the CPU."""
