# SPDX-License-Identifier: Apache-2.0
"""An environment that a compiled rollout steps."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def run():
  environment = gymnasium.make("CartPole-v1")
  shapes = (jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((), np.float32))

  def reset():
    return np.asarray(environment.reset(seed=3)[0], np.float32)

  def act(action):
    observation, reward, ended, *_ = environment.step(int(action))
    return np.asarray(observation, np.float32), np.float32(0 if ended else reward)

  @jax.jit
  def rollout(weights):
    first = io_callback(reset, shapes[0], ordered=True)

    def step(observation, _):
      action = (observation @ weights > 0).astype(jnp.int32)
      observation, reward = io_callback(functools.partial(act), shapes, action, ordered=True)
      return observation, (reward, action)

    return jax.lax.scan(step, first, length=40)

  last, (rewards, actions) = rollout(jnp.array([0.1, 0.2, 1.0, 0.5]))
  return {"last": last, "rewards": rewards, "actions": actions}
