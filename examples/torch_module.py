# SPDX-License-Identifier: Apache-2.0
"""Trains a PyTorch network inside a jitted JAX loop, and compares with training in PyTorch.

The network is a small CNN written in PyTorch, and `cg.torch` makes it a function of its parameters.
The loss, the momentum and the loop over minibatches are JAX, compiled as one program. Training in
PyTorch with the same minibatches gives the same weights.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import callgate as cg

RATE, MOMENTUM, EPOCHS, BATCH = 0.1, 0.9, 6, 64


def network():
  torch.manual_seed(0)
  return torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(64, 10),
  )  # fmt: skip


def train_in_jax(model, images, labels, batches):
  def loss(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(model(params, x)), y[:, None], 1).mean()

  def step(state, batch):
    params, velocity = state
    value, grads = jax.value_and_grad(loss)(params, images[batch], labels[batch])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return (params, velocity), value

  params = model.params
  start = params, jax.tree.map(jnp.zeros_like, params)
  (params, _), losses = jax.jit(lambda s: jax.lax.scan(step, s, batches))(start)
  return params, losses


def train_in_torch(module, images, labels, batches):
  optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
  x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
  for batch in torch.from_numpy(batches).long():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
    optimizer.step()


def main():
  images, labels = load_digits(return_X_y=True)
  images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
  x, x_test, y, y_test = train_test_split(images, labels.astype(np.int32), random_state=0)
  order = np.random.default_rng(0)
  steps = len(x) // BATCH
  batches = np.concatenate(
    [order.permutation(len(x))[: steps * BATCH].reshape(steps, BATCH) for _ in range(EPOCHS)]
  ).astype(np.int32)
  module = network()
  alone = copy.deepcopy(module)
  model = cg.torch(module)
  params, losses = train_in_jax(model, jnp.array(x), jnp.array(y), batches)
  model.load(params)  # the torch module itself is now trained
  train_in_torch(alone, x, y, batches)
  difference = max(float(abs(params[k] - v).max()) for k, v in cg.torch(alone).params.items())
  accuracy = np.mean(module(torch.from_numpy(x_test)).argmax(1).numpy() == y_test)
  print(f"{len(batches)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.3f}")
  print(f"largest difference from weights trained by PyTorch alone: {difference:.1e}")


if __name__ == "__main__":
  main()
