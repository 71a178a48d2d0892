# SPDX-License-Identifier: Apache-2.0
"""The core of a linear solver: its calls with and without an object, their derivatives and lanes.

A program names these calls "NAME[factor]", "NAME[solve]", "NAME[solve_transposed]", and "NAME[solve
of 1]" for right-hand sides with one axis of lanes. A solver that gets the values which `matvec`
closes over is "NAME[closure]".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.batching import one_by_one
from callgate._call.function import ArrayFunction
from callgate._core import dtypes, registry, split
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._core.where import where
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._objects import arguments
from callgate._objects.arguments import TwoArguments
from callgate._objects.handle import Handle
from callgate._objects.hold import Hold, HoldOptions, held
from callgate._objects.use import Use, Using

_AXES = frozenset(map(str, range(1, 32)))  # of lanes, in calls that other processes name
_RHS = 2  # the position of the right-hand side among the arguments of a solve with an object


@dataclasses.dataclass(frozen=True, eq=False)
class SolverFunctions:
  """The user's functions of a linear solver."""

  factor: Callable[..., Any]
  solve: Callable[..., Any]
  solve_transposed: Callable[..., Any] | None
  matvec: Callable[..., Any] | None
  symmetric: bool
  whole: bool  # True if it takes the right-hand sides of all lanes as columns


class Solver(TwoArguments):
  """Factorizes and solves in one call, if there is no derivative."""

  kind = "linear solver"
  names = ("a", "b")
  traits = TwoArguments.traits.but(shares_object=True)

  def __init__(self, parts: SolverFunctions, options: GateOptions, place: dict[str, Any]) -> None:
    factor, solve = parts.factor, parts.solve  # only these go to a worker

    def call(a: Any, b: Any) -> Any:
      return solve(factor(a), b)

    call.__module__ = getattr(parts.solve, "__module__", call.__module__)
    call.__name__ = getattr(parts.solve, "__name__", "solve")
    call.__qualname__ = getattr(parts.solve, "__qualname__", call.__name__)
    super().__init__(call, dataclasses.replace(options, copy=True))
    self.parts, self._options, self._place = parts, options, place
    self.factors_of = self.name  # in its handles; a new solver may take the name
    of_factor = HoldOptions(name=f"{self.name}[factor]", **place)
    self.make: Hold = held(parts.factor, of_factor, solver=self.factors_of)
    core(self.make).traits = core(self.make).traits.but(shares_object=True)
    self._uses: dict[int, tuple[Any, Any]] = {}
    self._solve, self._transposed = self._with_object(0)
    self.set_jvp(self._rule, symbolic_zeros=True)
    self.transpose_rule = self._transpose  # for `jax.linear_transpose`, which has no tangents
    self.vmap_rule = self._mapped

  def __call__(self, *args: Any, factor: Any = None, **kwargs: Any) -> Any:
    if factor is None:
      return super().__call__(*args, **kwargs)
    self._check_factor(factor)
    a, b = split.joined(self.given(args, kwargs)[0])
    solver, a = self._closed(a, b) or (self, a)
    return solver.with_object(factor, a, b)

  def _check_factor(self, factor: Any) -> None:
    if not isinstance(factor, Handle):
      _options.refuse(self.label, "factor", "a handle that solver.factor(a) returned", factor)
    if (solver := core(factor).solver) != self.factors_of:
      made = "callgate.hold" if solver is None else f"linear solver '{solver}'"
      raise GateDefinitionError(
        f"{self.label}: factor: expected a handle that its own factor(a) returned, got one of "
        f"{made}. Pass factor=f with f = solver.factor(a) of this solver"
      )

  def with_object(self, handle: Handle, a: Any, b: Any) -> Any:
    """Solves by the object that `make` has made of `a`."""
    return self._solve(handle, a, b)

  def _with_object(self, axes: int) -> tuple[Any, Any]:
    """Returns the calls `solve(object, a, b)` and its transpose, for a b with `axes` axes of lanes.

    These axes come after the axis of the rows. `a` is there for the derivatives.
    """
    if axes not in self._uses:
      parts = self.parts
      solve = transposed = self._use("solve", parts.solve, self._matvec, axes)
      if parts.solve_transposed is not None and not parts.symmetric:
        what, function = "solve_transposed", parts.solve_transposed
        transposed = self._use(what, function, self._transposed_matvec, axes)
        transposed.deftranspose(lambda ct, h, a, b: solve(h, a, ct))
      solve.deftranspose(lambda ct, h, a, b: self._transpose_solve(ct, h, a, transposed))
      self._uses[axes] = solve, transposed
    return self._uses[axes]

  def define_variant(self, key: str) -> bool:
    what, _, axes = key.partition(" of ")
    if what in ("solve", "solve_transposed") and axes in _AXES:
      self._with_object(int(axes))
    return what in ("factor", "solve", "solve_transposed") or super().define_variant(key)

  def over_values(self, name: str, matvec: Callable[..., Any] | None = None) -> Solver:
    factor = self.parts.factor
    parts = dataclasses.replace(self.parts, factor=lambda a: factor(a[0]), matvec=matvec)
    return Solver(parts, dataclasses.replace(self._options, name=name), self._place)

  def _use(
    self, what: str, solve: Callable[..., Any], matvec: Callable[..., Any], axes: int
  ) -> Any:
    def call(factorised: Any, a: Any, b: Any) -> Any:
      del a
      if axes == 0:
        return solve(factorised, b)
      return np.reshape(solve(factorised, b.reshape(len(b), -1)), b.shape)  # b as columns

    name = f"{self.name}[{what}{f' of {axes}' if axes else ''}]"
    options = GateOptions(
      out=lambda handle, a, b: b, linear=(_RHS,), cast=self._options.cast, name=name, **self._place
    )
    made = Use(Using(call, self.label), options)
    for _ in range(axes):
      matvec = functools.partial(jax.vmap, in_axes=(None, None, 1), out_axes=1)(matvec)

    def rule(primals: Any, tangents: Any) -> Any:
      handle, a, b = primals
      x = made(handle, a, b)
      return x, self._tangent(made, matvec, handle, a, x, tangents[1], tangents[2])

    made.set_jvp(rule, symbolic_zeros=True)
    if self.parts.whole:
      index = int(what != "solve")
      made.vmap_rule = functools.partial(self._as_columns, made, index, axes)
    return ArrayFunction(made)

  def _as_columns(
    self, made: Any, index: int, axes: int, _: int, batched: Any, handle: Any, a: Any, b: Any
  ) -> Any:
    """Solves for lanes that share an object in one call; for others in one call each."""
    if any(jax.tree.leaves((batched[0], batched[1]))):
      leaves, tree = jax.tree.flatten((handle, a, b))

      def lane(operands: Sequence[Any], _: Any) -> list[Any]:
        return [made(*jax.tree.unflatten(tree, operands))]

      return one_by_one(lane, jax.tree.leaves(batched), leaves)[0], True
    call = self._with_object(axes + 1)[index]
    return jnp.moveaxis(call(handle, a, jnp.moveaxis(b, 0, 1)), 1, 0), True

  def _transpose(self, cotangent: Any, a: Any, b: Any) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(a)):
      raise GateDefinitionError(
        f"{self.label}: transposed with respect to a; expected b, in which the solver is linear"
      )
    return self._transpose_solve(cotangent, self.make(a), a, self._transposed)

  def _transpose_solve(self, cotangent: Any, handle: Any, a: Any, transposed: Any) -> Any:
    if self.parts.solve_transposed is None and not self.parts.symmetric:
      raise GateDefinitionError(
        f"{self.label}: reverse mode solves with the transposed matrix; pass solve_transposed=, "
        "or symmetric=True"
      )
    return transposed(handle, a, cotangent)

  def check_arguments(self, leaves: Sequence[Any], tree: Any) -> None:
    of_a, of_b = map(jax.tree.leaves, jax.tree.unflatten(tree, leaves))
    if not of_b or not all(dtypes.is_inexact(jnp.result_type(b)) for b in of_b):
      raise GateDefinitionError(
        f"{self.label}: b: expected floating-point or complex numbers, since x has b's dtype, "
        f"got {arguments.shown(of_b)}"
      )
    if self.parts.whole and len(of_b) != 1:
      raise GateDefinitionError(
        f"{self.label}: b: expected one array with vmap='whole', got ({arguments.shown(of_b)})"
      )
    if self.parts.matvec is not None:
      found = self.types_of("matvec", self.parts.matvec, leaves, tree)
      known = arguments.is_known([*found, *of_b])
      if known and list(map(jnp.shape, found)) != list(map(jnp.shape, of_b)):
        raise GateDefinitionError(
          f"{self.label}: matvec: expected a result of b's shape, {arguments.shown(of_b)}, got "
          f"{arguments.shown(found)}"
        )
      return
    shape: tuple[Any, ...] = jnp.shape(of_a[0]) if len(of_a) == 1 else ()
    square = len(shape) == 2 and shape[0] == shape[1] and arguments.is_known([*of_a, *of_b])
    if square and len(of_b) == 1 and jnp.shape(of_b[0])[:1] != shape[:1]:
      raise GateDefinitionError(
        f"{self.label}: b: expected {shape[0]} rows, as in a ({arguments.shown(of_a)}), got "
        f"{arguments.shown(of_b)}. If a is not the matrix, pass matvec=, a function that returns "
        "A x"
      )

  def of_closure(self, first: Any, second: Any) -> Any:
    if (closed := self._closed(first, second)) is None:
      return None
    made, a = closed
    return made(a, second)

  def _closed(self, first: Any, second: Any) -> tuple[Solver, Any] | None:
    """Returns a solver that gets the values which `matvec` closes over, with its `a`, and that `a`.

    It is None if there are no such values.
    """
    parts = self.parts
    if tracing.in_no_trace():
      return None
    if (closed := arguments.closed_over(parts.matvec, first, second)) is None:
      return None
    matvec, values = closed
    with registry.defining(where()):  # the line may run again with another closure
      made = self.over_values(self.of_closures, lambda a, x: matvec(a[0], x, *a[1]))
    return made, (first, values)

  # -- derivatives ---------------------------------------------------------------------------------
  def _rule(self, primals: Any, tangents: Any) -> Any:
    a, b = primals
    handle = self.make(a)
    x = self._solve(handle, a, b)
    return x, self._tangent(self._solve, self._matvec, handle, a, x, *tangents)

  def _tangent(
    self,
    solve: Callable[..., Any],
    matvec: Callable[..., Any],
    handle: Any,
    a: Any,
    x: Any,
    da: Any,
    db: Any,
  ) -> Any:
    """Returns d x = A^-1 (d b - (d A) x); a tangent may be a symbolic zero."""
    rhs = jnp.zeros_like(x) if arguments.is_zero(db) else db
    if not all(map(arguments.is_zero, jax.tree.leaves(da, is_leaf=arguments.is_zero))):
      rhs = rhs - matvec(a, arguments.instantiated(a, da), x)
    elif arguments.is_zero(db):
      return rhs
    return solve(handle, a, rhs)

  def _matvec(self, a: Any, da: Any, x: Any) -> Any:
    """Returns (d A) x."""
    return jax.jvp(lambda a: self._product(a, x), (a,), (da,))[1]

  def _transposed_matvec(self, a: Any, da: Any, x: Any) -> Any:
    """Returns (d A)^T x."""

    def product(a: Any) -> Any:
      (result,) = jax.linear_transpose(lambda y: self._product(a, y), x)(x)
      return result

    return jax.jvp(product, (a,), (da,))[1]

  def _product(self, a: Any, x: Any) -> Any:
    if self.parts.matvec is not None:
      return self.parts.matvec(a, x)
    leaves = jax.tree.leaves(a)
    if len(leaves) != 1 or leaves[0].ndim != 2 or leaves[0].shape[0] != leaves[0].shape[1]:
      shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
      raise GateDefinitionError(
        f"{self.label}: differentiated with respect to a, which is not a square matrix: ({shown}). "
        "Pass matvec=, a JAX function of a and x that returns A x, or differentiate only with "
        "respect to b"
      )
    return leaves[0] @ x

  # -- vmap ----------------------------------------------------------------------------------------
  def _mapped(self, size: int, batched: Any, a: Any, b: Any) -> Any:
    """Factorizes once an `a` that all lanes share."""

    def lane(a: Any, b: Any) -> Any:
      return self._solve(self.make(a), a, b)

    of_a, of_b = batched
    axes = jax.tree.map(lambda flag: 0 if flag else None, (of_a, of_b))
    if any(jax.tree.leaves(of_a)):
      return jax.vmap(lane, axes, axis_size=size)(a, b), True
    handle = self.make(a)
    return jax.vmap(lambda b: self._solve(handle, a, b), axis_size=size)(b), True
