# SPDX-License-Identifier: Apache-2.0
"""Loops with bars."""

import jax
import jax.numpy as jnp
from jax_tqdm import loop_tqdm, scan_tqdm


def run():
  n = 500

  @scan_tqdm(n)
  def body(carry, i):
    return carry + i, carry

  @loop_tqdm(n)
  def step(i, carry):
    return carry * 0.99 + i

  total, all_ = jax.jit(lambda: jax.lax.scan(body, 0, jnp.arange(n)))()
  return {"total": total, "last": all_[-1], "loop": jax.lax.fori_loop(0, n, step, 0.0)}
