# SPDX-License-Identifier: Apache-2.0
"""The demo's data, images, network and pictures: nothing here is about callgate."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

matplotlib.use("Agg")  # draws to files, needs no display
import matplotlib.pyplot as plt


def data(batch, seed=0):
  """((x, y), (x_test, y_test)): f32[n,8,8] in [0, 1] and i32[n]; n a multiple of `batch`."""
  images, labels = load_digits(return_X_y=True)
  images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
  x, x_test, y, y_test = train_test_split(
    images, labels.astype(np.int32), test_size=400, random_state=seed, stratify=labels
  )
  n = len(x) // batch * batch
  return (jnp.asarray(x[:n]), jnp.asarray(y[:n])), (jnp.asarray(x_test), jnp.asarray(y_test))


def init(seed=0, hidden=128):
  """Parameters of a network with one hidden layer (initialised as in He et al., 2015)."""
  k1, k2 = jax.random.split(jax.random.key(seed))
  w1 = jax.random.normal(k1, (64, hidden)) * np.sqrt(2 / 64)
  w2 = jax.random.normal(k2, (hidden, 10)) * np.sqrt(2 / hidden)
  return {"w1": w1, "b1": jnp.zeros(hidden), "w2": w2, "b2": jnp.zeros(10)}


def logits(params, x):
  """f32[n,10] for images f32[n,8,8]."""
  hidden = jax.nn.relu(x.reshape(len(x), 64) @ params["w1"] + params["b1"])
  return hidden @ params["w2"] + params["b2"]


def loss(params, x, y):
  """Mean cross-entropy."""
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], 1))


def descend(params, velocity, x, y, rate=0.05, momentum=0.9):
  """One step of stochastic gradient descent: ((params, velocity), what to watch)."""
  value, gradient = jax.value_and_grad(loss)(params, x, y)
  velocity = jax.tree.map(lambda v, g: momentum * v - rate * g, velocity, gradient)
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
  state = jax.tree.map(jnp.add, params, velocity), velocity
  return state, {"loss": value, "gradient norm": norm}


def noise(key, n):
  """Random angles f32[n] in radians and shifts f32[n,2] in pixels."""
  normal = jax.random.normal(key, (n, 3))
  return 0.1 * normal[:, 0], 0.2 * normal[:, 1:]


def warp(out, image, angle, shift):
  """Rotates f32[8,8] about its centre by `angle` (radians) and shifts it (pixels), into `out`."""
  matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
  offset = 3.5 - matrix @ (3.5 + shift)
  affine_transform(image, matrix, offset, output=out, order=1, mode="grid-constant")


def draw_samples(path, before, after, columns=10):
  """Draws images, and below each the image that the gate made of it."""
  figure, axes = plt.subplots(2, columns, figsize=(columns, 2.2), layout="constrained")
  for row, (label, images) in enumerate((("original", before), ("augmented", after))):
    for axis, image in zip(axes[row], images, strict=False):
      axis.imshow(image, cmap="gray_r", vmin=0, vmax=1)
      axis.set(xticks=[], yticks=[])
    axes[row, 0].set_ylabel(label)
  figure.savefig(path, dpi=150)
