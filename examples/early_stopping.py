# SPDX-License-Identifier: Apache-2.0
"""Early stopping: a compiled `while_loop` that stops by a scikit-learn metric.

It fits a logistic regression to scikit-learn's breast-cancer data. After every epoch a gate
computes the area under the validation set's ROC curve, and the loop stops when it no longer
improves.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import callgate as cg

BATCH, PATIENCE, RATE = 32, 5, 0.1
history = []


@cg.gate(out=jax.ShapeDtypeStruct((), jnp.float32))
def auc(labels, scores):
  return np.float32(roc_auc_score(labels, scores))


@cg.gate(effect="ordered")
def log(epoch, value):
  history.append((int(epoch), float(value)))


def data():
  x, y = load_breast_cancer(return_X_y=True)
  x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.4, random_state=0, stratify=y)
  scale = StandardScaler().fit(x)
  arrays = scale.transform(x), y, scale.transform(x_valid), y_valid
  return [jnp.asarray(array, jnp.float32) for array in arrays]


def loss(weights, x, y):
  logits = x @ weights[:-1] + weights[-1]
  return jnp.mean(jax.nn.softplus(logits) - y * logits)


def epoch(weights, key, x, y):
  rows = jax.random.permutation(key, len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH)
  return jax.lax.fori_loop(
    0, len(rows), lambda i, w: w - RATE * jax.grad(loss)(w, x[rows[i]], y[rows[i]]), weights
  )


@jax.jit
def train(x, y, x_valid, y_valid):
  """(best weights, best area, epochs run): stops PATIENCE epochs after the best."""

  def body(state):
    i, weights, best_weights, best, waited = state
    weights = epoch(weights, jax.random.fold_in(jax.random.key(0), i), x, y)
    area = auc(y_valid, x_valid @ weights[:-1] + weights[-1])
    log(i, area)
    better = area > best
    kept = jnp.where(better, weights, best_weights)
    return i + 1, weights, kept, jnp.maximum(area, best), jnp.where(better, 0, waited + 1)

  zeros = jnp.zeros(x.shape[1] + 1)
  start = 0, zeros, zeros, jnp.float32(0), 0
  state = jax.lax.while_loop(lambda s: (s[4] < PATIENCE) & (s[0] < 200), body, start)
  return state[2], state[3], state[0]


def main():
  _, area, epochs = jax.block_until_ready(train(*data()))
  cg.barrier()
  for i, value in history[::5]:
    print(f"epoch {i:3}  area under the curve {value:.5f}")
  print(f"stopped after {epochs} epochs, best {area:.5f}")


if __name__ == "__main__":
  main()
