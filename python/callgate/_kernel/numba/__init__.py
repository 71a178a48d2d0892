# SPDX-License-Identifier: Apache-2.0
"""Kernels that Numba compiles for the CPU."""
