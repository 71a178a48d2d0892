# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy, JAX, PyTorch, CuPy and Numba over XLA's memory, and escaped views."""
