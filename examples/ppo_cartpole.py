# SPDX-License-Identifier: Apache-2.0
"""Trains PPO on Gymnasium's CartPole in one compiled program, environments included.

Rollouts and updates are one `lax.scan`, in which `callgate.envs` steps 32 environments per call. A
tap reports the episodes. Proximal policy optimization: Schulman et al., 2017, arXiv:1707.06347.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries import optimizers

import callgate as cg

ENVS, STEPS, UPDATES, EPOCHS, BATCHES = 32, 32, 120, 4, 4
GAMMA, LAMBDA, CLIP, RATE = 0.99, 0.95, 0.2, 2e-3
episodes = []
environments = cg.envs(lambda: gymnasium.make("CartPole-v1"), n=ENVS, record=episodes.append)
adam = optimizers.adam(lambda step: RATE * (1 - step / (UPDATES * EPOCHS * BATCHES)))


def network(layers, seen):
  seen = jnp.concatenate([seen, jnp.ones((len(seen), 1))], 1)  # the first layer's bias
  return jnp.tanh(jnp.tanh(seen @ layers[0]) @ layers[1]) @ layers[2]


def chance(weights, seen, actions):
  return jax.nn.log_softmax(network(weights["policy"], seen))[jnp.arange(len(seen)), actions]


def roll_out(weights, state, key):
  def one(state, key):
    seen, ended = state
    actions = jax.random.categorical(key, network(weights["policy"], seen))
    after, reward, terminated, truncated, _ = environments.step(actions)
    value, later = (network(weights["value"], x)[:, 0] for x in (seen, after))
    surprise = (1 - GAMMA) * reward + GAMMA * jnp.where(terminated, 0, later) - value
    over, before = terminated | truncated, chance(weights, seen, actions)
    return (after, over), (seen, actions, before, value, surprise, over, ~ended)  # no resets

  return jax.lax.scan(one, state, jax.random.split(key, STEPS))


def loss(weights, seen, actions, before, goal, advantage, counts):
  ratio = jnp.exp(chance(weights, seen, actions) - before)
  scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
  gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled)
  return jnp.mean(((network(weights["value"], seen)[:, 0] - goal) ** 2 - gain) * counts)


@jax.jit
def train(weights, key):
  def update(carry, indexed):
    (state, optimizer), (index, key) = carry, indexed
    state, (*data, value, surprise, over, counts) = roll_out(adam[2](optimizer), state, key)
    steps = surprise, GAMMA * LAMBDA * ~over
    gains = jax.lax.scan(lambda a, x: (x[0] + x[1] * a,) * 2, 0 * value[0], steps, reverse=True)[1]
    data = [x.reshape(-1, *x.shape[2:]) for x in (*data, gains + value, gains, counts)]
    orders = [jax.random.permutation(one, ENVS * STEPS) for one in jax.random.split(key, EPOCHS)]
    rows = jnp.concatenate(orders).reshape(EPOCHS * BATCHES, -1)

    def descend(optimizer, step):
      slope = jax.grad(loss)(adam[2](optimizer), *(x[rows[step]] for x in data))
      return adam[1](index * len(rows) + step, slope, optimizer), None

    return (state, jax.lax.scan(descend, optimizer, jnp.arange(len(rows)))[0]), None

  begin = (environments.reset(key)[0], jnp.zeros(ENVS, bool)), adam[0](weights)
  return jax.lax.scan(update, begin, (jnp.arange(UPDATES), jax.random.split(key, UPDATES)))[0][1]


if __name__ == "__main__":
  normal = np.random.default_rng(0).normal
  shapes = {"policy": [(5, 64), (64, 64), (64, 2)], "value": [(5, 64), (64, 64), (64, 1)]}
  weights = {k: [np.float32(normal(size=s) / s[0] ** 0.5) for s in v] for k, v in shapes.items()}
  jax.block_until_ready(train(weights, jax.random.key(1)))
  cg.barrier()
  for first in (*range(0, len(episodes) - 100, 60), len(episodes) - 100):
    mean = np.mean([one["length"] for one in episodes[first : first + 100]])
    print(f"episodes {first:3} to {first + 99:3} of {len(episodes)}: {mean:5.1f} steps")
