# SPDX-License-Identifier: Apache-2.0
"""Learns to balance Gymnasium's CartPole inside one compiled program.

One ordered gate steps thirty-two environments at once. Rollouts, policy gradient (REINFORCE with a
baseline) and updates are one `lax.scan`. A tap reports how long the poles stay up.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

COUNT, STEPS, UPDATES, RATE = 32, 100, 60, 0.2
environments = gymnasium.make_vec("CartPole-v1", num_envs=COUNT, vectorization_mode="sync")
observations, done = (
  jax.ShapeDtypeStruct((COUNT, 4), np.float32),
  jax.ShapeDtypeStruct((COUNT,), bool),
)
lengths = []


@cg.gate(out=observations, effect="ordered")
def reset(seed):
  return environments.reset(seed=int(seed))[0]


@cg.gate(out=(observations, done), effect="ordered")
def step(actions):
  seen, _, terminated, truncated, _ = environments.step(actions)
  return seen, terminated | truncated


def logits(weights, seen):
  return jnp.tanh(seen @ weights["in"]) @ weights["out"]


def roll_out(weights, seed, key):
  """Observations and actions of STEPS steps, with True where the first episode still ran."""

  def one(state, key):
    seen, alive = state
    after, ended = step(actions := jax.random.categorical(key, logits(weights, seen)))
    return (after, alive & ~ended), (seen, actions, alive)

  return jax.lax.scan(one, (reset(seed), jnp.ones(COUNT, bool)), jax.random.split(key, STEPS))[1]


@jax.jit
def train(weights, key):
  def update(weights, seed):
    seen, actions, alive = roll_out(weights, seed, jax.random.fold_in(key, seed))
    togo = jnp.cumsum(alive[::-1], 0)[::-1].astype(jnp.float32)
    advantage = jnp.where(alive, togo - togo.mean(1, keepdims=True), 0.0) / STEPS

    def objective(weights):
      chosen = jax.nn.log_softmax(logits(weights, seen))
      chosen = jnp.take_along_axis(chosen, actions[..., None], -1)[..., 0]
      return jnp.sum(chosen * advantage) / COUNT

    cg.tap(alive.sum(0).mean(), lengths.append)
    slope = jax.grad(objective)(weights)
    return jax.tree.map(lambda w, s: w + RATE * s, weights, slope), None

  return jax.lax.scan(update, weights, jnp.arange(UPDATES))[0]


def main():
  random = np.random.default_rng(0)
  weights = {"in": random.normal(size=(4, 16)) / 2, "out": random.normal(size=(16, 2)) / 10}
  train(jax.tree.map(jnp.float32, weights), jax.random.key(0))
  cg.barrier()
  for i in range(0, UPDATES, 12):
    print(f"update {i:3}: the pole stays up for {lengths[i]:5.1f} of {STEPS} steps")
  print(f"at the end: {np.mean(lengths[-5:]):.1f}, {environments.num_envs} environments at a time")


if __name__ == "__main__":
  main()
