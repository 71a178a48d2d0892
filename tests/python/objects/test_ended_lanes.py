# SPDX-License-Identifier: Apache-2.0
"""Objects in branches and loops under derivatives, for lanes that don't take the branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lu_factor, lu_solve

import callgate as cg

Solve = Callable[[Any, Any], Any]
A = jnp.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.2, 2.0]])
B = jnp.array([1.0, 2.0, 3.0])
MATRICES = jnp.stack([A, A + 0.3])
ENDS = jnp.array([1, 3])
transposed = list[int]()
by_jax: Solve = jnp.linalg.solve


def solve_transposed(lu: Any, b: Any) -> Any:
  transposed.append(1)
  return lu_solve(lu, b, trans=1)


def solver(**options: Any) -> Any:
  return cg.linear_solver(
    factor=lu_factor, solve=lu_solve, solve_transposed=solve_transposed, **options
  )


def over_objects(solve: Any) -> Any:
  """Returns the function of all lanes at once."""

  def whole(lus: Any, b: Any) -> Any:
    if not isinstance(lus, list):
      return solve(lus, b)
    sizes.append(len(lus))
    return np.stack([solve(lu, row) for lu, row in zip(lus, b, strict=True)])

  return whole


def holding(solve: Any, backwards: Any, vmap: Any) -> Solve:
  def forward(a: Any, b: Any) -> Any:
    lu = cg.hold(lu_factor)(a)
    x = cg.use(solve, lu, b, out=b, vmap=vmap)
    return x, (lu, x)

  def backward(residuals: Any, cotangent: Any) -> Any:
    lu, x = residuals
    found = cg.use(backwards, lu, cotangent, out=cotangent, vmap=vmap)
    return -jnp.outer(found, x), found

  held = jax.custom_vjp(lambda a, b: forward(a, b)[0])
  held.defvjp(forward, backward)
  return held


sizes = list[int]()
held = holding(lu_solve, solve_transposed, "each")
held_whole = holding(over_objects(lu_solve), over_objects(solve_transposed), "whole")


def tapped(a: Any, b: Any) -> Any:
  return cg.tap(solver()(a, b), lambda x: None)


def steps(solve: Solve, until: Any, a: Any, x: Any, length: int = 6) -> Any:
  step = lambda c, _: ((solve(a, c[0]), c[1] + 1), None)
  return cg.scan(step, (x, 0), length=length, until=lambda c: c[1] >= until)[0][0]


def in_a_loop(solve: Solve) -> Any:
  return lambda a, k: steps(solve, k, a, B).sum()


def in_a_branch(solve: Solve) -> Any:
  return lambda a, k: jax.lax.cond(k > 1, lambda a: solve(a, B).sum(), jnp.sum, a)


def in_loops(solve: Solve) -> Any:
  def f(a: Any, k: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
      x, i = carry
      return (1.0 + steps(solve, k, a * (1 + 0.1 * i), x, 4), i + 1), None

    return cg.scan(step, (B, 0), length=5, until=lambda c: c[1] > k)[0][0].sum()

  return f


def factorized_before(of: Any) -> Any:
  def f(a: Any, k: Any) -> Any:
    if of is by_jax:
      return in_a_loop(of)(a, k)
    lu = of.factor(a)
    return in_a_loop(lambda a, b: of(a, b, factor=lu))(a, k)

  return f


def with_a_collective(solve: Solve) -> Any:
  def mixed(a: Any, b: Any) -> Any:
    return solve(a, b) + 0.1 * jax.lax.psum(b, "lanes")

  return in_a_loop(mixed)


def over(axes: Any) -> Any:
  return lambda f: jax.vmap(f, axes, axis_name="lanes")


def linearized(f: Any) -> Any:
  return lambda a, k: jax.linearize(lambda a: f(a, k), a)[1](jnp.cos(a))


def pushed(f: Any) -> Any:
  return lambda a, k: jax.jvp(lambda a: f(a, k), (a,), (jnp.cos(a),))


def of_gradient(f: Any) -> Any:
  return lambda a, k: jax.jvp(lambda a: jax.grad(f)(a, k), (a,), (jnp.cos(a),))[1]


SHARED, OWN = (over((None, 0)), A, ENDS), (over((0, 0)), MATRICES, ENDS)
NESTED = (lambda f: over((0, 0))(jax.vmap(f, (None, 0))), MATRICES, jnp.array([[1, 3], [2, 0]]))
CROSSED = (lambda f: over((None, 0))(jax.vmap(f, (0, None))), MATRICES, ENDS)
# How objects are used; the user; the derivative; the lanes.
TABLE: dict[str, tuple[Any, Solve, Any, Any]] = {
  "grad": (in_a_loop, solver(), jax.grad, SHARED),
  "grad of own matrices": (in_a_loop, solver(), jax.grad, OWN),
  "grad of lanes of lanes": (in_a_loop, solver(), jax.grad, NESTED),
  "grad of crossed lanes": (in_a_loop, solver(), jax.grad, CROSSED),
  "linearize": (in_a_loop, solver(), linearized, SHARED),
  "jvp": (in_a_loop, solver(), pushed, OWN),
  "forward over reverse": (in_a_loop, solver(), of_gradient, OWN),
  "grad of checkpoint": (in_a_loop, solver(), lambda f: jax.grad(jax.checkpoint(f)), OWN),
  "columns": (in_a_loop, solver(vmap="whole"), jax.grad, SHARED),
  "a hold": (in_a_loop, held, jax.grad, OWN),
  "a hold at once": (in_a_loop, held_whole, jax.grad, OWN),
  "a hold at once of one matrix": (in_a_loop, held_whole, jax.grad, SHARED),
  "a hold at once of lanes of lanes": (in_a_loop, held_whole, jax.grad, NESTED),
  "a hold at once of crossed lanes": (in_loops, held_whole, jax.grad, CROSSED),
  "a hold at once in a branch": (in_a_branch, held_whole, jax.grad, OWN),
  "a hold at once with a collective": (with_a_collective, held_whole, jax.grad, OWN),
  "a tap": (in_a_loop, tapped, jax.grad, OWN),
  "a branch": (in_a_branch, solver(), jax.grad, OWN),
  "loops": (in_loops, solver(), jax.grad, SHARED),
  "a factor": (factorized_before, solver(), jax.grad, SHARED),
  "a factor of own matrices": (factorized_before, solver(), jax.grad, OWN),
  "a collective": (with_a_collective, solver(), jax.grad, SHARED),
}


@pytest.mark.parametrize("name", TABLE)
def test_lanes_that_have_ended_need_no_object(name: str) -> None:
  use, solve, derivative, (lanes, a, k) = TABLE[name]
  got = jax.jit(lanes(derivative(use(solve))))(a, k)

  want = jax.jit(lanes(derivative(use(by_jax))))(a, k)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_lanes_that_have_ended_are_not_solved_backwards(jit: Any) -> None:
  # Lanes of one matrix may be solved along, as in JAX: it decides by its version.
  transposed.clear()
  lanes, a, k = OWN
  jax.block_until_ready(jit(lanes(jax.grad(in_a_loop(solver()))))(a, k))
  assert len(transposed) == int(ENDS.sum())


@pytest.mark.parametrize("engine", ["callgate", "jax"])
@pytest.mark.parametrize("taking", [(0, 3, 0, 2), (0, 0, 0, 0)])
def test_a_use_of_all_lanes_at_once_is_one_call_of_lanes_with_objects(
  engine: Any, taking: Any
) -> None:
  matrices, ends = jnp.stack([A, A + 0.1, A + 0.2, A + 0.3]), jnp.array(taking)
  slopes = lambda solve: jax.jit(jax.vmap(jax.grad(in_a_branch(solve))))
  with cg.config(engine=engine):
    sizes.clear()
    got = jax.block_until_ready(slopes(held_whole)(matrices, ends))
    assert len(sizes) == 1 + any(taking)  # forwards all lanes solve, as with jnp.linalg.solve
  np.testing.assert_allclose(got, slopes(by_jax)(matrices, ends), rtol=1e-4, atol=1e-5)


def test_a_use_of_all_lanes_at_once_stays_one_call_in_a_branch() -> None:
  seen = list[int]()

  def total(objects: list[float], x: Any) -> Any:
    seen.append(len(objects))
    return np.array(objects, np.float32) + x

  def f(x: Any) -> Any:
    handle = cg.hold(float)(x)
    taken = lambda: cg.use(total, handle, x, out=x, vmap="whole")
    return jax.lax.cond(x > 1, taken, lambda: -x)

  got = jax.block_until_ready(jax.jit(jax.vmap(f))(jnp.arange(4.0)))
  np.testing.assert_array_equal(got, [0, -1, 4, 6])
  assert seen == [4]
