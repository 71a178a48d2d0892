# SPDX-License-Identifier: Apache-2.0
"""Trains a digit classifier in one compiled `lax.scan` that calls SciPy and scikit-learn.

scipy.ndimage transforms every image of every batch in place, in XLA's memory. scikit-learn scores
the held-out set after every epoch. Taps send loss, gradient norm and score to a file, TensorBoard
and a picture while the scan runs. against_jax.py compares the speed with JAX's own callbacks.
"""

import functools
from pathlib import Path

import against_jax
import digits
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import accuracy_score, f1_score

import callgate as cg
from callgate import sinks

BATCH, EPOCHS, OUT = 64, 25, Path("out")


def macro_f1(labels, predictions):
  return np.float32(f1_score(labels, predictions, average="macro"))


def gates(host):
  """(augment, score): `host` on each image of a batch, scikit-learn's metric on a test set."""
  augment = cg.gate(host, out=lambda image, angle, shift: image, style="inplace")
  score = cg.gate(macro_f1, out=jax.ShapeDtypeStruct((), jnp.float32), effect="io")
  return jax.vmap(augment), score


def make_train(augment, score, train, test, epochs, tap, progress=None):
  """A compiled program, parameters to (trained ones, scores); taps with `tap(values, name=)`."""
  (x, y), (x_test, y_test) = train, test

  def step(state, key_and_rows):
    key, rows = key_and_rows
    images = augment(x[rows], *digits.noise(key, BATCH))
    state, values = digits.descend(*state, images, y[rows])
    tap(values, name="step")
    return state, None

  def epoch(state, key):
    shuffle, noise = jax.random.split(key)
    rows = jax.random.permutation(shuffle, len(x)).reshape(-1, BATCH)
    state, _ = jax.lax.scan(step, state, (jax.random.split(noise, len(rows)), rows))
    value = score(y_test, digits.logits(state[0], x_test).argmax(1).astype(jnp.int32))
    return state, tap(value, name="macro F1")

  def program(params):
    state = params, jax.tree.map(jnp.zeros_like, params)
    keys = jax.random.split(jax.random.key(1), epochs)
    (params, _), scores = cg.scan(epoch, state, keys, progress=progress)
    return params, scores

  return jax.jit(program)


def main():
  train, test = digits.data(BATCH)
  curve = sinks.Plot(OUT / "learning_curve.png", title="digits", log=True)
  to = [sinks.JSONL(OUT / "training.jsonl"), sinks.TensorBoard(OUT / "tensorboard"), curve]
  with cg.channel("training", to=to) as channel:
    tap = functools.partial(cg.tap, to="training")
    program = make_train(*gates(digits.warp), train, test, EPOCHS, tap, progress="training")
    trained, scores = program(digits.init())
  accuracy = accuracy_score(test[1], digits.logits(trained, test[0]).argmax(1))
  print(f"{EPOCHS} epochs in one lax.scan: accuracy {accuracy:.3f}, macro F1 {scores[-1]:.3f}")
  samples, noise = train[0][:10], digits.noise(jax.random.key(2), 10)
  digits.draw_samples(OUT / "augmented.png", samples, gates(digits.warp)[0](samples, *noise))
  print(f"{channel.stats()['delivered']} tapped records, and pictures, are in {OUT}/\n")
  short = functools.partial(make_train, train=train, test=test, epochs=2)
  against_jax.report(gates, digits.warp, macro_f1, short)


if __name__ == "__main__":
  main()
