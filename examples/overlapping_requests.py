# SPDX-License-Identifier: Apache-2.0
"""A Monte Carlo loop that requests each batch from a slow service while it uses the last one.

The service is a coroutine. All requests of a batch run concurrently on one thread.
"""

import asyncio
import time

import jax
import jax.numpy as jnp

import callgate as cg

LATENCY = 0.02  # seconds
BATCH, STEPS = 16, 10


@cg.gate(out=lambda x: x, name="service")
async def payoff(price):
  """A request that takes its time; a call option's payoff."""
  await asyncio.sleep(LATENCY)
  return max(price - 1.0, 0.0) * price.dtype.type(1)


def prices(key):
  """Ends of geometric Brownian paths, computed by the program itself."""
  steps = jax.random.normal(key, (BATCH, 252)) * 0.2 / jnp.sqrt(252) - 0.02 / 252
  return jnp.exp(steps.sum(1))


@jax.jit
def estimate(key):
  keys = jax.random.split(key, STEPS)

  def step(carry, key):
    tickets, total = carry
    following = jax.vmap(payoff.start)(prices(key))  # the next batch is on its way
    return (following, total + tickets.result().mean()), None

  begun = jax.vmap(payoff.start)(prices(keys[0]))
  (last, total), _ = jax.lax.scan(step, (begun, 0.0), keys[1:])
  return (total + last.result().mean()) / STEPS


def directly(key):
  """The same without the service."""
  keys = jax.random.split(key, STEPS)
  return jnp.mean(jax.vmap(lambda k: jnp.maximum(prices(k) - 1, 0).mean())(keys))


key = jax.random.key(0)
estimate(key)  # compiles
begin = time.perf_counter()
value = float(estimate(key))
seconds = time.perf_counter() - begin
print(f"{value:.4f} by {BATCH * STEPS} requests of {LATENCY} s in {seconds:.2f} s")
assert abs(value - float(directly(key))) < 1e-5
cg.barrier()
