"""Trains a digit classifier in one compiled lax.scan that calls SciPy and scikit-learn.

Every image of every batch goes through scipy.ndimage, in place in XLA's memory; scikit-learn scores
the held-out set after every epoch. against_jax.py compares it with JAX's own callbacks.
"""

from pathlib import Path

import against_jax
import digits
import jax
import jax.numpy as jnp
import numpy as np
from scipy.ndimage import affine_transform
from sklearn.metrics import accuracy_score, f1_score

import callgate as cg

BATCH, EPOCHS, OUT = 64, 25, Path("out")


def warp(out, image, angle, shift):
  """Rotates f32[8,8] about its centre by `angle` (radians) and shifts it (pixels), into `out`."""
  matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
  offset = 3.5 - matrix @ (3.5 + shift)
  affine_transform(image, matrix, offset, output=out, order=1, mode="grid-constant")


def macro_f1(labels, predictions):
  return np.float32(f1_score(labels, predictions, average="macro"))


def gates(host):
  """(augment, score): `host` on each image of a batch, scikit-learn's metric on a test set."""
  augment = cg.gate(host, out=lambda image, angle, shift: image, style="inplace")
  score = cg.gate(macro_f1, out=jax.ShapeDtypeStruct((), jnp.float32), effect="io")
  return jax.vmap(augment), score


def make_train(augment, score, train, test, epochs):
  """A compiled program: parameters to (trained parameters, (losses, scores) by epoch)."""
  (x, y), (x_test, y_test) = train, test

  def step(state, key_and_rows):
    key, rows = key_and_rows
    images = augment(x[rows], *digits.noise(key, BATCH))
    *state, loss = digits.descend(*state, images, y[rows])
    return tuple(state), loss

  def epoch(state, key):
    shuffle, noise = jax.random.split(key)
    rows = jax.random.permutation(shuffle, len(x)).reshape(-1, BATCH)
    state, losses = jax.lax.scan(step, state, (jax.random.split(noise, len(rows)), rows))
    predictions = digits.logits(state[0], x_test).argmax(1).astype(jnp.int32)
    return state, (losses.mean(), score(y_test, predictions))

  def program(params):
    state = params, jax.tree.map(jnp.zeros_like, params)
    (params, _), curves = jax.lax.scan(epoch, state, jax.random.split(jax.random.key(1), epochs))
    return params, curves

  return jax.jit(program)


def main():
  OUT.mkdir(exist_ok=True)
  train, test = digits.data(BATCH)
  trained, (losses, scores) = make_train(*gates(warp), train, test, EPOCHS)(digits.init())
  accuracy = accuracy_score(test[1], digits.logits(trained, test[0]).argmax(1))
  print(f"{EPOCHS} epochs in one lax.scan: accuracy {accuracy:.3f}, macro F1 {scores[-1]:.3f}")
  samples, noise = train[0][:10], digits.noise(jax.random.key(2), 10)
  digits.draw_samples(OUT / "augmented.png", samples, gates(warp)[0](samples, *noise))
  digits.draw_curve(OUT / "learning_curve.png", losses, scores)
  print(f"pictures: {OUT}/learning_curve.png, {OUT}/augmented.png\n")
  against_jax.report(gates, warp, macro_f1, lambda *ways: make_train(*ways, train, test, 2))


if __name__ == "__main__":
  main()
