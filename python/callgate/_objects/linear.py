# SPDX-License-Identifier: Apache-2.0
"""`callgate.linear_solver`: differentiable linear solvers on the host, which factorize once."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

from collections.abc import Callable
from typing import Any, Literal, get_args

from callgate._core import options as _options
from callgate._core import registry
from callgate._core.pickling import Origin, made_by
from callgate._core.public import core
from callgate._core.where import where
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions, Thread
from callgate._objects.handle import Handle
from callgate._objects.hold import Place, on_thread
from callgate._objects.solver import Solver, SolverFunctions
from callgate._places import threads

Columns = Literal["each", "whole"]


def linear_solver(
  *, factor: Callable[..., Any], solve: Callable[..., Any],
  solve_transposed: Callable[..., Any] | None = None, matvec: Callable[..., Any] | None = None,
  symmetric: bool = False, cast: bool | None = None,
  run_on: Place = None, thread: Thread = "xla",
  timeout: float | None = None, vmap: Columns = "each", name: str | None = None,
) -> "LinearSolver":  # fmt: skip
  """Wraps a Python linear solver as a differentiable JAX function: `x = solver(a, b)`, `a x = b`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from scipy.linalg import lu_factor, lu_solve

  solver = cg.linear_solver(
    factor=lu_factor, solve=lu_solve, solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1)
  )
  a, b = jnp.array([[2.0, 1.0], [0.0, 4.0]]), jnp.array([4.0, 4.0])
  assert jnp.allclose(solver(a, b), jnp.array([1.5, 1.0]))
  gradient = jax.jit(jax.grad(lambda a: solver(a, b).sum()))(a)  # one factorization
  ```

  A solve and all its derivatives, of any order and in both modes, share one object, which `factor`
  makes once for each value of `a`. Let A be the matrix of `a`. Then d x = A^-1 (d b - (d A) x), and
  reverse mode multiplies the cotangent of x by A^-T. Derivatives in `a` need A x as a JAX function:
  `a @ x` if `a` is one array, else `matvec`.

  Args:
    factor: `factor(a) -> object`, any object: a factorization, a preconditioner. Its arrays are
      private copies.
    solve: `solve(object, b) -> x`, with the shape and dtype of `b`, a float or complex array.
    solve_transposed: `solve_transposed(object, b) -> x` with A^T x = b (not conjugated); reverse
      mode needs it.
    matvec: `matvec(a, x) -> A x`, a JAX function; derivatives in `a` need it.
    symmetric: A^T is A, so `solve` also serves as `solve_transposed`.
    cast: allows same-kind casts of the results of `solve`; see `callgate.gate`.
    run_on: where `factor` and `solve` run: see `callgate.hold`. Default: XLA's thread if one call
      factorizes and solves; the thread of objects if several calls, as those of derivatives, share
      a factorization.
    thread: see `callgate.hold`.
    timeout: see `callgate.gate`.
    vmap: for lanes that share `a`: "each" calls `solve` for each lane; "whole" calls it once, with
      the lanes' right-hand sides as columns, float[n, lanes].
    name: the name in programs and messages. Default: as for `callgate.gate`, of `solve`.

  Returns:
    A gate that you call as `solver(a, b)`, with an array or a pytree of arrays `a`, and an array
    `b`. Under `jax.vmap` an `a` that isn't mapped is factorized once for all lanes. To factorize
    once for several calls, pass `f = solver.factor(a)` as `solver(a, b, factor=f)`.

  Raises:
    GateDefinitionError: an option is wrong; or, while tracing, the arguments don't fit each other,
      or a derivative needs `matvec` or `solve_transposed`, which is missing.
  """
  label = f"linear solver '{name}'" if isinstance(name, str) else "linear solver"
  for what, function in (("factor", factor), ("solve", solve)):
    _options.function(label, what, function)
  _options.or_none(_options.function, label, "solve_transposed", solve_transposed)
  _options.or_none(_options.function, label, "matvec", matvec)
  _options.boolean(label, "symmetric", symmetric)
  _options.choice(label, "vmap", vmap, allowed=get_args(Columns))
  parts = SolverFunctions(factor, solve, solve_transposed, matvec, symmetric, vmap == "whole")
  place: dict[str, Any] = {"run_on": run_on, "thread": thread, "timeout": timeout}
  of_objects = on_thread(place, threads.objects())
  if run_on is None:  # a single call has no object that outlives it
    place["run_on"] = "xla"
  given = GateOptions(out=_as_b, cast=cast, name=name, **place)
  here = where()
  with registry.defining(here.definition()):
    made = LinearSolver(Solver(parts, given, of_objects))
  options = {
    "factor": factor, "solve": solve, "solve_transposed": solve_transposed, "matvec": matvec,
    "symmetric": symmetric, "cast": cast, "run_on": run_on, "thread": thread, "timeout": timeout,
    "vmap": vmap, "name": name,
  }  # fmt: skip
  return made_by(Origin(here.module, linear_solver, (), options), made)


class LinearSolver(Gate[..., Any]):
  """A differentiable linear solver; made by `callgate.linear_solver`."""

  _makers = "callgate.linear_solver"

  def factor(self, a: Any, /) -> Handle:
    """Factorizes `a` once, for `solver(a, b, factor=...)`.

    ```python
    import callgate as cg, jax, jax.numpy as jnp
    from scipy.linalg import lu_factor, lu_solve

    solver = cg.linear_solver(
      factor=lu_factor, solve=lu_solve, solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1)
    )

    @jax.jit
    def steps(a, u):  # implicit Euler steps with one factorization
      lu = solver.factor(a)
      return jax.lax.scan(lambda u, _: (solver(a, u, factor=lu), None), u, length=100)[0]

    assert jnp.allclose(steps(2 * jnp.eye(3), jnp.ones(3)), 2.0**-100)
    ```

    Args:
      a: as for the solver. Derivatives in `a` are the same as without `factor=`.

    Returns:
      A `Handle`, which goes through `jit`, loops, branches and `vmap` as an array does.
    """
    return core(self).make(a)


def _as_b(a: Any, b: Any) -> Any:
  del a
  return b
