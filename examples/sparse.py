"""Heat in a plate: conjugate gradients on a sparse matrix, whose product with a vector is in C++.

The product of a matrix in compressed rows (CSR) is linear in the vector and in the values, and its
transposes are kernels as well, so `jax.grad` goes through it and through `jax.scipy`'s solver: here
to find the conductivity of a strip from the temperatures around it. SciPy's solver is the check.
"""

import jax
import jax.numpy as jnp
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
  """Matrices of one pattern: the plate itself, and its middle strip."""
  second = scipy.sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (n, n))
  strip = scipy.sparse.diags((abs(np.arange(n) - n / 2) < n / 8).astype(float))
  base = scipy.sparse.kronsum(second, second, format="csr")
  extra = scipy.sparse.csr_matrix(scipy.sparse.kron(strip, second))
  return base, extra, (abs(base) + abs(extra)).tocsr()


def main():
  n = 60
  base, extra, pattern = plate(n)
  rows, columns = pattern.indptr, pattern.indices
  owner = np.repeat(np.arange(n * n), np.diff(rows))
  parts = [np.asarray(part[owner, columns]).ravel() for part in (base, extra)]
  load = np.random.default_rng(0).random(n * n)

  @jax.jit
  def temperatures(conductivity):
    product = lambda x: (
      multiply(rows, columns, parts[0], x) + conductivity * multiply(rows, columns, parts[1], x)
    )
    return jax.scipy.sparse.linalg.cg(product, load, tol=1e-10)[0]

  want = scipy.sparse.linalg.spsolve((base + 3.0 * extra).tocsc(), load)
  found = temperatures(3.0)
  print(f"largest difference from SciPy {np.abs(found - want).max() / np.abs(want).max():.1e}")
  loss = jax.jit(jax.value_and_grad(lambda c: jnp.mean((temperatures(c) - want) ** 2)))
  guess = 1.0
  for _ in range(40):  # Newton's steps by a secant of the gradient
    slope = (loss(guess + 1e-4)[1] - loss(guess - 1e-4)[1]) / 2e-4
    guess -= float(jnp.clip(loss(guess)[1] / jnp.abs(slope), -0.5, 0.5))
  print(f"conductivity of the strip {guess:.6f}, where 3 made the temperatures")


if __name__ == "__main__":
  main()
