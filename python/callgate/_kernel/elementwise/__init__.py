# SPDX-License-Identifier: Apache-2.0
"""Kernels from the code of one element, on the CPU and on CUDA."""
