# SPDX-License-Identifier: Apache-2.0
"""Kernels from code for one element, on the CPU and on CUDA."""
