# SPDX-License-Identifier: Apache-2.0
"""Unmixes spectra with weights on the simplex, by a projection written in C++.

The projection onto {w : w >= 0, sum w = 1} sorts its input and searches a threshold (Held, Wolfe
and Crowder, 1974, doi:10.1007/BF01580223). That is easy in C++, and its derivative is a short rule.
Projected gradient descent finds how much of each spectrum is in a mixture. The projection's
gradient (the sparsemax layer of Martins and Astudillo, 2016) is checked against a version in JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

project = cg.cpp(
  """
  #include <functional>
  // The threshold t at which the positive parts of x - t add up to one.
  template <class T>
  void simplex(cg::Context& context, cg::In<T, 1> x, cg::Out<T, 1> w) {
    T* sorted = context.scratch<T>(x.size());
    std::partial_sort_copy(x.begin(), x.end(), sorted, sorted + x.size(), std::greater<T>());
    T sum = 0, threshold = 0;
    for (int64_t k = 0; k < x.size(); ++k) {
      sum += sorted[k];
      T candidate = (sum - 1) / T(k + 1);
      if (sorted[k] > candidate) threshold = candidate;
    }
    for (int64_t i = 0; i < x.size(); ++i) w[i] = std::max(x[i] - threshold, T(0));
  }
  """,
  out=lambda x: x,
  thread_safe=True,  # lanes of vmap on several threads
)


def forward(x):
  return (w := project(x)), w > 0


def backward(support, ct):  # within the support, the sum stays 1
  return (jnp.where(support, ct - jnp.sum(ct * support) / jnp.sum(support), 0),)


project.defvjp(forward, backward)


def project_in_jax(x):
  ordered = jnp.sort(x)[::-1]
  thresholds = (jnp.cumsum(ordered) - 1) / jnp.arange(1, x.size + 1)
  last = jnp.sum(ordered > thresholds) - 1
  return jnp.maximum(x - thresholds[last], 0)


@jax.jit
def unmix(spectra, mixtures):
  step = 1 / jnp.linalg.norm(spectra @ spectra.T, 2)
  start = jnp.full((len(mixtures), len(spectra)), 1 / len(spectra))
  return jax.lax.fori_loop(
    0, 3000, lambda _, w: jax.vmap(project)(w - step * (w @ spectra - mixtures) @ spectra.T), start
  )


def main():
  random = np.random.default_rng(0)
  wave = np.linspace(0, 1, 200)
  spectra = np.exp(-(((wave - random.uniform(0, 1, (8, 1))) / 0.08) ** 2)).astype(np.float32)
  truth = np.where(random.random((50, 8)) < 0.3, random.random((50, 8)), 0) + 1e-9
  truth /= truth.sum(1, keepdims=True)
  found = unmix(spectra, truth.astype(np.float32) @ spectra)
  print(f"largest error of a weight {np.abs(found - truth).max():.1e}")
  x, ct = random.normal(size=(2, 500, 8)).astype(np.float32)
  values, grads = jax.vmap(lambda x, ct: jax.value_and_grad(lambda x: project(x) @ ct)(x))(x, ct)
  want = jax.vmap(lambda x, ct: jax.value_and_grad(lambda x: project_in_jax(x) @ ct)(x))(x, ct)
  print(f"largest difference from JAX {np.abs(values - want[0]).max():.1e}")
  print(f"largest difference of gradients {np.abs(grads - want[1]).max():.1e}")


if __name__ == "__main__":
  main()
