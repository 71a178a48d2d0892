# SPDX-License-Identifier: Apache-2.0
"""Trains for several epochs in one compiled scan, with data augmentation in a host iterator.

A small network learns scikit-learn's digits. Another thread shuffles, rotates and shifts the next
images with SciPy while the program trains.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import callgate as cg

BATCH, EPOCHS, HIDDEN, RATE = 32, 30, 96, 0.3


def split():
  images, labels = load_digits(return_X_y=True)
  images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
  return train_test_split(images, labels, test_size=400, random_state=0, stratify=labels)


def moved(image, random):
  """The image, rotated by some degrees and shifted by a part of a pixel."""
  angle, *shift = random.normal(0, [0.1, 0.2, 0.2])
  turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
  return affine_transform(image, turn, offset=3.5 - 3.5 * turn.sum(1) + shift, order=1)


def augmented(images, labels):
  """Batches without end: every epoch in a new order, every image moved anew."""
  random = np.random.default_rng(0)
  while True:
    for rows in random.permutation(len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH):
      yield np.stack([moved(images[i], random) for i in rows]), labels[rows].astype(np.int32)


def init(key):
  first, second = jax.random.split(key)
  return {
    "hidden": jax.random.normal(first, (65, HIDDEN)) * np.sqrt(2 / 65),
    "out": jax.random.normal(second, (HIDDEN + 1, 10)) * np.sqrt(2 / HIDDEN),
  }


def logits(params, images):
  def layer(weights, x):
    return x @ weights[:-1] + weights[-1]

  return layer(params["out"], jax.nn.relu(layer(params["hidden"], images.reshape(-1, 64))))


def loss(params, images, labels):
  scores = jax.nn.log_softmax(logits(params, images))
  return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def main():
  images, test_images, labels, test_labels = split()
  with cg.feed(augmented(images, labels), prefetch=4, name="digits") as batches:

    def step(params, _):
      value, slope = jax.value_and_grad(loss)(params, *batches.next())
      return jax.tree.map(lambda p, g: p - RATE * g, params, slope), value

    epoch = jax.jit(lambda params: jax.lax.scan(step, params, length=len(images) // BATCH))
    params = init(jax.random.key(0))
    for i in range(1, EPOCHS + 1):
      params, losses = epoch(params)
      if i % 3 == 0:
        print(f"epoch {i:2}  loss {losses.mean():.4f}")
    print("batches taken:", batches.stats()["served"])
  right = np.argmax(logits(params, test_images), 1) == test_labels
  print(f"accuracy on {len(right)} held-out digits: {right.mean():.4f}")


if __name__ == "__main__":
  main()
