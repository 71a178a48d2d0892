# SPDX-License-Identifier: Apache-2.0
"""`callgate.linear_solver`: linear solvers of the host, with derivatives, that factorise once."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.function import ArrayFunction
from callgate._core import dtypes, registry
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._core.where import where
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions, Thread
from callgate._objects import arguments
from callgate._objects.arguments import TwoArguments
from callgate._objects.hold import Hold, Place, hold, on_thread
from callgate._objects.use import Use, Using
from callgate._places import threads

_RHS = 2  # the position of the right-hand side among the arguments of a solve with an object


def linear_solver(
  *, factor: Callable[..., Any], solve: Callable[..., Any],
  solve_transposed: Callable[..., Any] | None = None, matvec: Callable[..., Any] | None = None,
  symmetric: bool = False, cast: bool | None = None,
  run_on: Place = None, thread: Thread = "xla",
  timeout: float | None = None, name: str | None = None,
) -> Gate:  # fmt: skip
  """A linear solver of the host as a JAX function with derivatives: `x = solver(a, b)`, `a x = b`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from scipy.linalg import lu_factor, lu_solve

  solver = cg.linear_solver(
    factor=lu_factor, solve=lu_solve, solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1)
  )
  a, b = jnp.array([[2.0, 1.0], [0.0, 4.0]]), jnp.array([4.0, 4.0])
  assert jnp.allclose(solver(a, b), jnp.array([1.5, 1.0]))
  gradient = jax.jit(jax.grad(lambda a: solver(a, b).sum()))(a)  # one factorisation
  ```

  With A the matrix that `a` describes, d x = A^-1 (d b - (d A) x), and the cotangent of b is
  A^-T times that of x: so a solve and all of its derivatives, of any order, in forward and reverse
  mode, share one object, which `factor` makes once for each `a` that is differentiated at.
  Derivatives in `a` need A x as a JAX function: `a @ x` where `a` is one array, else `matvec`.

  Args:
    factor: `factor(a) -> object`: a factorisation, a preconditioner, anything. Arrays in `a` are
      copies of its own.
    solve: `solve(object, b) -> x`, of the shape and dtype of `b`, which are no integers.
    solve_transposed: `solve_transposed(object, b) -> x` with A^T x = b, for reverse mode: the
      transposed matrix, not conjugated.
    matvec: `matvec(a, x) -> A x`, a JAX function, for derivatives in `a`.
    symmetric: A^T is A: `solve` serves for both.
    cast: allow same-kind casts of what `solve` returns; see `callgate.gate`.
    run_on: where both run: see `callgate.hold`. By default that is the thread of objects where
      derivatives share an object, and XLA's where one call factorises and solves.
    thread: see `callgate.hold`.
    timeout: see `callgate.gate`.
    name: what programs and messages call it. Default: as for `callgate.gate`, of `solve`.

  Returns:
    A gate that is called as `solver(a, b)`: `a` an array or a pytree of them, `b` an array.
    Under `jax.vmap` an `a` that is not mapped over is factorised once for all.

  Raises:
    GateDefinitionError: an option is wrong; or, while tracing, arguments don't fit each other, or
      a derivative needs `matvec` or `solve_transposed`, and there is none.
  """
  label = f"linear solver '{name}'" if isinstance(name, str) else "linear solver"
  for what, function in (("factor", factor), ("solve", solve)):
    _options.function(label, what, function)
  _options.or_none(_options.function, label, "solve_transposed", solve_transposed)
  _options.or_none(_options.function, label, "matvec", matvec)
  _options.boolean(label, "symmetric", symmetric)
  parts = _SolverFunctions(factor, solve, solve_transposed, matvec, symmetric)
  place: dict[str, Any] = {"run_on": run_on, "thread": thread, "timeout": timeout}
  of_objects = on_thread(place, threads.objects())
  if run_on is None:  # one call has no object that outlives it
    place["run_on"] = "xla"
  given = GateOptions(out=_as_b, cast=cast, name=name, **place)
  with registry.defining(where().definition()):
    return Gate(_Solver(parts, given, of_objects))


def _as_b(a: Any, b: Any) -> Any:
  del a
  return b


@dataclasses.dataclass(frozen=True, eq=False)
class _SolverFunctions:
  """The user's functions."""

  factor: Callable[..., Any]
  solve: Callable[..., Any]
  solve_transposed: Callable[..., Any] | None
  matvec: Callable[..., Any] | None
  symmetric: bool


class _Solver(TwoArguments):
  """Factorises and solves in one call, where no derivative is asked for."""

  kind = "linear solver"
  names = ("a", "b")

  def __init__(self, parts: _SolverFunctions, options: GateOptions, place: dict[str, Any]) -> None:
    factor, solve = parts.factor, parts.solve  # all that goes to a worker

    def call(a: Any, b: Any) -> Any:
      return solve(factor(a), b)

    call.__module__ = getattr(parts.solve, "__module__", call.__module__)
    call.__name__ = getattr(parts.solve, "__name__", "solve")
    call.__qualname__ = getattr(parts.solve, "__qualname__", call.__name__)
    super().__init__(call, dataclasses.replace(options, copy=True))
    self.parts, self._options, self._place = parts, options, place
    self._make: Hold = hold(parts.factor, name=f"{self.name}.factor", **place)
    more = {**place, "cast": options.cast}
    self._solve = self._with_object("solve", parts.solve, more)
    self._transposed = self._solve
    if parts.solve_transposed is not None and not parts.symmetric:
      self._transposed = self._with_object("solve_transposed", parts.solve_transposed, more)
      self._transposed.deftranspose(lambda ct, h, a, b: self._solve(h, a, ct))
    self._solve.deftranspose(self._transpose_solve)
    self.set_jvp(self._rule, symbolic_zeros=True)
    self.transpose_rule = self._transpose  # of `jax.linear_transpose`, which no tangents precede
    self.vmap_rule = self._mapped

  def _with_object(self, what: str, solve: Callable[..., Any], more: dict[str, Any]) -> Any:
    """The call `solve(object, b)`, which is linear in b; `a` is there for its derivatives."""

    def call(factorised: Any, a: Any, b: Any) -> Any:
      del a
      return solve(factorised, b)

    options = GateOptions(
      out=lambda handle, a, b: b, linear=(_RHS,), name=f"{self.name}.{what}", **more
    )
    made = Use(Using(call, self.label), options)

    def rule(primals: Any, tangents: Any) -> Any:
      handle, a, b = primals
      x = made(handle, a, b)
      matvec = self._transposed_matvec if what == "solve_transposed" else self._matvec
      return x, self._tangent(made, matvec, handle, a, x, tangents[1], tangents[2])

    made.set_jvp(rule, symbolic_zeros=True)
    return ArrayFunction(made)

  def _transpose(self, cotangent: Any, a: Any, b: Any) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(a)):
      raise GateDefinitionError(f"{self.label}: transposed in a; expected in b, where it is linear")
    return self._transpose_solve(cotangent, self._make(a), a, b)

  def _transpose_solve(self, cotangent: Any, handle: Any, a: Any, b: Any) -> Any:
    if self.parts.solve_transposed is None and not self.parts.symmetric:
      raise GateDefinitionError(
        f"{self.label}: reverse mode solves with the transposed matrix; expected "
        "solve_transposed=, or symmetric=True"
      )
    return self._transposed(handle, a, cotangent)

  def check_arguments(self, leaves: Sequence[Any], tree: Any) -> None:
    of_a, of_b = map(jax.tree.leaves, jax.tree.unflatten(tree, leaves))
    if not of_b or not all(dtypes.is_inexact(jnp.result_type(b)) for b in of_b):
      raise GateDefinitionError(
        f"{self.label}: b: expected floating-point or complex numbers, as x is of b's dtype, got "
        f"{arguments.shown(of_b)}"
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
        f"{self.label}: b: expected {shape[0]} rows, as a of {arguments.shown(of_a)} has, got "
        f"{arguments.shown(of_b)}. Where a is not the matrix, matvec= says what A x is"
      )

  def of_closure(self, first: Any, second: Any) -> Any:
    parts = self.parts
    if (closed := arguments.closed_over(parts.matvec, first, second)) is None:
      return None
    matvec, values = closed
    with registry.defining(where()):  # the line may run again with another closure
      made = _Solver(
        dataclasses.replace(
          parts,
          factor=lambda a: parts.factor(a[0]),
          matvec=lambda a, x: matvec(a[0], x, *a[1]),
        ),
        dataclasses.replace(self._options, name=f"{self.name} (closure)"),
        self._place,
      )
    return made((first, values), second)

  # -- derivatives ---------------------------------------------------------------------------------
  def _rule(self, primals: Any, tangents: Any) -> Any:
    a, b = primals
    handle = self._make(a)
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
    """d x = A^-1 (d b - (d A) x); a tangent may be a symbolic zero."""
    rhs = jnp.zeros_like(x) if _is_zero(db) else db
    if not all(map(_is_zero, jax.tree.leaves(da, is_leaf=_is_zero))):
      rhs = rhs - matvec(a, instantiated(a, da), x)
    elif _is_zero(db):
      return rhs
    return solve(handle, a, rhs)

  def _matvec(self, a: Any, da: Any, x: Any) -> Any:
    """(d A) x."""
    return jax.jvp(lambda a: self._product(a, x), (a,), (da,))[1]

  def _transposed_matvec(self, a: Any, da: Any, x: Any) -> Any:
    """(d A)^T x."""

    def product(a: Any) -> Any:
      (result,) = jax.linear_transpose(lambda y: self._product(a, y), x)(x)
      return result

    return jax.jvp(product, (a,), (da,))[1]

  def _product(self, a: Any, x: Any) -> Any:
    if self.parts.matvec is not None:
      return self.parts.matvec(a, x)
    leaves = jax.tree.leaves(a)
    if len(leaves) != 1 or leaves[0].ndim != 2:
      shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
      raise GateDefinitionError(
        f"{self.label}: differentiated in a, which is no matrix; expected matvec= (a JAX function "
        f"of a and x that returns A x), or derivatives in b alone, got a of ({shown})"
      )
    return leaves[0] @ x

  # -- vmap ----------------------------------------------------------------------------------------
  def _mapped(self, size: int, batched: Any, a: Any, b: Any) -> Any:
    """An `a` for all lanes is factorised once."""

    def lane(a: Any, b: Any) -> Any:
      return self._solve(self._make(a), a, b)

    of_a, of_b = batched
    axes = jax.tree.map(lambda flag: 0 if flag else None, (of_a, of_b))
    if any(jax.tree.leaves(of_a)):
      return jax.vmap(lane, axes, axis_size=size)(a, b), True
    handle = self._make(a)
    return jax.vmap(lambda b: self._solve(handle, a, b), axis_size=size)(b), True


def _is_zero(tangent: Any) -> bool:
  return isinstance(tangent, jax.custom_derivatives.SymbolicZero) or (
    getattr(tangent, "dtype", None) == jax.dtypes.float0
  )


def instantiated(primals: Any, tangents: Any) -> Any:
  """Tangents as `jax.jvp` takes them, in the place of symbolic zeros."""

  def one(primal: Any, tangent: Any) -> Any:
    if not _is_zero(tangent):
      return tangent
    if not jnp.issubdtype(jnp.result_type(primal), jnp.inexact):
      return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal)

  leaves, tree = jax.tree.flatten(primals)
  return jax.tree.unflatten(
    tree,
    [one(p, t) for p, t in zip(leaves, jax.tree.leaves(tangents, is_leaf=_is_zero), strict=True)],
  )
