# SPDX-License-Identifier: Apache-2.0
"""Trains a classifier four times, as four runs that the page of runs compares.

A network learns scikit-learn's digits. Each run keeps its loss and accuracy, its first weights as
pictures and a text about the test set. The last run's learning rate is too high: an alert reports
it and a check stops the run. `python -m callgate watch runs` shows all four.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import callgate as cg

STEPS, BATCH, LOOK = 200, 128, 20
RUNS = {"wide": (0.5, 128), "narrow": (0.5, 16), "slow": (0.05, 128), "too fast": (1e30, 128)}


def logits(params, x):
  return jax.nn.relu(x @ params[0]) @ params[1]


def loss_of(params, x, y):
  return -jnp.mean(jax.nn.log_softmax(logits(params, x))[jnp.arange(len(y)), y])


@jax.jit
def step(params, x, y, rate, i):
  loss, slopes = jax.value_and_grad(loss_of)(params, x, y)
  cg.tap(loss, "loss")
  cg.tap(jnp.mean(jnp.argmax(logits(params, x), 1) == y), "accuracy")
  cg.alert(~jnp.isfinite(loss), "the loss is {loss} at step {i}", loss=loss, i=i)
  cg.check(jnp.isfinite(loss), "expected a finite loss, got {loss}", loss=loss)
  return jax.tree.map(lambda p, slope: p - rate * slope, params, slopes)


@jax.jit
def look(params, x, y, i):
  weights = params[0].T[:16].reshape(-1, 8, 8)
  cg.tap(0.5 + weights / (2 * jnp.abs(weights).max()), "weights", kind="image")
  right = jnp.mean(jnp.argmax(logits(params, x), 1) == y)
  cg.tap(("step {}: {:.1f} % of the test's digits", i, 100 * right), "report", kind="text")
  return right


def train(name, rate, width, folder):
  x, y = load_digits(return_X_y=True)
  x = (x / 16).astype(np.float32)
  rng = np.random.default_rng(0)
  params = [rng.normal(0, 0.2, shape).astype(np.float32) for shape in ((64, width), (width, 10))]
  config = {"rate": rate, "model": {"width": width, "layers": 2}, "batch": BATCH}
  with cg.run(name, folder=folder, config=config, tags=["sgd"], notes="digits, 8 x 8") as run:
    for i in range(STEPS):
      rows = rng.integers(0, 1400, BATCH)
      params = step(params, x[rows], y[rows], rate, i)
      if i % LOOK == LOOK - 1:
        run.summary["accuracy"] = look(params, x[1400:], y[1400:], i)
  return run.summary["accuracy"]


def main():
  folder = sys.argv[1] if len(sys.argv) > 1 else "runs"
  for name, (rate, width) in RUNS.items():
    try:
      with cg.errors():
        print(f"{name}: {train(name, rate, width, folder):.1%} of the test's digits")
    except cg.CheckError as error:
      print(f"{name}: crashed: {error.message}")
  print(f"python -m callgate watch {folder}")


if __name__ == "__main__":
  main()
