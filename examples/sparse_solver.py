# SPDX-License-Identifier: Apache-2.0
"""Finds the conductivity of a rod from its temperatures: SuperLU inside jit, grad and scan.

-(k u')' = q is a tridiagonal system for each k. SciPy factorizes it once per step of the
Gauss-Newton method, and the derivatives reuse the factors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from scipy.sparse.linalg import splu

import callgate as cg

jax.config.update("jax_enable_x64", True)
N = 200
H = 1.0 / (N + 1)
factorised = 0

# The system's nonzeros, as (row, column): diagonal, above, below.
ROWS = np.concatenate([np.arange(N), np.arange(N - 1), np.arange(1, N)])
COLUMNS = np.concatenate([np.arange(N), np.arange(1, N), np.arange(N - 1)])


def nonzeros(k):
  """Values for conductivities k[N + 1] between the points."""
  return jnp.concatenate([k[:-1] + k[1:], -k[1:-1], -k[1:-1]]) / H**2


def factor(values):
  global factorised
  factorised += 1
  return splu(scipy.sparse.csc_matrix((values, (ROWS, COLUMNS)), shape=(N, N)))


solve = cg.linear_solver(
  factor=factor,
  solve=lambda lu, b: lu.solve(b),
  solve_transposed=lambda lu, b: lu.solve(b, "T"),
  matvec=lambda values, x: jnp.zeros_like(x).at[ROWS].add(values * x[COLUMNS]),
)

x = (np.arange(N + 1) + 0.5) * H
heat = jnp.full(N, 10.0)


def conductivity(theta):
  """A smooth profile of three parameters."""
  return jnp.exp(theta[0] + theta[1] * x + theta[2] * jnp.sin(2 * np.pi * x))


def temperatures(theta):
  return solve(nonzeros(conductivity(theta)), heat)


truth = jnp.array([0.3, -0.8, 0.5])
measured = jax.block_until_ready(jax.jit(temperatures)(truth))


def misfit(theta):
  return temperatures(theta) - measured


@jax.jit
def gauss_newton(theta):
  def step(theta, _):
    r, tangent = jax.linearize(misfit, theta)  # one object serves for both
    jacobian = jax.vmap(tangent, out_axes=1)(jnp.eye(3))
    return theta - jnp.linalg.lstsq(jacobian, r)[0], jnp.linalg.norm(r)

  return jax.lax.scan(step, theta, length=12)


factorised = 0
found, norms = jax.block_until_ready(gauss_newton(jnp.zeros(3)))
print("misfit:", np.array2string(np.asarray(norms), precision=2))
print("found:", found, "truth:", truth)
assert jnp.allclose(found, truth, atol=1e-6)
assert factorised == 12
assert sum(cg.held().values()) == 0
