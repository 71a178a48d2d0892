# SPDX-License-Identifier: Apache-2.0
"""Linear solvers and roots of the host: values, derivatives of any order, and factorisations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from scipy.linalg import cho_factor, cho_solve, lu_factor, lu_solve
from scipy.sparse.linalg import splu

import callgate as cg

Solve = Callable[[Any, Any], Any]
N = 2  # rows of dense systems
made = 0


@pytest.fixture(params=[True])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
  with jax.enable_x64(request.param):
    yield request.param


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
  global made
  made = 0
  yield
  assert not any("factor" in name for name in cg.held())


def factor(a: Any) -> Any:
  global made
  made += 1
  return lu_factor(a)


def dense() -> cg.Gate:
  return cg.linear_solver(
    factor=factor, solve=lu_solve, solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1)
  )


def by_jax(a: Any, b: Any) -> Any:
  """Cramer's rule, which compiles faster than `jnp.linalg.solve`."""
  first = a[1, 1] * b[0] - a[0, 1] * b[1]
  second = a[0, 0] * b[1] - a[1, 0] * b[0]
  return jnp.stack([first, second]) / (a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0])


def system(lanes: int | None = None) -> tuple[Any, Any]:
  rng = np.random.default_rng(0)
  lead = () if lanes is None else (lanes,)
  a = rng.normal(size=(*lead, N, N)) + 4 * np.eye(N)
  return jnp.asarray(a), jnp.asarray(rng.normal(size=(*lead, N)))


def loss(solve: Solve) -> Solve:
  return lambda a, b: jnp.sum(jnp.sin(solve(a, b)))


def in_scan(solve: Solve) -> Solve:
  def total(a: Any, b: Any) -> Any:
    return jax.lax.scan(lambda x, _: (solve(a, x) + b, None), b, None, length=4)[0].sum()

  return total


def in_cond(solve: Solve) -> Solve:
  f = loss(solve)
  return lambda a, b: jax.lax.cond(b[0] > 0, f, lambda a, b: 2 * f(a, b), a, b)


ARGS = (0, 1)
# Uses of a solver, the lanes of its arguments, and the factorisations that it takes; None for any
# number.
TABLE: dict[str, tuple[Callable[[Solve], Any], int | None, int | None]] = {
  "call": (lambda s: s, None, 1),
  "jit": (jax.jit, None, 1),
  "grad": (lambda s: jax.grad(loss(s), ARGS), None, 1),
  "jit of grad": (lambda s: jax.jit(jax.grad(loss(s), ARGS)), None, 1),
  "grad of jit": (lambda s: jax.grad(jax.jit(loss(s)), ARGS), None, 1),
  "grad in b": (lambda s: jax.jit(jax.grad(loss(s), 1)), None, 1),
  "value and grad": (lambda s: jax.jit(jax.value_and_grad(loss(s), ARGS)), None, 1),
  "jvp": (lambda s: lambda a, b: jax.jvp(s, (a, b), (0.3 * a, 0.2 * b)), None, 1),
  "jacfwd": (lambda s: jax.jit(jax.jacfwd(s, ARGS)), None, 1),
  "jacrev": (lambda s: jax.jit(jax.jacrev(s, ARGS)), None, 1),
  "forward over reverse": (lambda s: jax.jit(jax.hessian(loss(s), ARGS)), None, 1),
  "reverse over reverse": (lambda s: jax.jit(jax.jacrev(jax.grad(loss(s), ARGS), ARGS)), None, 1),
  "forward over forward": (lambda s: jax.jacfwd(jax.jacfwd(loss(s), ARGS), ARGS), None, 1),
  "reverse over forward": (lambda s: jax.jit(jax.jacrev(jax.jacfwd(loss(s), ARGS), ARGS)), None, 1),
  "third": (lambda s: jax.jit(jax.jacfwd(jax.jacrev(jax.jacfwd(loss(s))))), None, 1),
  "vmap": (jax.vmap, 3, 3),
  "vmap of grad": (lambda s: jax.jit(jax.vmap(jax.grad(loss(s), ARGS))), 3, 3),
  "grad of vmap": (
    lambda s: jax.jit(jax.grad(lambda a, b: jax.vmap(loss(s))(a, b).sum(), ARGS)), 3, 3,
  ),
  "grad of scan": (lambda s: jax.jit(jax.grad(in_scan(s), ARGS)), None, None),
  "hessian of scan": (lambda s: jax.jit(jax.hessian(in_scan(s), ARGS)), None, None),
  "grad of cond": (lambda s: jax.jit(jax.grad(in_cond(s), ARGS)), None, 1),
  "vmap of grad of cond": (lambda s: jax.jit(jax.vmap(jax.grad(in_cond(s), ARGS))), 3, None),
  "grad of checkpoint": (lambda s: jax.jit(jax.grad(jax.checkpoint(loss(s)), ARGS)), None, 1),
}  # fmt: skip


def assert_alike(got: Any, want: Any, x64: bool) -> None:
  tolerance = 1e-10 if x64 else 2e-4
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# These cast, or have JAX make zeros or ones.
IN_SINGLE_PRECISION = ["call", "jvp", "reverse over reverse", "vmap of grad", "grad of scan"]


@pytest.mark.parametrize(
  ("name", "x64"),
  [*((name, True) for name in TABLE), *((name, False) for name in IN_SINGLE_PRECISION)],
  indirect=["x64"],
)
def test_a_solver_is_what_jax_has_under_every_transformation(name: str, x64: bool) -> None:
  transform, lanes, factorisations = TABLE[name]
  a, b = system(lanes)
  got = jax.block_until_ready(transform(dense())(a, b))
  assert factorisations is None or made == factorisations
  assert_alike(got, jax.jit(transform(by_jax))(a, b), x64)


@pytest.mark.parametrize("name", ["grad", "jit of grad", "vmap of grad", "grad of scan"])
def test_the_oracle_agrees(name: str) -> None:
  transform, lanes, _ = TABLE[name]
  a, b = system(lanes)
  with cg.config(engine="jax"):
    assert_alike(transform(dense())(a, b), transform(by_jax)(a, b), x64=False)


def test_a_matrix_of_all_lanes_is_factorised_once() -> None:
  a, b = system()
  bs = jnp.stack([b, 2 * b, -b])
  got = jax.jit(jax.vmap(dense(), (None, 0)))(a, bs)
  assert made == 1
  assert_alike(got, jnp.stack([by_jax(a, x) for x in bs]), x64=False)


def test_a_right_hand_side_may_have_columns() -> None:
  a, _ = system()
  b = jnp.arange(N * 2.0).reshape(N, 2)
  f = lambda s: jax.jit(jax.grad(lambda a, b: (s(a, b) ** 2).sum(), ARGS))(a, b)
  assert_alike(f(dense()), f(by_jax), x64=False)


def test_complex_systems_are_transposed_and_not_conjugated(x64: bool) -> None:
  a, b = (x + 0.5j * x[::-1] for x in system())
  f = lambda s: jax.grad(lambda a, b: jnp.abs(s(a, b)).sum(), ARGS)(a, b)
  assert_alike(f(dense()), f(by_jax), x64)


def test_a_symmetric_solver_needs_no_transposed_solve() -> None:
  solver = cg.linear_solver(factor=cho_factor, solve=cho_solve, symmetric=True)
  a, b = system()
  of = lambda s: jax.jit(jax.grad(lambda x, b: s(x @ x.T, b).sum(), ARGS))(a, b)
  assert_alike(of(solver), of(by_jax), x64=False)


# -- SuperLU -------------------------------------------------------------------------------------
M = 4
ROWS, COLUMNS = np.array([0, 1, 2, 3, 0, 3, 2]), np.array([0, 1, 2, 3, 2, 1, 3])


def sparse_factor(values: Any) -> Any:
  global made
  made += 1
  return splu(scipy.sparse.csc_matrix((values["data"], (ROWS, COLUMNS)), shape=(M, M)))


def product(values: Any, x: Any) -> Any:
  return jnp.zeros_like(x).at[ROWS].add(values["data"] * x[COLUMNS])


def superlu(matvec: Any = product, **options: Any) -> cg.Gate:
  transposed = lambda lu, b: lu.solve(b, "T")
  given = {"solve_transposed": transposed, "matvec": matvec, **options}
  return cg.linear_solver(factor=sparse_factor, solve=lambda lu, b: lu.solve(b), **given)


def densely(values: Any, b: Any) -> Any:
  return jnp.linalg.solve(jnp.zeros((M, M), b.dtype).at[ROWS, COLUMNS].add(values["data"]), b)


def sparse_system() -> tuple[Any, Any]:
  return {"data": jnp.array([4.0, 3.0, 5.0, 2.0, 0.5, 0.3, -1.0])}, jnp.arange(1.0, M + 1)


@pytest.mark.parametrize("name", ["call", "jit of grad", "reverse over reverse", "jacfwd"])
def test_superlu_has_derivatives_in_its_values(name: str, x64: bool) -> None:
  transform, _, factorisations = TABLE[name]
  args = sparse_system()
  got = jax.block_until_ready(transform(superlu())(*args))
  assert made == factorisations
  assert_alike(got, transform(densely)(*args), x64)


def test_without_a_product_derivatives_in_a_pytree_are_refused_by_name() -> None:
  values, b = sparse_system()
  solver = superlu(matvec=None, name="no product")
  assert_alike(jax.grad(loss(solver), 1)(values, b), jax.grad(loss(densely), 1)(values, b), False)
  with pytest.raises(cg.GateDefinitionError, match=r"linear solver 'no product': diff.*matvec="):
    jax.grad(loss(solver))(values, b)


def test_without_a_transposed_solve_reverse_mode_is_refused_by_name() -> None:
  args = sparse_system()
  solver = superlu(solve_transposed=None, name="forward alone")
  assert_alike(jax.jacfwd(solver)(*args), jax.jacfwd(densely)(*args), False)
  with pytest.raises(cg.GateDefinitionError, match=r"'forward alone': reverse.*solve_transposed="):
    jax.grad(loss(solver))(*args)


def test_a_solve_is_transposed_without_tangents(engine: str) -> None:
  a, b = system()
  transposed = lambda solve: jax.linear_transpose(lambda b: solve(a, b), b)
  np.testing.assert_allclose(transposed(dense())(b)[0], transposed(by_jax)(b)[0], rtol=1e-5)
  lanes = jax.jit(jax.vmap(lambda b: transposed(dense())(b)[0]))(jnp.eye(N))
  np.testing.assert_allclose(lanes, jnp.linalg.inv(a), rtol=1e-4, atol=1e-5)
  forward = cg.linear_solver(factor=lu_factor, solve=lu_solve)
  with pytest.raises(cg.GateDefinitionError, match=r"reverse mode solves.*solve_transposed="):
    transposed(forward)(b)
  with pytest.raises(cg.GateDefinitionError, match="transposed with respect to a; expected b"):
    jax.linear_transpose(lambda a: dense()(a, b), a)(b)


def test_a_singular_matrix_is_the_librarys_own_error() -> None:
  with pytest.raises(RuntimeError, match="singular"), cg.errors():
    jax.block_until_ready(superlu()({"data": jnp.zeros(7)}, jnp.ones(M)))


# -- roots ---------------------------------------------------------------------------------------
def residual(x: Any, theta: Any) -> Any:
  return {"u": x["u"] ** 3 + theta["c"] * x["v"].sum() - theta["t"], "v": 2 * x["v"] - theta["t"]}


def closed_form(theta: Any) -> Any:
  v = theta["t"] / 2
  return {"u": jnp.cbrt(theta["t"] - theta["c"] * v.sum()), "v": v}


def on_host(theta: Any, x0: Any) -> Any:
  global made
  made += 1
  n = x0["u"].size

  def f(x: Any) -> Any:
    u, v = x[:n], x[n:]
    first = u**3 + theta["c"] * v.sum() - theta["t"]
    return np.concatenate([first, 2 * v - theta["t"]])

  x = scipy.optimize.fsolve(f, np.concatenate([x0["u"], x0["v"]]).astype(float), xtol=1e-13)
  return {"u": x[:n], "v": x[n:]}


def theta_and_start() -> tuple[Any, Any]:
  theta = {"t": jnp.array([3.0, 9.0, 20.0]), "c": jnp.asarray(0.1)}
  return theta, {"u": jnp.ones(3), "v": jnp.ones(3)}


def gmres(matvec: Any, b: Any) -> Any:
  return jax.scipy.sparse.linalg.gmres(matvec, b, tol=1e-13, atol=0, solve_method="batched")[0]


@pytest.mark.parametrize(
  ("tangent_solve", "x64"), [(None, False), (None, True), (gmres, True)], indirect=["x64"]
)
def test_roots_have_the_derivatives_of_the_closed_form(tangent_solve: Any, x64: bool) -> None:
  f = cg.root(residual, solver=on_host, tangent_solve=tangent_solve, cast=True)
  theta, x0 = theta_and_start()

  def total(f: Any) -> Any:
    return lambda theta: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(theta)))

  of_host = lambda theta: f(theta, x0)
  assert_alike(of_host(theta), closed_form(theta), x64)
  jitted = lambda of: lambda f: jax.jit(of(f))
  transforms = [jitted(jax.grad), jitted(jax.hessian)]
  if x64 and tangent_solve is None:  # the other takes long to compile
    transforms += [jax.grad, jitted(jax.jacfwd), jitted(jax.jacrev)]
    transforms += [lambda f: jax.jacrev(jax.grad(f))]
  for transform in transforms:
    before = made
    got = jax.block_until_ready(transform(total(of_host))(theta))
    assert made == before + 1
    if x64:
      want = transform(total(closed_form))(theta)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_roots_of_lanes_and_in_loops(engine: str) -> None:
  f = cg.root(lambda x, t: x**2 - t, solver=lambda t, x0: np.sqrt(t))
  slope = jax.grad(lambda t: f(t, jnp.float32(1)))
  ts = jnp.array([1.0, 4.0, 9.0])
  np.testing.assert_allclose(jax.jit(jax.vmap(slope))(ts), 0.5 / np.sqrt(ts), rtol=1e-5)
  loop = lambda t: jax.lax.fori_loop(0, 3, lambda _, t: f(t, t), t)
  np.testing.assert_allclose(jax.jit(loop)(256.0), 2, rtol=1e-6)
  scanned = lambda t: jax.lax.scan(lambda t, _: (f(t, t), None), t, None, length=2)[0]
  np.testing.assert_allclose(jax.jit(jax.grad(scanned))(16.0), 1 / 32, rtol=1e-5)


def test_the_start_is_a_constant_to_derivatives() -> None:
  f = cg.root(lambda x, t: x**2 - t, solver=lambda t, x0: np.sqrt(t))
  assert jax.grad(lambda x0: f(jnp.float32(4), x0))(1.0) == 0


def test_options_that_can_not_be_are_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"linear solver: factor: expected a callable"):
    cg.linear_solver(factor=1, solve=lu_solve)  # type: ignore[arg-type]
  with pytest.raises(cg.GateDefinitionError, match="root: solver: expected a callable"):
    cg.root(residual, solver=None)  # type: ignore[arg-type]
  with pytest.raises(cg.GateDefinitionError, match="symmetric"):
    cg.linear_solver(factor=factor, solve=lu_solve, symmetric=1)  # type: ignore[arg-type]


def test_arguments_that_can_not_be_are_refused_while_tracing() -> None:
  a, b = system()
  solver = cg.linear_solver(factor=lu_factor, solve=lu_solve, name="s")
  refused: list[tuple[tuple[Any, ...], str]] = [
    ((a, jnp.arange(N)), r"'s': b: expected floating-point .*, got int32\[2\]"),
    ((a, b > 0), r"'s': b: expected floating-point .*, got bool\[2\]"),
    ((a, None), r"'s': b: expected floating-point .*, got no array"),
    ((a, jnp.ones(5)), r"'s': b: expected 2 rows, as in a \(float32\[2, ?2\]\), got float32\[5\]"),
    ((a,), "'s': expected two arguments, a and b, got 1"),
  ]
  for args, message in refused:
    for call in (lambda *args: jax.eval_shape(solver, *args), solver):
      with pytest.raises(cg.GateDefinitionError, match=message):
        call(*args)
  squares = cg.linear_solver(
    factor=np.ravel, solve=lambda field, b: b / field, matvec=lambda a, x: a.ravel() * x
  )
  assert squares(jnp.full((2, 2), 2.0), jnp.ones(4)).tolist() == [0.5] * 4  # a is no matrix
  wrong = cg.linear_solver(factor=factor, solve=lu_solve, matvec=lambda a, x: x[:1], name="w")
  with pytest.raises(cg.GateDefinitionError, match=r"'w': matvec: .*, got float32\[1\]"):
    jax.eval_shape(wrong, a, b)


def test_a_residual_of_another_size_is_refused_while_tracing() -> None:
  traced: list[Any] = []

  def two(x: Any, t: Any) -> Any:
    traced.append(x)
    return x[:2] - t[:2]

  f = cg.root(two, solver=lambda t, x0: t, name="r")
  programs = [f, jax.jit(f), jax.grad(lambda t, x: f(t, x).sum()), lambda *a: jax.vmap(f)(*a)]
  for program, shape in zip(programs, [3, 3, 3, (2, 3)], strict=True):
    with pytest.raises(cg.GateDefinitionError, match=r"root 'r': residual: .*, 3, got 2 \(float32"):
      program(jnp.ones(shape), jnp.ones(shape))
  with pytest.raises(cg.GateDefinitionError, match="'r': expected two arguments, theta and x0"):
    f(jnp.ones(3))
  traced.clear()
  assert [float(f(2.0 * jnp.ones(2), jnp.ones(2))[0]) for _ in range(3)] == [2] * 3
  assert len(traced) == 2  # for its types, and for what it closes over
