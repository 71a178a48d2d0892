# SPDX-License-Identifier: Apache-2.0
"""Hamiltonian Monte Carlo with a progress bar."""

import blackjax
import jax
import jax.numpy as jnp
from blackjax.util import run_inference_algorithm


def run():
  density = lambda x: -0.5 * jnp.sum(x**2)
  sampler = blackjax.hmc(density, 0.1, jnp.ones(2), 5)
  with blackjax.progress_bar(print_rate=5):
    _, (states, _) = run_inference_algorithm(
      rng_key=jax.random.key(0), initial_position=jnp.ones(2), inference_algorithm=sampler,
      num_steps=50,
    )  # fmt: skip
  return {"positions": states.position}
