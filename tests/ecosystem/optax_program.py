# SPDX-License-Identifier: Apache-2.0
"""L-BFGS with a transformation that prints each step."""

import jax
import jax.numpy as jnp
import optax


def shows():
  def update(updates, state, params, *, value, grad, **_):
    del params
    jax.debug.print("value {v:.3f}, gradient {g:.3f}", v=value, g=optax.tree.norm(grad))
    return updates, state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def run():
  function = lambda w: jnp.sum(100.0 * (w[1:] - w[:-1] ** 2) ** 2 + (1.0 - w[:-1]) ** 2)
  solver = optax.chain(shows(), optax.lbfgs())
  both = optax.value_and_grad_from_state(function)

  @jax.jit
  def step(params, state):
    value, grad = both(params, state=state)
    updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=function)
    return optax.apply_updates(params, updates), state

  params = jnp.zeros(4)
  state = solver.init(params)
  for _ in range(6):
    params, state = step(params, state)
  return {"params": params}
