# SPDX-License-Identifier: Apache-2.0
"""Trains PPO on Gymnasium's CartPole in one compiled program, environments included.

Roll-outs, advantages, epochs of minibatches and updates are one `lax.scan`, in which `callgate.envs`
steps 32 environments a call; a tap tells each episode's length. An episode's last observation comes
before its reset, so what was still to come counts where time ran out (Schulman et al., 2017,
arXiv:1707.06347; Pardo et al., 2018, arXiv:1712.00378).
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries import optimizers

import callgate as cg

ENVS, STEPS, UPDATES, EPOCHS, BATCHES = 32, 32, 200, 10, 4
GAMMA, LAMBDA, CLIP, RATE = 0.98, 0.8, 0.2, 1e-3
episodes = []
environments = cg.envs(lambda: gymnasium.make("CartPole-v1"), n=ENVS, record=episodes.append)
adam = optimizers.adam(lambda step: RATE * (1 - step / (UPDATES * EPOCHS * BATCHES)))


def network(layers, seen):
  for layer in layers[:-1]:
    seen = jnp.tanh(seen @ layer)
  return seen @ layers[-1]


def policy(weights, seen, actions=None, key=None):
  """Actions, which `key` draws where they are not given, and the logarithms of their chances."""
  scores = jax.nn.log_softmax(network(weights["policy"], seen))
  actions = jax.random.categorical(key, scores) if actions is None else actions
  return actions, jnp.take_along_axis(scores, actions[:, None], 1)[:, 0]


def roll_out(weights, state, key):
  """STEPS steps; `counts` is False where a step was the reset after an episode."""

  def one(state, key):
    seen, ended = state
    actions, chance = policy(weights, seen, key=key)
    after, reward, terminated, truncated, _ = environments.step(actions)
    value, later = (network(weights["value"], x)[:, 0] for x in (seen, after))
    surprise = (1 - GAMMA) * reward + GAMMA * jnp.where(terminated, 0, later) - value
    over = terminated | truncated
    return (after, over), (seen, actions, chance, value, surprise, over, ~ended)

  return jax.lax.scan(one, state, jax.random.split(key, STEPS))


def loss(weights, seen, actions, chance, goal, advantage, counts):
  ratio = jnp.exp(policy(weights, seen, actions)[1] - chance)
  advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
  gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
  error = (network(weights["value"], seen)[:, 0] - goal) ** 2
  return jnp.sum((0.5 * error - gain) * counts) / counts.sum()


@jax.jit
def train(weights, key):
  def descend(optimiser, indexed):
    step, batch = indexed
    slope = jax.grad(loss)(adam.params_fn(optimiser), *batch)
    return adam.update_fn(step, slope, optimiser), None

  def one(carry, indexed):
    (state, optimiser), (index, key) = carry, indexed
    state, rolled = roll_out(adam.params_fn(optimiser), state, key)
    *data, value, surprise, over, counts = rolled
    back = lambda later, now: (now[0] + GAMMA * LAMBDA * ~now[1] * later,) * 2
    advantage = jax.lax.scan(back, jnp.zeros(ENVS), (surprise, over), reverse=True)[1]
    data = [x.reshape(-1, *x.shape[2:]) for x in (*data, advantage + value, advantage, counts)]
    draw = lambda key: jax.random.permutation(key, ENVS * STEPS).reshape(BATCHES, -1)
    order = jax.vmap(draw)(jax.random.split(key, EPOCHS)).reshape(EPOCHS * BATCHES, -1)
    steps = index * EPOCHS * BATCHES + jnp.arange(EPOCHS * BATCHES)
    batches = lambda optimiser, at: descend(optimiser, (at[0], [x[at[1]] for x in data]))
    return (state, jax.lax.scan(batches, optimiser, (steps, order))[0]), None

  begin = (environments.reset(key)[0], jnp.zeros(ENVS, bool)), adam.init_fn(weights)
  return jax.lax.scan(one, begin, (jnp.arange(UPDATES), jax.random.split(key, UPDATES)))[0][1]


def main():
  draw = np.random.default_rng(0).normal
  layers = lambda last, scale: [draw(size=(4, 64)) / 2, draw(size=(64, 64)) / 8, draw(size=(64, last)) * scale]
  weights = jax.tree.map(jnp.float32, {"policy": layers(2, 0.01), "value": layers(1, 0.1)})
  jax.block_until_ready(train(weights, jax.random.key(1)))
  cg.barrier()
  lengths = [one["length"] for one in episodes]
  for first in range(0, len(lengths) - 100, len(lengths) // 8):
    print(f"episodes {first:4} to {first + 99:4}: {np.mean(lengths[first : first + 100]):5.1f} steps")
  print(f"the last 100 of {len(lengths)} episodes: {np.mean(lengths[-100:]):.1f} steps of 500")


if __name__ == "__main__":
  main()
