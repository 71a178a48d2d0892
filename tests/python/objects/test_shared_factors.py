# SPDX-License-Identifier: Apache-2.0
"""Loops that may end early, or run no step, factorise a matrix that does not change once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lu_factor, lu_solve

import callgate as cg

A = jnp.array([[1.0, 0.5, 0.0], [0.0, 2.0, 0.25], [0.15, 0.0, 1.5]])
U = jnp.array([1.0, 2.0, -1.0])
LANES = jnp.stack([U, 2 * U, -U])
MATRICES = jnp.stack([A, 1.1 * A])


class Factor:
  """A factorisation that counts those alive."""

  live = most = made = 0

  def __init__(self, a: Any) -> None:
    self.lu = lu_factor(a)
    Factor.live, Factor.made = Factor.live + 1, Factor.made + 1
    Factor.most = max(Factor.most, Factor.live)

  def __del__(self) -> None:
    Factor.live -= 1


@pytest.fixture(autouse=True)
def counts_nothing() -> None:
  cg.held()
  Factor.most = Factor.made = 0


def solver(**options: Any) -> Any:
  return cg.linear_solver(
    factor=Factor, solve=lambda f, b: lu_solve(f.lu, b),
    solve_transposed=lambda f, b: lu_solve(f.lu, b, trans=1), **options,
  )  # fmt: skip


def until(solve: Any, a: Any, u: Any, ends: Any = 7, length: int = 11, **options: Any) -> Any:
  step = lambda c, x: ((solve(a, c[0]) * x, c[1] + 1), None)
  xs = jnp.linspace(1.0, 1.1, length)
  return cg.scan(step, (u, 0), xs, until=lambda c: c[1] >= ends, **options)[0][0]


def until_its_last_chunk(solve: Any, a: Any, u: Any) -> Any:
  return until(solve, a, u, 10)


def without_chunks(solve: Any, a: Any, u: Any) -> Any:
  return until(solve, a, u, checkpoint=False)


def backwards(solve: Any, a: Any, u: Any) -> Any:
  return until(solve, a, u, reverse=True, unroll=2)


def stoppable(solve: Any, a: Any, u: Any) -> Any:
  step = lambda c, _: (jax.jit(lambda c: solve(a, c))(c), None)
  return cg.scan(step, u, length=11, stoppable=True)[0]


def of_what_the_body_computes(solve: Any, a: Any, u: Any) -> Any:
  return until(lambda a, u: solve(jnp.eye(3) + 0.5 * a, u), a, u, stoppable=True)


def around_a_loop(solve: Any, a: Any, u: Any) -> Any:
  inner = lambda a, u: jax.lax.scan(lambda c, _: (solve(a, c), None), u, length=3)[0]
  return until(inner, a, u)


def in_a_loop(solve: Any, a: Any, u: Any) -> Any:
  return jax.lax.scan(lambda c, _: (stoppable(solve, a, c), None), u, length=3)[0]


def in_one_of_its_kind(solve: Any, a: Any, u: Any) -> Any:
  return until(lambda a, u: until(solve, a, u, 2, 4), a, u, 3, 5)


def whose_carry_changes_its_type(solve: Any, a: Any, u: Any) -> Any:
  step = lambda c, _: ((solve(a, c[0]), c[1] + jnp.float32(0.5)), None)
  return cg.scan(step, (u, 0), length=9, until=lambda c: c[1] > 2)[0][0]


def a_while_loop(solve: Any, a: Any, u: Any) -> Any:
  step = lambda c: (solve(a, c[0]), c[1] + 1)
  return jax.lax.while_loop(lambda c: c[1] < 5, step, (u, 0))[0]


def a_loop_of_unknown_length(solve: Any, a: Any, u: Any) -> Any:
  return jax.lax.fori_loop(0, (6 - 2 * u[0]).astype(int), lambda _, c: solve(a, c), u)


ENDING = [
  until, until_its_last_chunk, without_chunks, backwards, stoppable, of_what_the_body_computes,
  around_a_loop, in_a_loop, in_one_of_its_kind, whose_carry_changes_its_type,
]  # fmt: skip
WHILE = [a_while_loop, a_loop_of_unknown_length]  # without reverse mode


def total(f: Any) -> Any:
  return lambda a, u: f(a, u).sum()


# How the loop is transformed, (a, u), and the factorisations.
TABLE: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
  "call": (lambda f: f, (A, U), 1),
  "jvp": (lambda f: lambda a, u: jax.jvp(f, (a, u), (a, u)), (A, U), 1),
  "lanes": (lambda f: jax.vmap(f, (None, 0)), (A, LANES), 1),
  "lanes of matrices": (lambda f: jax.vmap(f, (0, None)), (MATRICES, U), 2),
  "grad": (lambda f: jax.grad(total(f), (0, 1)), (A, U), 1),
  "grad of lanes": (lambda f: jax.grad(total(jax.vmap(f, (None, 0))), (0, 1)), (A, LANES), 1),
  "lanes of grad": (
    lambda f: jax.vmap(jax.grad(total(f), (0, 1)), (0, None)), (MATRICES, U), 2
  ),
  "jvp of grad": (
    lambda f: lambda a, u: jax.jvp(jax.grad(total(f), 1), (a, u), (a, u)), (A, U), 1
  ),
  "grad in a loop": (
    lambda f: jax.grad(
      total(lambda a, u: jax.lax.scan(lambda c, _: (f(a, c), None), u, length=2)[0])
    ), (A, U), 1
  ),
}  # fmt: skip


FORWARD = ["call", "jvp", "lanes", "lanes of matrices"]
CASES = [
  *((name, until) for name in TABLE),
  *((name, loop) for loop in (stoppable, in_one_of_its_kind) for name in ("call", "lanes of grad")),
  *((name, loop) for loop in ENDING for name in ("call", "grad", "lanes of matrices")),
  *((name, loop) for loop in WHILE for name in FORWARD),
]


@pytest.mark.parametrize(
  ("name", "loop"), dict.fromkeys(CASES), ids=lambda x: getattr(x, "__name__", x)
)
def test_one_factor_serves_all_steps(name: str, loop: Any) -> None:
  transform, args, factorised = TABLE[name]
  solve = solver(vmap="whole" if loop is stoppable else "each")
  got = jax.block_until_ready(jax.jit(transform(lambda *of: loop(solve, *of)))(*args))
  cg.barrier()
  assert Factor.made == factorised
  cg.held()
  assert Factor.live == 0
  want = jax.jit(transform(lambda *of: loop(jnp.linalg.solve, *of)))(*args)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4), got, want)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_lanes_that_end_at_different_steps_share_it(checkpoint: bool) -> None:
  def lanes(solve: Any) -> Any:
    one = lambda a, u, ends: until(solve, a, u, ends, checkpoint=checkpoint).sum()
    summed = lambda a, u: jax.vmap(one, (None, 0, 0))(a, u, jnp.array([1, 5, 11])).sum()
    return jax.jit(jax.value_and_grad(summed, (0, 1)))(A, LANES)

  got, want = jax.block_until_ready(lanes(solver())), lanes(jnp.linalg.solve)
  assert Factor.made == 1
  cg.held()
  assert Factor.live == 0
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4), got, want)


@pytest.mark.parametrize("options", [{"until": lambda u: u[0] > 9}, {"stoppable": True}])
def test_a_loop_that_only_logs_keeps_its_factor_to_the_last(options: Any) -> None:
  solve, seen = solver(), list[float]()
  log = cg.gate(lambda x: seen.append(float(x[0])), out=(), effect="io")

  def logging(a: Any, u: Any) -> Any:
    def step(u: Any, i: Any) -> Any:
      log(solve(a, u * i))
      return u, None

    return cg.scan(step, u, jnp.arange(1.0, 6.0), **options)[2]

  start = jnp.linalg.solve(A, U)[0]
  for run in range(1, 4):
    with cg.errors():
      assert jax.jit(lambda a, u: logging(a, u))(A, U) == 5
    np.testing.assert_allclose(sorted(seen), start * np.arange(1, 6), rtol=1e-5)
    assert Factor.made == run
    seen.clear()
  cg.held()
  assert Factor.live == 0


def test_a_stop_before_the_first_step_keeps_nothing() -> None:
  solve = solver()
  stop = cg.gate(lambda x: cg.stop("enough") or x, out=lambda x: x, effect="io")

  @jax.jit
  def program(a: Any, u: Any) -> Any:
    u = stop(u)
    return cg.scan(lambda c, _: (solve(a, c), c), u, length=5, stoppable=True)

  last, ys, steps = program(A, U)
  np.testing.assert_array_equal(last, U)
  assert steps == 0
  assert not ys.any()
  assert Factor.made <= 1
  cg.held()
  assert Factor.live == 0


def test_a_loop_without_a_step_does_not_factorise() -> None:
  solve = solver()
  loop = jax.jit(
    lambda a, u, n: jax.lax.while_loop(
      lambda c: c[1] < n, lambda c: (solve(a, c[0]), c[1] + 1), (u, 0)
    )
  )
  np.testing.assert_array_equal(loop(A, U, 0)[0], U)
  assert Factor.made == 0
  np.testing.assert_allclose(loop(A, U, 1)[0], jnp.linalg.solve(A, U), rtol=1e-5)
  assert Factor.made == 1


def test_a_condition_with_an_effect_is_asked_once_a_step() -> None:
  solve, asked = solver(), list[int]()
  less = cg.gate(
    lambda n: asked.append(int(n)) or n < 3, out=jax.ShapeDtypeStruct((), bool), effect="io"
  )
  step = lambda c: (solve(A, c[0]), c[1] + 1)
  got = jax.jit(lambda u: jax.lax.while_loop(lambda c: less(c[1]), step, (u, 0)))(U)
  assert (int(got[1]), asked, Factor.made) == (3, [0, 1, 2, 3], 3)


def test_calls_outside_of_programs_factorise_once_each() -> None:
  solve = solver()
  body, ends = lambda c, _: ((solve(A, c[0]), c[1] + 1), None), lambda c: c[1] >= 3
  want = jax.lax.fori_loop(0, 3, lambda _, c: jnp.linalg.solve(A, c), U)
  for run in range(1, 4):
    (got, _), _, steps = cg.scan(body, (U, 0), length=7, until=ends)
    assert (int(steps), Factor.made) == (3, run)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    cg.held()
    assert Factor.live == 0
  with jax.disable_jit():
    np.testing.assert_allclose(cg.scan(body, (U, 0), length=7, until=ends)[0][0], want, rtol=1e-5)


@pytest.mark.parametrize("options", [{"until": lambda u: u[0] < 0.5}, {"stoppable": True}])
def test_derivatives_and_lanes_outside_of_programs_keep_no_factor(options: Any) -> None:
  solve = solver()

  def loop(solve: Any, a: Any, u: Any) -> Any:
    return cg.scan(lambda u, _: (solve(a, u), None), u, length=4, **options)[0]

  eager: list[Callable[[Any], Any]] = [
    lambda solve: jax.vmap(lambda u: loop(solve, A, u))(LANES),
    lambda solve: jax.vmap(lambda a: loop(solve, a, U))(MATRICES),
    lambda solve: jax.grad(lambda a: loop(solve, a, U).sum())(A),
    lambda solve: jax.jvp(lambda u: loop(solve, A, u), (U,), (U,))[1],
    lambda solve: jax.vmap(jax.grad(lambda u: loop(solve, A, u).sum()))(LANES),
  ]
  for count, each in zip((1, 2, 1, 1, 1), eager, strict=True):
    Factor.made = 0
    got = jax.block_until_ready(each(solve))
    np.testing.assert_allclose(got, each(jnp.linalg.solve), rtol=1e-4, atol=1e-5)
    assert Factor.made == count
    cg.held()
    assert Factor.live == 0


def test_a_factor_lives_for_the_backward_loop() -> None:
  """JAX hoists nothing out of a loop with an effect: its factor's handle is a residual."""
  solve = solver()
  note = cg.gate(lambda x: None, out=(), effect="io")

  def steps(solve: Any, a: Any, noted: bool) -> Any:
    def step(u: Any, _: Any) -> Any:
      u = solve(a, u)
      if noted:
        note(jax.lax.stop_gradient(u))
      return u, None

    return jax.lax.scan(step, U, length=5)[0].sum()

  def train(solve: Any, noted: bool) -> Any:
    slope = jax.grad(lambda a: steps(solve, a, noted))
    return jax.jit(
      lambda a: jax.lax.scan(lambda a, _: (a - 1e-3 * slope(a), None), a, length=40)[0]
    )

  got = jax.block_until_ready(train(solve, True)(A))
  assert (Factor.made, Factor.most) == (40, 1)
  np.testing.assert_allclose(got, train(jnp.linalg.solve, False)(A), rtol=1e-5)
  cg.held()
  assert Factor.live == 0
