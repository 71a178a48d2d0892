# SPDX-License-Identifier: Apache-2.0
"""Solves for the heat in a plate: conjugate gradients with a sparse product in C++.

The product of a matrix in compressed rows (CSR) with a vector is linear in the vector, and its
transpose is also a kernel, so JAX's solver can be differentiated. SciPy checks the result.
"""

import functools

import jax
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

import callgate as cg

jax.config.update("jax_enable_x64", True)
SOURCE = """
  using Indices = cg::In<int32_t, 1>;
  using Vector = cg::In<double, 1>;
  // Row i has the elements [rows[i], rows[i + 1]).
  void multiply(cg::Context& context, Indices rows, Indices columns, Vector values, Vector x,
                cg::Out<double, 1> y) {
    context.parallel_for(0, y.size(), 2048, [&](int64_t i) {
      double sum = 0;
      for (int k = rows[i]; k < rows[i + 1]; ++k) sum += values[k] * x[columns[k]];
      y[i] = sum;
    });
  }
  void multiply_transposed(Indices rows, Indices columns, Vector values, Vector y,
                           cg::Out<double, 1> x) {
    std::fill(x.begin(), x.end(), 0.0);
    for (int64_t i = 0; i < y.size(); ++i)
      for (int k = rows[i]; k < rows[i + 1]; ++k) x[columns[k]] += values[k] * y[i];
  }
"""
multiply = cg.cpp(
  SOURCE,
  "multiply",
  out=lambda rows, columns, values, x: jax.ShapeDtypeStruct((rows.size - 1,), x.dtype),
  linear=3,
)
transposed = cg.cpp(
  SOURCE, "multiply_transposed", out=lambda rows, columns, values, y: y, linear=3
)  # square matrices
multiply.deftranspose(lambda ct, rows, columns, values, x: transposed(rows, columns, values, ct))
transposed.deftranspose(lambda ct, rows, columns, values, y: multiply(rows, columns, values, ct))


def plate(n):
  """The negative Laplacian of n x n points, with edges that are kept cold."""
  second = scipy.sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (n, n))
  return scipy.sparse.csr_matrix(scipy.sparse.kronsum(second, second))


def main():
  matrix = plate(60)
  product = functools.partial(multiply, matrix.indptr, matrix.indices, matrix.data)

  @jax.jit
  def temperatures(heat):
    return jax.lax.custom_linear_solve(
      product,
      heat,
      lambda product, b: jax.scipy.sparse.linalg.cg(product, b, tol=1e-12)[0],
      symmetric=True,
    )

  x = np.random.default_rng(0).random(matrix.shape[0])
  print(f"product: largest difference {np.abs(product(x) - matrix @ x).max():.1e}")
  transpose = jax.linear_transpose(product, x)(x)[0]
  print(f"transpose: largest difference {np.abs(transpose - matrix.T @ x).max():.1e}")
  want = scipy.sparse.linalg.spsolve(matrix.tocsc(), x)
  found = temperatures(x)
  print(f"solution: largest relative difference {(np.abs(found - want) / want).max():.1e}")
  gradient = jax.grad(lambda heat: temperatures(heat) @ x)(x)  # the matrix is symmetric
  print(f"gradient: largest relative difference {(np.abs(gradient - want) / want).max():.1e}")


if __name__ == "__main__":
  main()
