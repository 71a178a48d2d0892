# SPDX-License-Identifier: Apache-2.0
"""Calls a LAPACK routine that JAX lacks, with a derivative: constrained least squares.

`dgglse` minimizes |A x - c| subject to B x = d. SciPy exports it to other C code, and `cg.cfunc`
calls it from compiled programs without Python. Here it fits a line to the populations of the US
Census, exact for the last census and with smaller weights for older ones. Gradient descent through
LAPACK finds the decay of the weights with which the lines predict the next census best.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import cython_lapack, lapack

import callgate as cg

jax.config.update("jax_enable_x64", True)

YEARS = np.arange(1900, 2030, 10)
MILLIONS = np.array(
  [76.212, 92.228, 106.022, 123.203, 132.165, 151.326, 179.323, 203.212, 226.546, 248.710, 281.422,
   308.746, 331.449]
)  # fmt: skip

gglse = cg.cfunc(
  cython_lapack.__pyx_capi__["dgglse"],
  args="m, n, p, copy a[m, n], m, copy b[p, n], p, copy c[m], copy d[p], out x[n], "
  "scratch(64 * (m + n + p)), 64 * (m + n + p), info",
  order="F",  # Fortran's matrices are column-major
  errors={">0": "the constraints, or they and the matrix together, are rank-deficient ({info})"},
  name="examples.gglse",
)


@gglse.defjvp
def _(primals, tangents):
  """Differentiates the optimality conditions A'(A x - c) + B'y = 0, B x = d."""
  (a, b, c, d), (da, db, dc, dd) = primals, tangents
  x = gglse(a, b, c, d)
  residual = c - a @ x
  y = jnp.linalg.lstsq(b.T, a.T @ residual)[0]
  system = jnp.block([[a.T @ a, b.T], [b, jnp.zeros((len(d), len(d)))]])
  right = jnp.concatenate([da.T @ residual + a.T @ (dc - da @ x) - db.T @ y, dd - db @ x])
  return x, jnp.linalg.solve(system, right)[: len(x)]


def problem(decades, count):
  """The matrices for the first `count` censuses, of which the last one is met exactly."""
  time = (YEARS[:count] - YEARS[count - 1]) / 10
  powers = jnp.asarray(time)[:, None] ** jnp.arange(2)
  weights, last = jnp.exp(time / decades), MILLIONS[count - 1 : count]
  return weights[:, None] * powers, powers[-1:], weights * MILLIONS[:count], last


def next_census(decades, count):
  return gglse(*problem(decades, count)).sum()  # the line, ten years on


@jax.jit
def error(decades):
  """Root mean square error of the next census, predicted by the lines until 1960, …, 2010."""
  counts = range(7, len(YEARS))
  return jnp.sqrt(jnp.mean(jnp.array([next_census(decades, k) - MILLIONS[k] for k in counts]) ** 2))


def main():
  decades = jnp.array(10.0)
  matrices = [np.asarray(m) for m in problem(decades, len(YEARS))]
  print(f"difference from SciPy {np.abs(gglse(*matrices) - lapack.dgglse(*matrices)[3]).max():.1e}")
  slope = (error(decades + 1e-4) - error(decades - 1e-4)) / 2e-4
  print(f"slope {jax.grad(error)(decades):.6f} by differences {slope:.6f}")
  print(f"error {error(decades):.3f} million with a memory of {decades:.2f} decades")
  step = jax.jit(lambda x: x * jnp.exp(-0.2 * x * jax.grad(error)(x)))
  decades = jax.lax.fori_loop(0, 200, lambda _, x: step(x), decades)
  print(f"error {error(decades):.3f} million with a memory of {decades:.2f} decades")
  print(f"in 2030 {next_census(decades, len(YEARS)):.1f} million")


if __name__ == "__main__":
  main()
