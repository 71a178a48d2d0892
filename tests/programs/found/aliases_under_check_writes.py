# SPDX-License-Identifier: Apache-2.0
"""`check_writes` took a result in an argument's memory for a write to the argument."""

import jax
import numpy as np

import callgate as cg


@cg.gate(out=lambda x: x, style="inplace", aliases={0: 0})
def half(out, x):
  out[...] = out * 0.5


with cg.config(check_writes=True):
  assert jax.jit(half)(np.float32(3)) == 1.5
