# SPDX-License-Identifier: Apache-2.0
"""Searches hyperparameters of a classifier; a second, longer search reuses the scores of the first.

A compiled evolution strategy asks scikit-learn for the cross-validated accuracy of each candidate.
A score takes seconds in real life, so the first search records them. The second search has more
generations: a replay answers the known candidates and calls scikit-learn for the new ones alone.
The shuffle's seed is not compared. `python -m callgate show scores.cgr` lists the calls.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold, cross_val_score
from sklearn.svm import SVC

import callgate as cg

CANDIDATES, FIRST, SECOND = 6, 4, 6
IMAGES, LABELS = (part[:400] for part in load_digits(return_X_y=True))
calls = 0


@cg.gate(out=jax.ShapeDtypeStruct((), jnp.float32), name="score")
def score(point, seed):
  """The accuracy of a support vector machine whose C and gamma are 10**point."""
  global calls
  calls += 1
  c, gamma = 10.0 ** np.asarray(point, np.float64)
  folds = KFold(3, shuffle=True, random_state=int(seed))
  return np.float32(cross_val_score(SVC(C=c, gamma=gamma), IMAGES / 16, LABELS, cv=folds).mean())


def search(generations, seed):
  """The best point and its score: each generation draws its candidates around the best so far."""

  @jax.jit
  def run(seed):
    def generation(carry, key):
      best, top, width = carry
      points = best + width * jax.random.normal(key, (CANDIDATES, 2))
      scores = jax.vmap(score, (0, None))(points, seed)
      winner = jnp.argmax(scores)
      better = scores[winner] > top
      best = jnp.where(better, points[winner], best)
      return (best, jnp.maximum(top, scores[winner]), 0.8 * width), top

    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(generations))
    start = (jnp.array([-0.5, -2.5]), jnp.float32(0), jnp.float32(1))
    (best, top, _), _ = jax.lax.scan(generation, start, keys)
    return best, top

  best, top = jax.block_until_ready(run(seed))
  return np.round(10.0 ** np.asarray(best, np.float64), 4), float(top)


def main():
  path = sys.argv[1] if len(sys.argv) > 1 else "scores.cgr"
  with cg.record(path, overwrite=True):
    (c, gamma), top = search(FIRST, seed=1)
  print(f"{FIRST} generations: C {c}, gamma {gamma}, accuracy {top:.1%}, {calls} scores computed")
  before = calls
  with cg.replay(path, ignore=("seed",), record_new=True):
    (c, gamma), top = search(SECOND, seed=2)
  new = calls - before
  print(f"{SECOND} generations: C {c}, gamma {gamma}, accuracy {top:.1%}, {new} scores computed")


if __name__ == "__main__":
  warnings.simplefilter("ignore")
  main()
