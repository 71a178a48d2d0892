"""Kernels from C++ source, with CUDA source beside it where there is some."""
