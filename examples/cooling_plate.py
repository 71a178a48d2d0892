# SPDX-License-Identifier: Apache-2.0
"""Finds where a plate was heated from how it cooled: 100 implicit steps, one factorization.

All steps solve the same sparse system, (I + dt A) u' = u. SciPy factorizes it once, before the
loop. The gradient also needs only one factorization: its adjoint steps use the same factors
backwards. A loop with a data-dependent end computes how long the plate takes to cool.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

import callgate as cg

jax.config.update("jax_enable_x64", True)
N, STEPS, DT = 30, 100, 2e-4
line = sp.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(N, N)) * (N + 1) ** 2
matrix = sp.csc_matrix(sp.eye(N * N) - DT * sp.kronsum(line, line))
ROWS, COLUMNS = matrix.indices, np.repeat(np.arange(N * N), np.diff(matrix.indptr))
factorised = 0


def factor(values):
  global factorised
  factorised += 1
  return splu(sp.csc_matrix((values, ROWS, matrix.indptr), shape=matrix.shape))


solve = cg.linear_solver(
  factor=factor,
  solve=lambda lu, b: lu.solve(b),
  solve_transposed=lambda lu, b: lu.solve(b, "T"),
  matvec=lambda values, x: jnp.zeros_like(x).at[ROWS].add(values * x[COLUMNS]),
)
values = jnp.asarray(matrix.data)
x, y = np.meshgrid(*[(np.arange(N) + 1) / (N + 1)] * 2)


def heated(place):
  """The plate after it was heated around a place, for a moment."""
  return jnp.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / 0.02).ravel()


def cooled(u):
  return jax.lax.scan(lambda u, _: (solve(values, u), None), u, length=STEPS)[0]


@jax.jit
def until_cold(u):
  """The steps until the hottest place has less than a twentieth."""

  def step(u, _):
    return solve(values, u), u.max()

  return cg.scan(step, u, length=2000, until=lambda u: u.max() < 0.05)[2]


truth = jnp.array([0.3, 0.6])
measured = jax.jit(lambda place: cooled(heated(place)))(truth)
jax.block_until_ready(measured)
print(f"{STEPS} steps, factorised {factorised} time")
assert factorised == 1

descend = jax.jit(
  jax.value_and_grad(lambda place: jnp.sum((cooled(heated(place)) - measured) ** 2))
)
place, factorised = jnp.array([0.5, 0.5]), 0
for _ in range(60):
  loss, gradient = descend(place)
  place -= 0.006 * gradient
print(f"misfit {loss:.1e}, heated at ({place[0]:.3f}, {place[1]:.3f})")
print(f"60 gradients of {STEPS} steps, factorised {factorised} times")
assert jnp.allclose(place, truth, atol=0.01)
assert factorised == 60

with cg.bars(min_steps=100):
  steps = until_cold(heated(truth))
print(f"cold after {steps} steps of {DT:g}")
print(solve.verify(values, heated(truth), seconds=60))
