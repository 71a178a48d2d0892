# SPDX-License-Identifier: Apache-2.0
"""Factorisations that several solves share, and right-hand sides of lanes as columns."""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from scipy.linalg import cho_solve_banded, cholesky_banded, lu_factor, lu_solve

import callgate as cg

A = jnp.array([[1.0, 0.5, 0.0], [0.0, 2.0, 0.25], [0.15, 0.0, 1.5]])
U = jnp.array([1.0, 2.0, -1.0])
STEPS = 100


class Counted:
  """A solver that counts: `factorised`, and the shapes of the right-hand sides of each solve."""

  def __init__(self, **options: Any) -> None:
    self.factorised, self.solved = 0, list[tuple[int, ...]]()

    def factor(a: Any) -> Any:
      self.factorised += 1
      return lu_factor(a)

    def solve(lu: Any, b: Any, trans: int = 0) -> Any:
      self.solved.append(b.shape)
      return lu_solve(lu, b, trans=trans)

    self.solver = cg.linear_solver(
      factor=factor, solve=solve, solve_transposed=lambda lu, b: solve(lu, b, 1), **options
    )

  def plain_steps(self, a: Any, u: Any) -> Any:
    return jax.lax.scan(lambda u, _: (self.solver(a, u), None), u, length=STEPS)[0]

  def steps(self, a: Any, u: Any) -> Any:
    factor = self.solver.factor(a)
    step = lambda u, _: (self.solver(a, u, factor=factor), None)
    return jax.lax.scan(step, u, length=STEPS)[0]


def by_jax(a: Any, u: Any) -> Any:
  return jax.lax.scan(lambda u, _: (jnp.linalg.solve(a, u), None), u, length=STEPS)[0]


def total(f: Any) -> Any:
  return lambda a, u: f(a, u).sum()


LANES = jnp.stack([U, 2 * U, -U])
# How steps are transformed; (a, u); solves with vmap="each" and "whole".
TABLE: dict[str, tuple[Callable[[Any], Any], Any, int, int]] = {
  "call": (lambda f: f, (A, U), STEPS, STEPS),
  "grad": (lambda f: jax.grad(total(f), (0, 1)), (A, U), 2 * STEPS, 2 * STEPS),
  "jvp": (lambda f: lambda a, u: jax.jvp(f, (a, u), (a, u)), (A, U), 2 * STEPS, 2 * STEPS),
  "vmap": (lambda f: jax.vmap(f, (None, 0)), (A, LANES), 3 * STEPS, STEPS),
  "vmap of vmap": (
    lambda f: jax.vmap(jax.vmap(f, (None, 0)), (None, 0)), (A, jnp.stack([LANES, 3 * LANES])),
    6 * STEPS, STEPS,
  ),
  "grad of vmap": (
    lambda f: jax.grad(total(jax.vmap(f, (None, 0))), (0, 1)), (A, LANES), 6 * STEPS, 2 * STEPS
  ),
  "remat": (lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1)), (A, U), -1, -1),
  "hessian": (lambda f: jax.jacfwd(jax.grad(total(f), 1), 1), (A, U), -1, -1),
}  # fmt: skip


@pytest.mark.parametrize("steps", ["steps", "plain_steps"])
@pytest.mark.parametrize("vmap", ["each", "whole"])
@pytest.mark.parametrize("name", TABLE)
def test_steps_with_one_matrix_factorise_once(name: str, vmap: Any, steps: str) -> None:
  transform, args, each, whole = TABLE[name]
  counted = Counted(vmap=vmap)
  program = jax.jit(transform(getattr(counted, steps)))
  for run in range(1, 3):
    counted.solved.clear()
    got = jax.block_until_ready(program(*args))
    cg.barrier()
    if name != "remat":
      assert counted.factorised == run
    if (solves := each if vmap == "each" else whole) > 0:
      assert len(counted.solved) == solves
  want = jax.jit(transform(by_jax))(*args)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4), got, want)


def test_lanes_of_matrices_have_a_factor_each() -> None:
  counted = Counted(vmap="whole")
  matrices, us = jnp.stack([A, 1.1 * A]), jnp.stack([U, -U])
  got = jax.jit(jax.vmap(counted.steps))(matrices, us)
  np.testing.assert_allclose(got, jax.vmap(by_jax)(matrices, us), rtol=2e-3, atol=1e-5)
  assert counted.factorised == 2
  shared = jax.vmap(lambda a, f: jax.vmap(lambda b: counted.solver(a, b, factor=f))(us))
  factors = jax.vmap(counted.solver.factor)(matrices)
  want = jnp.stack([jnp.linalg.solve(a, us.T).T for a in matrices])
  np.testing.assert_allclose(jax.jit(shared)(matrices, factors), want, rtol=1e-5)


def loop_in_a_loop(counted: Counted, a: Any, u: Any) -> Any:
  inner = lambda a, u: jax.lax.scan(lambda u, _: (counted.solver(a, u), None), u, length=10)[0]
  step = lambda c, _: ((c[0] * 1.01, inner(*c)), None)
  return jax.lax.scan(step, (a, u), length=5)[0][1]


def with_a_bar(counted: Counted, a: Any, u: Any) -> Any:
  bar = cg.Progress("steps", file=io.StringIO())
  step = lambda u, _: (counted.solver(a, u), None)
  return cg.scan(step, u, length=50, progress=bar)[0]


def in_a_fori_loop(counted: Counted, a: Any, u: Any) -> Any:
  return jax.lax.fori_loop(0, 50, jax.jit(lambda _, u: counted.solver(a, u)), u)


def of_a_carry(counted: Counted, a: Any, u: Any) -> Any:
  step = lambda c, _: ((c[0] * 1.0, counted.solver(*c)), None)
  return jax.lax.scan(step, (a, u), length=50)[0][1]


def in_a_branch(counted: Counted, a: Any, u: Any) -> Any:
  solved = lambda u: counted.solver(a, u)
  step = lambda u, i: (jax.lax.cond(i < 3, solved, lambda u: u, u), None)
  return jax.lax.scan(step, u, jnp.arange(50))[0]


@pytest.mark.parametrize(
  ("loop", "factorised"),
  [(loop_in_a_loop, 5), (with_a_bar, 1), (in_a_fori_loop, 1), (of_a_carry, 50), (in_a_branch, 3)],
)
def test_a_loop_factorises_a_matrix_that_does_not_change_once(loop: Any, factorised: int) -> None:
  counted = Counted()
  got = jax.jit(lambda a, u: loop(counted, a, u))(A, U)
  cg.barrier()
  assert counted.factorised == factorised
  cg.held()
  assert cg.held().get(f"{counted.solver.name}.factor", 0) == 0
  counted.solver = jnp.linalg.solve
  np.testing.assert_allclose(got, loop(counted, A, U), rtol=2e-3, atol=1e-6)


def of_what_the_body_computes(solver: Any, a: Any, u: Any) -> Any:
  step = lambda u, x: (solver(jnp.eye(3) + 0.5 * a, u) * x, None)
  return jax.lax.scan(step, u, jnp.linspace(1.0, 2.0, 10))[0]


def in_an_inner_loop(solver: Any, a: Any, u: Any) -> Any:
  def inner(u: Any) -> Any:
    half = 0.5 * a
    return jax.lax.scan(lambda u, _: (solver(half, u) + 1, None), u, length=4)[0]

  return jax.lax.scan(lambda u, _: (jax.jit(inner)(u), None), u, length=3)[0]


def in_a_plain_loop(solver: Any, a: Any, u: Any) -> Any:
  return jax.lax.fori_loop(0, 10, lambda i, u: solver(a, u) + i, u)


SHARED: dict[str, tuple[Callable[[Any], Any], int]] = {
  "call": (lambda f: f, 1),
  "jvp": (lambda f: lambda a, u: jax.jvp(f, (a, u), (a, u)), 1),
  "lanes of matrices": (lambda f: lambda a, u: jax.vmap(f, (0, None))(pair(a), u), 2),
  "jvp of lanes": (
    lambda f: lambda a, u: jax.jvp(jax.vmap(f, (0, None)), (pair(a), u), (pair(a), u)), 2
  ),
  "lanes of lanes": (
    lambda f: lambda a, u: jax.vmap(jax.vmap(f, (None, 0)), (2, None))(pair(a, 2), LANES), 2
  ),
  "lanes of lanes of matrices": (
    lambda f: lambda a, u: jax.vmap(jax.vmap(f, (1, None)), (0, 0))(
      jnp.stack([pair(a, 1), pair(2 * a, 1), pair(3 * a, 1)]), LANES
    ), 6
  ),
}  # fmt: skip


def pair(a: Any, axis: int = 0) -> Any:
  return jnp.stack([a, 1.1 * a], axis)


@pytest.mark.parametrize(
  "loop", [of_what_the_body_computes, in_an_inner_loop, in_a_plain_loop], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", SHARED)
def test_steps_share_what_no_step_changes(name: str, loop: Any) -> None:
  transform, factorised = SHARED[name]
  counted = Counted()
  got = jax.jit(transform(lambda a, u: loop(counted.solver, a, u)))(A, U)
  cg.barrier()
  assert counted.factorised == factorised
  assert cg.held().get(f"{counted.solver.name}.factor", 0) == 0
  want = jax.jit(transform(lambda a, u: loop(jnp.linalg.solve, a, u)))(A, U)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4), got, want)


def test_complex_systems_are_transposed_and_not_conjugated() -> None:
  counted, a, b = Counted(), A + 0.5j * A.T, U + 1j
  solved = lambda a, b: counted.solver(a, b, factor=counted.solver.factor(a))
  np.testing.assert_allclose(solved(a, b), jnp.linalg.solve(a, b), rtol=1e-5)
  size = lambda f: jax.grad(lambda a, b: jnp.abs(f(a, b)).sum(), (0, 1))(a, b)
  got, want = size(solved), size(jnp.linalg.solve)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), got, want)


def test_a_program_that_closes_over_a_factor_keeps_it() -> None:
  counted = Counted()
  factors = [counted.solver.factor(A)]
  program = jax.jit(lambda b: counted.solver(A, b, factor=factors[0]))
  first = program(U)
  factors.clear()
  gc.collect()
  cg.held()
  np.testing.assert_array_equal(program(U), first)
  assert counted.factorised == 1


def test_what_matvec_closes_over_has_derivatives() -> None:
  def loss(scale: Any, with_factor: bool) -> Any:
    solver = cg.linear_solver(
      factor=lambda a: a.copy(), solve=lambda f, b: b / f, symmetric=True,
      matvec=lambda a, x: a * x * (scale / scale),
    )  # fmt: skip
    more = {"factor": solver.factor(U)} if with_factor else {}
    return (scale * solver(U, U * scale, **more)).sum()

  got, want = (jax.grad(loss)(2.0, flag) for flag in (True, False))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_anything_else_is_refused() -> None:
  solver = Counted().solver
  with pytest.raises(
    cg.GateDefinitionError, match=r"factor: expected a handle that solver.factor\(a\)"
  ):
    solver(A, U, factor=3)
  with pytest.raises(cg.GateDefinitionError, match=r"returned, got an array float32\[3,3\]"):
    solver(A, U, factor=A)
  with pytest.raises(cg.GateDefinitionError, match="vmap: expected"):
    Counted(vmap="grid")
  with pytest.raises(cg.GateDefinitionError, match="b: expected 3 rows"):
    solver(A, jnp.ones(4), factor=solver.factor(A))


@pytest.mark.parametrize("names", [("heat", "waves"), (None, None)])
def test_a_factor_of_another_solver_is_refused(names: Any) -> None:
  heat, waves = (Counted(name=name).solver for name in names)
  said = (
    rf"linear solver '{re.escape(heat.name)}': factor: expected a handle that its own factor\(a\) "
    rf"returned, got one of linear solver '{re.escape(waves.name)}'. Pass factor=f with f = solver"
  )
  by_argument = jax.jit(lambda a, b, f: heat(a, b, factor=f))
  for call in (
    lambda: heat(A, U, factor=waves.factor(A)),
    lambda: jax.jit(lambda a, b: heat(a, b, factor=waves.factor(a)))(A, U),
    lambda: by_argument(A, U, jax.jit(waves.factor)(A)),
    lambda: jax.vmap(lambda a, b: heat(a, b, factor=waves.factor(a)))(A[None], U[None]),
    lambda: jax.grad(lambda a: heat(a, U, factor=waves.factor(a)).sum())(A),
  ):
    with pytest.raises(cg.GateDefinitionError, match=said):
      call()
  with pytest.raises(cg.GateDefinitionError, match=r"got one of callgate\.hold"):
    heat(A, U, factor=cg.hold(lu_factor)(A))
  want = jnp.linalg.solve(A, U)
  for handle in (heat.factor(A), jax.jit(heat.factor)(A)):
    np.testing.assert_allclose(by_argument(A, U, handle), want, rtol=1e-5)
  assert cg.use(lambda lu: lu[0].copy(), heat.factor(A), out=A).shape == A.shape  # still an object
  with pytest.raises(TypeError, match="pytree"):
    jax.lax.cond(True, heat.factor, waves.factor, A)


EXPORTED = """
import pathlib, subprocess, sys
import jax, jax.numpy as jnp, numpy as np
from scipy.linalg import lu_factor, lu_solve
import callgate as cg

def solver(name="heat", c=1.0, of=lambda a: a):
  return cg.linear_solver(
    factor=lambda a: lu_factor(of(a)), solve=lambda lu, b: lu_solve(lu, b), name=name,
    solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1), vmap="whole",
    matvec=lambda a, x: c * of(a) @ x,
  )

def root(c=1.0):
  host = lambda t, x0: np.cbrt(t[0] * t[1])
  return cg.root(lambda x, t: x**3 - c * t[0], solver=host, name="root")

pair = lambda a: a[0] * a[1]
heat = None if sys.argv[1] == "without" else solver()
over = lambda c, a: lambda b: solver("waves", c, pair)((a, jax.lax.stop_gradient(c)), b)
PROGRAMS = {
  "steps": lambda a, b: jax.lax.scan(lambda u, _: (heat(a, u), None), b[0], length=3)[0],
  "columns": lambda a, b: jax.vmap(jax.vmap(lambda b: heat(a, b)))(jnp.stack([b, 2 * b])),
  "gradient": jax.grad(lambda a, b: jax.vmap(lambda b: heat(a, b, factor=heat.factor(a)))(b).sum()),
  "closure": lambda a, b: jax.grad(lambda c: jax.vmap(over(c, a))(b).sum())(1.5),
  "root": lambda a, b: jax.grad(lambda c: root(c)((b, jax.lax.stop_gradient(c)), b).sum())(1.5),
}
ARGS = 2 * jnp.eye(3) + 0.1, jnp.ones((4, 3))
folder = pathlib.Path(sys.argv[2])
if sys.argv[1] == "export":
  for name, program in PROGRAMS.items():
    exported = jax.export.export(jax.jit(program), disabled_checks=cg.export_checks())(*ARGS)
    (folder / name).write_bytes(exported.serialize())
    np.save(folder / f"{name}.npy", jax.jit(program)(*ARGS))
else:
  if sys.argv[1] == "run":
    defined = solver("waves", of=pair), root()
  for name in PROGRAMS:
    try:
      exported = jax.export.deserialize(bytearray((folder / name).read_bytes()))
      found = exported.call(*ARGS)
      np.testing.assert_allclose(found, np.load(folder / f"{name}.npy"), rtol=1e-6)
      print(name, "ok")
    except Exception as error:
      print(name, str(error).partition("pass ")[2].partition(".")[0])
"""


def test_exported_solvers_need_only_their_own_names(tmp_path: Any) -> None:
  names = ["steps", "columns", "gradient", "closure", "root"]
  assert printed_by(EXPORTED, "export", str(tmp_path)) == ""
  assert printed_by(EXPORTED, "run", str(tmp_path)).split("\n")[:-1] == [f"{n} ok" for n in names]
  owners = dict.fromkeys(names, "heat") | {"closure": "waves", "root": "root"}
  said = printed_by(EXPORTED, "without", str(tmp_path)).split("\n")[:-1]
  assert said == [f"{name} name='{owner}'" for name, owner in owners.items()]


def test_derivatives_of_a_matrix_in_bands_need_matvec() -> None:
  solve = cg.linear_solver(
    factor=cholesky_banded, solve=lambda c, b: cho_solve_banded((c, False), b), symmetric=True
  )
  bands = jnp.stack([-jnp.ones(20), 4 * jnp.ones(20)])
  with pytest.raises(cg.GateDefinitionError, match=r"not a square matrix.*\[2, 20\].*matvec="):
    jax.grad(lambda a: solve(a, jnp.ones(20)).sum())(bands)


@pytest.mark.parametrize("carried", ["a number", "nothing", "no elements"])
def test_a_loop_whose_results_need_no_solve_keeps_its_object_to_the_last(carried: str) -> None:
  """XLA orders the object's end by the loop's results alone: no solve may come after it."""
  counted, seen = Counted(), list[float]()
  note = cg.gate(lambda x: seen.append(float(x[0])), out=(), effect="io")
  first = {"a number": 0.0, "nothing": (), "no elements": jnp.zeros((3, 0))}[carried]

  def program(a: Any, u: Any) -> Any:
    def step(i: Any, carry: Any) -> Any:
      x = u if carried != "no elements" else jnp.zeros((3, 0))
      solved = counted.solver(a, x * (i + 1))
      note(solved[:, :1].sum() + u * (i + 1) if carried == "no elements" else solved)
      return solved if carried == "no elements" else carry

    return jax.lax.fori_loop(0, 5, step, first)

  steps = np.arange(1, 6, dtype=np.float32)
  start = U[0] if carried == "no elements" else jnp.linalg.solve(A, U)[0]
  for _ in range(5):
    with cg.errors():
      jax.block_until_ready(jax.jit(lambda a, u: program(a, u))(A, U))
    np.testing.assert_allclose(sorted(seen), start * steps, rtol=1e-5)
    seen.clear()
