# SPDX-License-Identifier: Apache-2.0
"""Watches a network while one compiled scan trains it: taps to a file and to statistics.

Each step taps the loss and the gradient's norm. Every 25th step also taps each layer's spread of
weights and share of silent units. A tap with `where=` records only the losses that jump.

    python examples/taps_training.py out/taps.jsonl
"""

import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import callgate as cg
from callgate import sinks

SIZES, STEPS, RATE = (64, 96, 48, 10), 1500, 0.2


def init(key):
  keys = jax.random.split(key, len(SIZES) - 1)
  return [
    (jax.random.normal(k, shape) * np.sqrt(2 / shape[0]), jnp.zeros(shape[1]))
    for k, shape in zip(keys, itertools.pairwise(SIZES), strict=True)
  ]


def forward(params, x):
  """(logits, the share of silent units of each hidden layer)."""
  silent = []
  for w, b in params[:-1]:
    x = jax.nn.relu(x @ w + b)
    silent.append(jnp.mean(x == 0))
  return x @ params[-1][0] + params[-1][1], silent


def loss(params, x, y):
  logits, silent = forward(params, x)
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)), silent


@jax.jit
def train(params, x, y):
  def step(carry, key):
    params, before = carry
    rows = jax.random.randint(key, (32,), 0, len(x))
    (value, silent), grads = jax.value_and_grad(loss, has_aux=True)(params, x[rows], y[rows])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    cg.tap({"loss": value, "gradient": norm}, "training", name="step")
    cg.tap(value, "training", name="jump", where=value > 2 * before + 0.1)
    spread = [w.std() for w, _ in params]
    cg.tap({"spread": spread, "silent": silent}, "training", name="layers", every=25)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return (params, 0.9 * before + 0.1 * value), None

  return jax.lax.scan(step, (params, 3.0), jax.random.split(jax.random.key(1), STEPS))[0][0]


def main():
  path = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out/taps.jsonl")
  x, y = load_digits(return_X_y=True)
  x, x_test, y, y_test = train_test_split(x.astype(np.float32) / 16, y, random_state=0)
  stats = sinks.Stats()
  with cg.channel("training", to=[sinks.JSONL(path), stats]) as channel:
    params = train(init(jax.random.key(0)), x, y)
  print(f"{'':18}records      mean       min       max      last")
  for name, one in stats.result().items():
    numbers = (one["mean"], one["min"], one["max"], float(one["last"]))
    print(f"{name:18}{one['records']:7}" + "".join(f"{number:10.4f}" for number in numbers))
  right = np.mean(forward(params, x_test)[0].argmax(1) == y_test)
  print(f"{channel.stats()['delivered']} records in {path.name}; accuracy {right:.3f}")


if __name__ == "__main__":
  main()
