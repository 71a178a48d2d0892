"""Items of a feed: pytrees of arrays, their types, and how a host value becomes one of them.

The producer thread converts and checks what the iterator gives. Arrays that the user could still
write to are copied: an iterator may fill one buffer again while its earlier items wait.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._arrays.torch import to_numpy
from callgate._call import shapes
from callgate._core import dtypes, masked
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._jax import tracing

Arrays = list[np.ndarray[Any, Any]]
_PYTHON_SCALARS = (bool, int, float, complex)


def _default_dtypes() -> dict[type, np.dtype[Any]]:
  """The dtypes that JAX gives Python scalars, under this thread's `jax_enable_x64`."""
  return {kind: np.dtype(tracing.canonical_dtype(np.dtype(kind))) for kind in _PYTHON_SCALARS}


@dataclasses.dataclass(frozen=True)
class ItemTypes:
  """The structure, shapes and dtypes of every item of a feed."""

  feed: str  # its name, for messages
  tree: Any
  types: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # (shape, dtype) of each leaf
  # What Python scalars become.
  defaults: dict[type, np.dtype[Any]] = dataclasses.field(default_factory=_default_dtypes)

  def convert(self, item: Any, number: int) -> Arrays:
    """The leaves of the item of that number, as arrays that nobody else writes to."""
    leaves, tree = jax.tree.flatten(item)
    if tree != self.tree:
      expected = f"expected the structure {self.tree}, got {tree}"
      raise ResultError(f"feed '{self.feed}': item {number}: {expected}")
    arrays: Arrays = []
    for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, self.types, strict=True)):
      if type(leaf) is np.ndarray and leaf.shape == shape and leaf.dtype == dtype:
        arrays.append(leaf.copy())  # the usual case, quickly
        continue
      where = functools.partial(_where, self.feed, f"item {number}", item, index)
      array = _to_array(where, leaf, self.defaults)
      if array.shape != shape or array.dtype != dtype:
        got = f"{_describe(array.shape, array.dtype)} (items are never cast silently)"
        raise ResultError(f"{where()}: expected {_describe(shape, dtype)}, got {got}")
      arrays.append(array)
    return arrays

  def broadcast(self, value: Any) -> Arrays:
    """A default item: a prefix of arrays, or of Python scalars, broadcast to the items' shapes."""
    full = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
    try:
      given = jax.tree.leaves(jax.tree.broadcast(value, full))
    except (ValueError, TypeError) as error:
      expected = f"expected the items' structure {self.tree} or a prefix of it"
      what = f"default: {expected}, got {jax.tree.structure(value)}"
      raise GateDefinitionError(f"feed '{self.feed}': {what}") from error
    arrays: Arrays = []
    for index, (leaf, (shape, dtype)) in enumerate(zip(given, self.types, strict=True)):
      where = functools.partial(_where, self.feed, "default", full, index)
      array = _to_array(where, leaf, self.defaults)
      try:
        if type(leaf) in _PYTHON_SCALARS and jnp.result_type(leaf, dtype) == dtype:
          array = np.array(leaf, dtype)
        fits = array.dtype == dtype and np.broadcast_shapes(array.shape, shape) == shape
      except (ValueError, OverflowError):
        fits = False
      if not fits:
        expected = f"{_describe(shape, dtype)} or what broadcasts to it"
        got = _describe(array.shape, array.dtype)
        raise GateDefinitionError(f"{where()}: expected {expected}, got {got}")
      arrays.append(np.array(np.broadcast_to(array, shape)))
    return arrays


def from_structs(feed: str, shape: Any) -> ItemTypes:
  """The types that the user declares, as a pytree of anything with `.shape` and `.dtype`."""
  leaves, tree = jax.tree.flatten(shape, is_leaf=shapes.is_type)
  for index, leaf in enumerate(leaves):
    if not shapes.is_type(leaf):
      where = _where(feed, "shape", shape, index)
      raise GateDefinitionError(f"{where}: expected a value with .shape and .dtype, got {leaf!r}")
  return _checked(feed, "shape", tree, leaves)


def from_item(feed: str, item: Any, what: str = "item 0") -> ItemTypes:
  """The types of a sample: the first item, or the default of a feed that has no items."""
  leaves, tree = jax.tree.flatten(item)
  arrays = [
    _to_array(functools.partial(_where, feed, what, item, index), leaf, _default_dtypes())
    for index, leaf in enumerate(leaves)
  ]
  return _checked(feed, what, tree, arrays)


def _to_array(where: Callable[[], str], value: Any, defaults: dict[type, Any]) -> np.ndarray:
  got, cause = "", None
  if isinstance(value, jax.Array):
    if not jnp.issubdtype(value.dtype, jax.dtypes.extended):
      return np.asarray(value)  # immutable: a view does
    got = f"an array of {value.dtype} (pass jax.random.key_data of keys)"
  elif not masked.is_masked(value):
    try:
      if type(value) in defaults:
        return np.array(value, defaults[type(value)])
      array = np.array(to_numpy(value))
      if _is_number(array.dtype):
        return array
    except (TypeError, ValueError, OverflowError) as error:
      cause = error
  expected = "expected an array or a number that JAX can hold"
  raise ResultError(f"{where()}: {expected}, got {got or masked.shown(value)}") from cause


def _is_number(dtype: Any) -> bool:
  # A timedelta is an integer to NumPy; JAX has no long doubles, nor the other byte order.
  held = dtype.kind not in "mM" and dtype.char not in "gG" and dtype.isnative
  return held and (dtype == np.bool_ or jnp.issubdtype(dtype, np.number))


def _checked(feed: str, what: str, tree: Any, leaves: list[Any]) -> ItemTypes:
  if not leaves:
    raise GateDefinitionError(f"feed '{feed}': {what}: expected at least one array, got {tree}")
  for index, leaf in enumerate(leaves):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      why = f"expected a dtype of numbers, got {leaf.dtype}; feed jax.random.key_data of keys"
    elif not _is_number(dtype := np.dtype(leaf.dtype)):
      why = f"expected a dtype of numbers that JAX has, got {dtype}"
    elif (canonical := np.dtype(tracing.canonical_dtype(dtype))) != dtype:
      why = f"{dtype.name} needs jax_enable_x64; expected {canonical.name} without it"
    elif dtypes.is_packed(dtype):
      several = f"{dtype.name} has several elements in a byte"
      why = f"{several}; expected int8, or another dtype of whole bytes"
    else:
      continue
    where = _where(feed, what, jax.tree.unflatten(tree, leaves), index)
    raise GateDefinitionError(f"{where}: {why}")
  types = [(tuple(int(extent) for extent in x.shape), np.dtype(x.dtype)) for x in leaves]
  return ItemTypes(feed, tree, tuple(types))


def _where(feed: str, what: str, item: Any, index: int) -> str:
  """A feed's item and the path of one of its leaves; the item alone where it is one array."""
  paths = jax.tree_util.tree_flatten_with_path(item, is_leaf=shapes.is_type)[0]
  return f"feed '{feed}': {what}{jax.tree_util.keystr(paths[index][0])}"


def _describe(shape: tuple[int, ...], dtype: Any) -> str:
  return f"{np.dtype(dtype).name}{list(shape)}"
