# SPDX-License-Identifier: Apache-2.0
"""The gate or kernel under test as a function of flat arrays, and helpers for the questions.

Each call gets fresh copies of the arguments. So a callable that writes to its inputs changes
neither the user's arrays nor those of the next question.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import derivatives, shapes
from callgate._call.function import ArrayFunction
from callgate._call.operation import Operation
from callgate._call.site import CallSite
from callgate._core import dtypes, foreign, split
from callgate._core.errors import EscapedViewError, InputWriteError, KernelError
from callgate._core.public import core
from callgate._gate.callee import GateCallee
from callgate._runtime.barrier import errors
from callgate._runtime.config import config

LANES = 3


class Fault(Exception):
  """A question failed; the text has the expected and the actual value."""


class NotAsked(Exception):
  """A question does not apply; the text has the reason."""


class Subject:
  """A call of a gate or kernel.

  Attributes:
    function: the public object, such as a `Gate`.
    args, kwargs: the arguments of the user's call.
    core: the function's core.
    tree: the structure of the call's arguments, with arrays as leaves.
    blocked: the question that the plain call fails, and its message; else None.
    varies: True if two calls with the same arguments give different results.
    escaped: the message of the first error about a kept view; "" without one.
  """

  def __init__(
    self, function: ArrayFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> None:
    self.function, self.args, self.kwargs = function, args, kwargs
    self.core: Operation = core(function)
    self.blocked: tuple[str, str] | None = None
    self.varies, self.escaped = False, ""
    try:
      self._begin()
    except Exception as error:  # noqa: BLE001 - the answer to a question
      self.blocked = _question_of(error), said(error)

  def _begin(self) -> None:
    *given, self.static = self.core.given(self.args, dict(self.kwargs))
    leaves, self.tree = jax.tree.flatten(tuple(given))
    arrays = self._arrays(leaves)
    kept = [x if split.is_key(x) else y for x, y in zip(leaves, arrays, strict=True)]
    self._kept = [_on_host(x) for x in kept]
    with config(check_writes=True, check_memory=not self.is_gate):
      self.run(self.flat)
    self.results = self.run(self.flat)
    if self.core.like is not None and self.core.out is not None:
      self._check_reference()
    self.varies = bool(difference(self.results, self.run(self.flat)))

  def _check_reference(self) -> None:
    """Raises if the result types of `like` differ from those of `out`."""
    args, kwargs = jax.tree.unflatten(self.tree, self.leaves())
    found = jax.eval_shape(
      lambda: self.core.call_rule(self.core.like, (), args, kwargs, self.static)  # pyright: ignore
    )
    types = [jax.ShapeDtypeStruct(*one) for one in self.site.results]
    results = jax.tree.unflatten(self.site.out_tree, types)
    derivatives.check_reference(self.core.label, results, found)

  def _arrays(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the arrays that the callable gets: PRNG keys as their data."""
    return [shapes.as_array(self.core, x, i, self.tree) for i, x in enumerate(leaves)]

  @property
  def is_gate(self) -> bool:
    """True if calls run Python."""
    return isinstance(self.core, GateCallee)

  @functools.cached_property
  def site(self) -> CallSite:
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._arrays(self.leaves())]
    results, out_tree = shapes.result_types(self.core, self.tree, structs, self.static)
    return CallSite(self.tree, out_tree, self.static, results)

  # -- calls -------------------------------------------------------------------------------------
  def leaves(self) -> list[Any]:
    """Returns copies of the call's arrays."""
    return [_on_device(x) for x in self._kept]

  def values(self) -> list[Any]:
    """The call's arrays, as NumPy arrays."""
    return list(self._kept)

  def flat(self, *leaves: Any) -> list[Any]:
    """The call as a JAX function of its arrays; returns the arrays of its results."""
    args, kwargs = jax.tree.unflatten(self.tree, leaves)
    return jax.tree.leaves(derivatives.apply(self.core, args, kwargs, self.static))

  @functools.cached_property
  def jitted(self) -> Callable[..., Any]:
    return jax.jit(self.flat)

  def run(self, function: Callable[..., Any], leaves: Sequence[Any] | None = None) -> list[Any]:
    """Calls a function of arrays, waits for it, and returns its results as NumPy arrays.

    Raises the callable's exception unchanged.
    """
    given = self.leaves() if leaves is None else [_on_device(x) for x in leaves]
    try:
      with errors():
        found = jax.tree.leaves(jax.block_until_ready(function(*given)))
        return [_on_host(x) for x in found]
    except EscapedViewError as error:
      self.escaped = self.escaped or said(error)
      raise

  # -- values ------------------------------------------------------------------------------------
  @functools.cached_property
  def lanes(self) -> list[list[Any]]:
    """Arrays for each lane: the call's own, and similar ones that the callable accepts."""
    for kind in ("scaled", "same"):
      found = [[_lane(x, n, kind) for x in self._kept] for n in range(LANES)]
      if (
        not any(split.is_key(x) or dtypes.is_inexact(x.dtype) for x in found[0])
        and kind == "scaled"
      ):
        found = [[_rolled(x, n) for x in self._kept] for n in range(LANES)]
      try:
        for lane in found[1:]:
          if any(np.isnan(x).any() for x in self.run(self.jitted, lane) if _has_nan(x)):
            raise ValueError
        return found
      except Exception:  # noqa: BLE001 - the callable does not take such values
        continue
    return [list(self._kept) for _ in range(LANES)]

  def compared(self) -> None:
    """Raises NotAsked if results of equal calls can't be compared."""
    if self.varies:
      raise NotAsked("two calls with the same arguments give different results")
    if not self.site.results:
      raise NotAsked("the call has no results to compare")


def _question_of(error: BaseException) -> str:
  """Returns the question that a call's exception belongs to."""
  if isinstance(error, EscapedViewError):
    return "escape"
  writes = isinstance(error, ValueError) and "read-only" in str(error)
  return "writes" if writes or isinstance(error, (InputWriteError, KernelError)) else "shapes"


def said(error: BaseException) -> str:
  return foreign.said_by(error)


def _on_host(x: Any) -> Any:
  return x if split.is_key(x) else np.array(x)


def _on_device(x: Any) -> Any:
  return x if split.is_key(x) else jnp.array(x)


def _has_nan(x: Any) -> bool:
  return not split.is_key(x) and x.dtype.kind in "fc"


def _lane(x: Any, lane: int, kind: str) -> Any:
  """Returns a scaled-down array, which keeps signs, order and definiteness; integers stay."""
  if split.is_key(x) and kind == "scaled":
    return jax.vmap(jax.random.fold_in, (0, None))(x.ravel(), lane).reshape(x.shape) if lane else x
  if kind == "same" or not dtypes.is_inexact(x.dtype):
    return x
  return (x * (1 - lane / 4)).astype(x.dtype)


def _rolled(x: Any, lane: int) -> Any:
  """Returns the array with its elements moved to other places."""
  return np.roll(x, lane)


# -- comparisons -----------------------------------------------------------------------------------
def tolerance(dtype: Any) -> float:
  """Returns the relative difference that another order of summation may make."""
  if not dtypes.is_inexact(dtype):
    return 0.0
  return min(0.5, 1e3 * float(jnp.finfo(dtype).eps)) if dtype.itemsize > 2 else 0.1


def wide(x: Any) -> Any:
  """Returns an array of inexact numbers in the widest type of its kind."""
  return x.astype(np.complex128 if dtypes.is_complex(x.dtype) else np.float64)


def difference(want: Sequence[Any], got: Sequence[Any]) -> str:
  """Returns the first result that differs, as expected and actual value; "" if none differs."""
  if len(want) != len(got):
    return f"expected {len(want)} results, got {len(got)}"
  for index, (a, b) in enumerate(zip(want, got, strict=True)):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      expected, came = (dtypes.type_text(x.dtype, x.shape) for x in (a, b))
      return f"result {index}: expected {expected}, got {came}"
    if not dtypes.is_inexact(a.dtype):
      wrong = a != b
    else:
      x, y = wide(a), wide(b)
      scale = np.abs(x[np.isfinite(x)]).max(initial=0.0)
      with np.errstate(invalid="ignore"):
        near = (x == y) | (np.isnan(x) & np.isnan(y))
        wrong = ~(near | (np.abs(x - y) <= tolerance(a.dtype) * scale))
    if np.any(wrong):
      where = tuple(int(n) for n in np.argwhere(wrong)[0])
      at = f", at {list(where)}" if where else ""
      return f"result {index}{at}: expected {a[where]}, got {b[where]}"
  return ""


def count_text(count: int, what: str) -> str:
  return f"{count} {what}{'' if count == 1 else 's'}"


def is_fine(dtype: Any) -> bool:
  """Returns True if a dtype is precise enough for finite differences."""
  return dtypes.is_inexact(dtype) and float(jnp.finfo(dtype).eps) < 1e-6
