# SPDX-License-Identifier: Apache-2.0
"""Trains Gymnasium's CartPole from four seeds at once, with `jax.vmap` over the whole training.

Each seed has its own vector environment of sixteen lanes. Wrappers in the program normalize the
observations and count episodes. An actor-critic with an entropy bonus learns every sixteen steps.
"""

import gymnasium
import jax
import jax.numpy as jnp
from jax.example_libraries import optimizers

import callgate as cg

ENVS, STEPS, UPDATES, SEEDS = 16, 16, 300, 4
GAMMA, ENTROPY, RATE = 0.98, 0.01, 4e-3
environments = cg.envs(
  lambda: gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync"), vector=True
)
env = cg.envs.normalize_observation(cg.envs.episode_statistics(environments))
adam = optimizers.adam(lambda step: RATE * (1 - step / UPDATES))


def network(layers, seen):
  for weights, bias in layers[:-1]:
    seen = jnp.tanh(seen @ weights + bias)
  return seen @ layers[-1][0] + layers[-1][1]


def loss(layers, seen, actions, goal, counts):
  found = network(layers, seen)
  chances, gain = jax.nn.log_softmax(found[..., :2]), goal - found[..., 2]
  chosen = jnp.take_along_axis(chances, actions[..., None], -1)[..., 0]
  entropy = -(jnp.exp(chances) * chances).sum(-1)
  gains = chosen * jax.lax.stop_gradient(gain) + ENTROPY * entropy - 0.5 * gain**2
  return -(gains * counts).mean()


def train(key):
  *keys, own, begin = jax.random.split(key, 5)
  sizes = zip(keys, [(4, 64), (64, 64), (64, 3)], strict=True)
  first = [(jax.random.normal(k, s) / s[0] ** 0.5, jnp.zeros(s[1])) for k, s in sizes]

  def step(layers, carry, key):
    seen, info, ended = carry
    actions = jax.random.categorical(key, network(layers, seen)[:, :2])
    after, reward, terminated, truncated, info = env.step(actions, info)
    later = GAMMA * (1 - terminated) * network(layers, after)[:, 2]
    over = terminated | truncated
    kept = seen, actions, (1 - GAMMA) * reward, later, over, ~ended  # leaves out resets
    return (after, info, over), (kept, info["episode"]["l"])

  def update(state, indexed):
    (carry, optimizer), (index, key) = state, indexed
    layers = adam[2](optimizer)
    keys = jax.random.split(key, STEPS)
    carry, (kept, lengths) = jax.lax.scan(lambda c, k: step(layers, c, k), carry, keys)
    seen, actions, reward, later, over, counts = kept

    def back(goal, one):  # the return from here on; the critic estimates the rest
      reward, later, over = one
      goal = reward + jnp.where(over, later, 0.95 * GAMMA * goal + 0.05 * later)
      return goal, goal

    goals = jax.lax.scan(back, later[-1] / GAMMA, (reward, later, over), reverse=True)[1]
    slope = jax.grad(loss)(layers, seen, actions, goals, counts)
    return (carry, adam[1](index, slope, optimizer)), (lengths.sum(), (lengths > 0).sum())

  seen, info = env.reset(begin)
  state = (seen, info, jnp.zeros(ENVS, bool)), adam[0](first)
  inputs = jnp.arange(UPDATES), jax.random.split(own, UPDATES)
  return jax.lax.scan(update, state, inputs)[1]


if __name__ == "__main__":
  total, count = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))
  for part in range(0, UPDATES, UPDATES // 5):
    rows = slice(part, part + UPDATES // 5)
    means = total[:, rows].sum(1) / count[:, rows].sum(1)
    print(f"updates {part:3}: mean length", *(f"{mean:5.0f}" for mean in means))
  env.close()
