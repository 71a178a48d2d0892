# SPDX-License-Identifier: Apache-2.0
"""The arguments of solvers and roots, while their calls are traced: checks, and closures.

A JAX function of the user's may close over traced values. Such a call becomes the call of a solver
that gets these values as arguments, and so has derivatives in them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._call import derivatives
from callgate._core import dtypes, exact, foreign, split
from callgate._core.dtypes import type_text
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._gate.callee import GateCallee
from callgate._jax import tracing

_CLOSURE = "closure"
_MOST = 256  # the most kinds of arguments that one gate remembers


class TwoArguments(GateCallee):
  """A gate of two arguments, which `check_arguments` checks once for each kind of them."""

  names = ("", "")

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self.binds = None  # `given` checks them with better messages
    self._checked = set[Any]()
    self._defined: TwoArguments | None = None  # for programs of other processes

  @property
  def of_closures(self) -> str:
    """The name of the gate that gets the values which a user's function closes over."""
    return f"{self.name}[{_CLOSURE}]"

  def over_values(self, name: str) -> TwoArguments:
    """Returns a gate of that name whose first argument is (first, values) instead of first."""
    raise NotImplementedError

  def define_variant(self, key: str) -> bool:
    """Makes the callee "NAME[key]" that a program of another process names; False for others."""
    first, _, inner = key.partition("][")
    if first != _CLOSURE:
      return not key
    self._defined = self._defined or self.over_values(self.of_closures)
    return self._defined.define_variant(inner)

  def check_arguments(self, leaves: Sequence[Any], tree: Any) -> None:
    """Raises if the call is impossible; `leaves` are the flat arrays of the arguments."""
    raise NotImplementedError

  def of_closure(self, first: Any, second: Any) -> Any:
    """Returns the call's results if a user's function closes over traced values; else None."""
    raise NotImplementedError

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    given = self.given(args, kwargs)
    if not tracing.in_no_trace():
      closed = self.of_closure(*split.joined(given[0]))
      if closed is not None:
        return closed
    return derivatives.apply(self, *given)

  def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = super().given(args, kwargs)
    if len(given[0]) != 2:
      raise GateDefinitionError(
        f"{self.label}: expected two arguments, {self.names[0]} and {self.names[1]}, "
        f"got {len(given[0])}"
      )
    leaves, tree = jax.tree.flatten(given[0])
    known = exact.exact_tree(tree)
    kind = known, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)
    kind = None if known.has_objects else kind  # it would keep the user's objects alive
    if kind is None or kind not in self._checked:
      self.check_arguments(leaves, tree)
      if len(self._checked) >= _MOST:
        self._checked.clear()
      self._checked.add(kind)
    return given

  def types_of(self, option: str, function: Callable[..., Any], leaves: Any, tree: Any) -> Any:
    """Returns the flat types of a user's JAX function for the two arguments."""

    def call(leaves: Sequence[Any]) -> Any:
      return function(*split.joined(jax.tree.unflatten(tree, leaves)))

    try:
      return jax.tree.leaves(jax.eval_shape(call, leaves))
    except Exception as error:
      foreign.add_note(error, f"callgate: raised in {option}= of {self.label}")
      raise


def closed_over(function: Callable[..., Any] | None, *examples: Any) -> Any:
  """Returns the function with its traced closure values as further arguments, and the values.

  None if it closes over none; `examples` are arguments of its types.
  """
  if function is None or (isinstance(function, types.FunctionType) and not function.__closure__):
    return None
  made, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
  traced = [
    i
    for i, value in enumerate(made.consts)
    if isinstance(value, Tracer) and dtypes.is_inexact(value.dtype)
  ]
  if not traced:
    return None

  def converted(*args: Any) -> Any:
    consts = list(made.consts)
    for i, value in zip(traced, args[len(examples) :], strict=True):
      consts[i] = value
    found = tracing.eval_jaxpr(made.jaxpr, consts, *jax.tree.leaves(args[: len(examples)]))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)

  return converted, [made.consts[i] for i in traced]


def is_known(leaves: Sequence[Any]) -> bool:
  """True if no extent is symbolic."""
  return not any(is_open(n) for leaf in leaves for n in jnp.shape(leaf))


def size(leaves: Sequence[Any]) -> int:
  return sum(math.prod(jnp.shape(leaf)) for leaf in leaves)


def shown(leaves: Sequence[Any]) -> str:
  types = (type_text(jnp.result_type(leaf), jnp.shape(leaf)) for leaf in leaves)
  return ", ".join(types) or "no array"


def is_zero(tangent: Any) -> bool:
  """True for a tangent that is a symbolic zero, or that of an integer."""
  return isinstance(tangent, jax.custom_derivatives.SymbolicZero) or (
    getattr(tangent, "dtype", None) == jax.dtypes.float0
  )


def instantiated(primals: Any, tangents: Any) -> Any:
  """Replaces symbolic zeros by tangents that `jax.jvp` accepts."""

  def one(primal: Any, tangent: Any) -> Any:
    if not is_zero(tangent):
      return tangent
    if not jnp.issubdtype(jnp.result_type(primal), jnp.inexact):
      return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal)

  leaves, tree = jax.tree.flatten(primals)
  return jax.tree.unflatten(
    tree,
    [one(p, t) for p, t in zip(leaves, jax.tree.leaves(tangents, is_leaf=is_zero), strict=True)],
  )
