# SPDX-License-Identifier: Apache-2.0
"""Exports a program that calls a scikit-learn model, and runs it in another process.

A random forest classifies digits inside a JAX program that prepares the images and turns votes into
a decision. The exported program contains the gate's name, not the forest. The process that loads
the program defines a gate with that name.

    python examples/export_forest.py export forest.bin    # trains nothing, traces and writes
    python examples/export_forest.py run forest.bin       # loads, defines the gate, predicts
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

import callgate as cg


def votes_of(forest):
  """A gate over `forest`, under the name that exported programs know."""

  @cg.gate(out=lambda x: jax.ShapeDtypeStruct((len(x), 10), jnp.float32), name="digits.forest")
  def votes(x):
    return forest.predict_proba(x).astype(np.float32)

  return votes


def save(path):
  votes = votes_of(forest=None)  # traced, never called here

  @jax.jit
  def classify(images):
    centred = images - images.mean((1, 2), keepdims=True)
    probabilities = votes(centred.reshape(len(images), 64))
    sure = probabilities.max(1) > 0.5
    return jnp.where(sure, probabilities.argmax(1), -1)  # -1: a person should look

  images = jax.ShapeDtypeStruct((400, 8, 8), jnp.float32)
  program = export.export(classify, disabled_checks=cg.export_checks())(images)
  path.write_bytes(program.serialize())
  print(f"{path.name}: {path.stat().st_size} bytes")


def run(path):
  images, labels = load_digits(return_X_y=True)
  images = images.astype(np.float32).reshape(-1, 8, 8)
  x, x_test, y, y_test = train_test_split(images, labels, test_size=400, random_state=0)
  centred = x - x.mean((1, 2), keepdims=True)
  forest = RandomForestClassifier(100, random_state=0).fit(centred.reshape(-1, 64), y)
  gate = votes_of(forest)  # must live while the program may call it
  program = export.deserialize(bytearray(path.read_bytes()))
  decided = np.asarray(program.call(x_test))
  sure = decided >= 0
  right = np.mean(decided[sure] == y_test[sure])
  print(f"{gate.name}: decided {sure.mean():.1%}, of these right {right:.1%}")


if __name__ == "__main__":
  command, path = sys.argv[1], pathlib.Path(sys.argv[2])
  {"export": save, "run": run}[command](path)
