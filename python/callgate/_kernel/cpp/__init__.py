# SPDX-License-Identifier: Apache-2.0
"""Kernels from C++ source, with CUDA source beside it where there is some."""
