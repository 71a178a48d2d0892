# SPDX-License-Identifier: Apache-2.0
"""Follows a training run from another process: one writes a stream, the other reads it live.

The child process trains a model of scikit-learn's breast-cancer data in one compiled scan; its taps
append to a file. The parent reads the file while it grows and draws the loss curve as text. It
needs only the file, and the child doesn't know about its reader.

    python examples/follow_stream.py out/run.cgs
"""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

import callgate as cg
from callgate import sinks

STEPS, RATE, EVERY = 2000, 0.05, 100


def loss(w, x, y):
  """Logistic loss and accuracy."""
  logits = x @ w[:-1] + w[-1]
  return jnp.mean(jax.nn.softplus(logits) - y * logits), jnp.mean((logits > 0) == y)


@jax.jit
def train(x, y):
  def step(w, i):
    (value, right), slope = jax.value_and_grad(loss, has_aux=True)(w, x, y)
    cg.tap({"step": i, "loss": value, "right": right}, "run", name="train", every=EVERY)
    return w - RATE * slope, None

  return jax.lax.scan(step, jnp.zeros(x.shape[1] + 1), jnp.arange(STEPS))[0]


def write(path):
  """The child: trains, and streams to `path`."""
  x, y = load_breast_cancer(return_X_y=True)
  x = StandardScaler().fit_transform(x).astype(np.float32)
  with cg.channel("run", to=sinks.Stream(path)):
    train(x, y.astype(np.float32))


def follow(path, child):
  """The parent: prints a line for each record, until the writer closes the stream or is gone."""
  running = True
  with cg.open_stream(path, follow=True) as stream:
    while running and not stream.ended:
      running = child.poll() is None  # before the read, so that no record is missed
      while (record := stream.read(0.2)) is not None:
        step, value, right = (record.leaves[f"['{name}']"] for name in ("step", "loss", "right"))
        bar = "#" * round(60 * float(value))
        print(f"step {step:5}  right {right:.3f}  loss {value:.4f} {bar}", flush=True)


def main():
  path = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out/run.cgs")
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(b"")  # so that there is a file to follow, without an earlier run
  child = subprocess.Popen([sys.executable, __file__, str(path), "write"])
  try:
    follow(path, child)
  finally:
    status = child.wait()
  print(f"the writer ended with status {status}")


if __name__ == "__main__":
  write(sys.argv[1]) if sys.argv[2:] == ["write"] else main()
