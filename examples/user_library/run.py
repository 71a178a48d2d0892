# SPDX-License-Identifier: Apache-2.0
"""Filters noisy signals with kernels of a C++ library that your own CMake project builds.

`python run.py BUILD_FOLDER` builds the library in that folder; it needs cmake and a C++ compiler.
It calls the library from a compiled program over a batch of signals, and compares with JAX.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

HERE = Path(__file__).resolve().parent
REACH, DECAY = 3, 0.7


def build(folder):
  """Runs the user's CMake project; returns the library."""
  configure = ["cmake", "-S", HERE, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
  for command in (configure, ["cmake", "--build", folder]):
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
  return folder / "libfilters.so"


def median_in_jax(x):
  """The interior of the running median: at the ends JAX has no windows of another length."""
  windows = jnp.stack([x[i : x.size - 2 * REACH + i] for i in range(2 * REACH + 1)])
  return jnp.median(windows, axis=0)


def smooth_in_jax(x):
  def step(value, now):
    value = DECAY * value + (1 - DECAY) * now
    return value, value

  last, y = jax.lax.scan(step, x[0], x)
  return y, last


def main():
  filters = cg.library(build(Path(sys.argv[1])))
  print(filters)

  @jax.jit
  def clean(x):
    y, last = filters.smooth(DECAY, filters.median(REACH, x))
    return y, last

  # Steps, noise, and a few gross errors that only a median takes out.
  rng = np.random.default_rng(0)
  truth = np.repeat(rng.normal(size=(64, 8)), 128, axis=1)
  signals = truth + 0.1 * rng.normal(size=truth.shape)
  signals[rng.random(truth.shape) < 0.02] = 50.0
  x = jnp.asarray(signals, jnp.float32)

  cleaned, last = jax.vmap(clean)(x)
  median = jax.vmap(lambda v: filters.median(REACH, v))(x)
  np.testing.assert_allclose(median[:, REACH:-REACH], jax.vmap(median_in_jax)(x), rtol=1e-6)
  want, want_last = jax.vmap(smooth_in_jax)(median)
  np.testing.assert_allclose(cleaned, want, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(last, want_last, rtol=1e-4, atol=1e-5)

  def error(y):
    return float(np.sqrt(np.mean((np.asarray(y) - truth) ** 2)))

  print(f"error before {error(x):.3f}, after {error(cleaned):.3f}; the same in JAX")


if __name__ == "__main__":
  main()
