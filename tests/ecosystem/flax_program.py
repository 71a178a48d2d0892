# SPDX-License-Identifier: Apache-2.0
"""Modules of nnx that log while they train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Model(nnx.Module):
  def __init__(self, rngs):
    self.inner = nnx.Linear(3, 1, rngs=rngs)

  def __call__(self, x):
    jax.debug.callback(lambda m: SEEN.append(float(m)), x.mean())
    scaled = jax.pure_callback(lambda x: np.tanh(x), x, x, vmap_method="broadcast_all")
    return self.inner(jax.lax.stop_gradient(scaled))


SEEN = []


def run():
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

  losses = [step(model, optimizer, jnp.full((4, 3), i + 1.0)) for i in range(3)]
  jax.effects_barrier()
  return {"losses": jnp.stack(losses), "seen": sorted(SEEN), "kernel": model.inner.kernel[...]}
