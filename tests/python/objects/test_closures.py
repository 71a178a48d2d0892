# SPDX-License-Identifier: Apache-2.0
"""Derivatives of solvers and roots in traced values that the user's functions close over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lu_factor, lu_solve

import callgate as cg

A = np.array([[2.0, 1.0], [0.5, 4.0]], np.float32)
B = np.array([1.0, 2.0], np.float32)


def by_root(c: Any, theta: Any) -> Any:
  solution = cg.root(
    lambda x, given: x**3 - c * given[0],
    solver=lambda given, x0: np.cbrt(given[0] * given[1]),
  )
  return solution((theta, jax.lax.stop_gradient(c)), theta)


def by_solver(c: Any, theta: Any) -> Any:
  solver = cg.linear_solver(
    factor=lambda given: lu_factor(given[0] * given[1]),
    solve=lu_solve,
    solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1),
    matvec=lambda given, x: c * given[0] @ x,
  )
  return jnp.sum(solver((A * theta, jax.lax.stop_gradient(c)), B) ** 2)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
  "root": (by_root, lambda c, theta: jnp.cbrt(c * theta)),
  "linear_solver": (
    by_solver,
    lambda c, theta: jnp.sum((np.linalg.inv(A) @ B / (c * theta)) ** 2),
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_in_a_closure_are_those_of_an_argument(name: str) -> None:
  of_host, truth = CASES[name]

  def derivatives(f: Callable[..., Any]) -> Callable[..., Any]:
    both = (0, 1)
    transforms = [
      jax.grad(f), jax.grad(f, 1), jax.grad(f, both), jax.jacfwd(f, both), jax.hessian(f, both),
      lambda c, theta: jax.vmap(jax.grad(f), (0, None))(jnp.stack([c, 2 * c]), theta),
    ]  # fmt: skip
    return lambda c, theta: [transform(c, theta) for transform in transforms]

  wanted = jax.tree.leaves(derivatives(truth)(1.5, 2.0))
  for found in (derivatives(of_host), jax.jit(derivatives(of_host))):
    for a, b in zip(jax.tree.leaves(found(1.5, 2.0)), wanted, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)


def test_a_closure_over_a_loops_values() -> None:
  def steps(c: Any) -> Any:
    step = lambda x, k: (by_root(c * k, x), None)
    return jax.lax.scan(step, jnp.float32(2), jnp.array([1.0, 2.0]))[0]

  def by_jax(c: Any) -> Any:
    return jnp.cbrt(2 * c * jnp.cbrt(c * 2.0))

  np.testing.assert_allclose(jax.jit(jax.grad(steps))(1.5), jax.grad(by_jax)(1.5), rtol=1e-3)


def test_a_closure_over_constants_makes_no_other_solver() -> None:
  c = jnp.float32(2)
  solution = cg.root(
    lambda x, theta: x - c * theta, solver=lambda theta, x0: theta * 2, name="closure.of_constants"
  )
  assert jax.jit(jax.grad(lambda x: solution(x, x)))(3.0) == 2
  assert [name for name in cg.stats() if "closure.of_constants" in name] == ["closure.of_constants"]
