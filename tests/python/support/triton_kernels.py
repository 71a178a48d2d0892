# SPDX-License-Identifier: Apache-2.0
"""Kernels for the contract, which Triton compiles from a file's text."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, PLUS: tl.constexpr):
  tl.store(y_ptr, tl.load(x_ptr) + PLUS)
