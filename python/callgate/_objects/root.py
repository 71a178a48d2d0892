# SPDX-License-Identifier: Apache-2.0
"""`callgate.root`: solvers of equations on the host, with implicit derivatives."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from callgate._core import options as _options
from callgate._core import registry
from callgate._core.errors import GateDefinitionError
from callgate._core.pickling import Origin, made_by
from callgate._core.where import where
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions, Thread
from callgate._jax import tracing
from callgate._objects import arguments
from callgate._objects.arguments import TwoArguments
from callgate._places.threads import Thread as OneThread


def root(
  residual: Callable[..., Any], /, *, solver: Callable[..., Any],
  tangent_solve: Callable[..., Any] | None = None, cast: bool | None = None,
  run_on: Literal["xla", "own"] | OneThread = "xla", thread: Thread = "xla",
  timeout: float | None = None, name: str | None = None,
) -> Gate:  # fmt: skip
  """Wraps a Python solver of `residual(x, theta) = 0` as a JAX function: `x = f(theta, x0)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  import scipy.optimize

  def residual(x, theta):
    return x**3 - theta

  def solver(theta, x0):
    return scipy.optimize.root(lambda x: x**3 - theta, x0).x

  cube_root = cg.root(residual, solver=solver, cast=True)
  x = cube_root(jnp.array([8.0]), jnp.array([1.0]))
  slope = jax.grad(lambda theta: cube_root(theta, jnp.array([1.0])).sum())(jnp.array([8.0]))
  assert jnp.allclose(x, 2, rtol=1e-4) and jnp.allclose(slope, 1 / 12, rtol=1e-3)
  ```

  The implicit function theorem gives the derivatives in `theta`: d x = -(dF/dx)^-1 (dF/d theta) d
  theta, where F is the residual. They have any order and both modes. They are as accurate as the
  root, and need a regular dF/dx. The solver itself is called once and isn't differentiated. The
  start `x0` is a constant to derivatives.

  Args:
    residual: a JAX function, whose result has as many elements as `x`.
    solver: `solver(theta, x0) -> x`, a gate's callable; x has the structure and types of `x0`.
    tangent_solve: `tangent_solve(matvec, b) -> y` with matvec(y) = b, a JAX function, for large
      systems. Reverse mode calls it with the transposed matvec. Default: makes the Jacobian matrix
      and calls `jax.numpy.linalg.solve`.
    cast: allows same-kind casts of the results of `solver`; see `callgate.gate`.
    run_on: "xla", "own" or `callgate.thread`: see `callgate.gate`.
    thread: see `callgate.gate`.
    timeout: see `callgate.gate`.
    name: the name in programs and messages. Default: as for `callgate.gate`, of `solver`.

  Returns:
    A gate that you call as `f(theta, x0)`; both are pytrees of arrays.

  Raises:
    GateDefinitionError: an option is wrong; or, while tracing, `residual` has another number of
      elements.
  """
  label = f"root '{name}'" if isinstance(name, str) else "root"
  _options.function(label, "residual", residual)
  _options.function(label, "solver", solver)
  _options.or_none(_options.function, label, "tangent_solve", tangent_solve)
  options = GateOptions(
    out=_as_x0, cast=cast, run_on=run_on, thread=thread, timeout=timeout, name=name
  )
  here = where()
  with registry.defining(here.definition()):
    made = Gate(_Root(residual, solver, tangent_solve or _dense, options))
  given = {
    "solver": solver, "tangent_solve": tangent_solve, "cast": cast, "run_on": run_on,
    "thread": thread, "timeout": timeout, "name": name,
  }  # fmt: skip
  return made_by(Origin(here.module, root, (residual,), given), made)


class _Root(TwoArguments):
  kind = "root"
  names = ("theta", "x0")

  def __init__(
    self, residual: Callable[..., Any], solver: Any, solve: Any, options: GateOptions
  ) -> None:
    super().__init__(solver, options)
    self._residual, self._solver, self._tangent_solve = residual, solver, solve
    self._options = options
    self.set_jvp(self._rule, symbolic_zeros=True)

  def _rule(self, primals: Any, tangents: Any) -> Any:
    (theta, x0), (dtheta, _) = primals, tangents
    residual, solve = self._residual, self._tangent_solve
    x = self(theta, x0)
    moved = jax.jvp(lambda t: residual(x, t), (theta,), (arguments.instantiated(theta, dtheta),))[1]
    flat, unravel = ravel_pytree(x)
    right = ravel_pytree(moved)[0]

    def product(y: Any) -> Any:
      of_x = jax.jvp(lambda x: residual(x, theta), (x,), (unravel(y),))[1]
      return ravel_pytree(of_x)[0].astype(flat.dtype)

    found = jax.lax.custom_linear_solve(
      product, -right.astype(flat.dtype), solve, transpose_solve=solve
    )
    return x, unravel(found)

  def of_closure(self, first: Any, second: Any) -> Any:
    if (closed := arguments.closed_over(self._residual, second, first)) is None:
      return None
    residual, values = closed
    with registry.defining(where()):  # the line may run again with another closure
      made = self.over_values(self.of_closures, lambda x, theta: residual(x, theta[0], *theta[1]))
    return made((first, values), second)

  def over_values(self, name: str, residual: Callable[..., Any] | None = None) -> "_Root":
    solver = self._solver

    def solve(theta: Any, x0: Any) -> Any:
      return solver(theta[0], x0)

    options = dataclasses.replace(self._options, name=name)
    return _Root(residual or self._residual, solve, self._tangent_solve, options)

  def check_arguments(self, leaves: Sequence[Any], tree: Any) -> None:
    x0 = jax.tree.leaves(jax.tree.unflatten(tree, leaves)[1])
    found = self.types_of("residual", lambda t, x: self._residual(x, t), leaves, tree)
    known = arguments.is_known([*x0, *found])
    if known and (have := arguments.size(found)) != (want := arguments.size(x0)):
      raise GateDefinitionError(
        f"{self.label}: residual: expected as many elements as in x0, {want}, got {have} "
        f"({arguments.shown(found)})"
      )


def _as_x0(theta: Any, x0: Any) -> Any:
  del theta
  return x0


def _dense(product: Callable[..., Any], right: Any) -> Any:
  """Solves with the matrix of a linear function, which takes one product for each column."""
  units = tracing.vary_over(tracing.varying_axes([right]), jnp.eye(right.size, dtype=right.dtype))
  columns = jax.vmap(product)(units)
  return jnp.linalg.solve(columns.T, right)
