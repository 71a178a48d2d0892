# SPDX-License-Identifier: Apache-2.0
"""Kernels for CUDA: from source, CuPy, Triton and Numba."""
