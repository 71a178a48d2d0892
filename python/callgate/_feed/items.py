# SPDX-License-Identifier: Apache-2.0
"""Items of a feed: pytrees of arrays, their types, and the conversion of host values.

The producer's thread converts and checks the iterator's values. It copies arrays that the user
could still write to, because an iterator may reuse a buffer while earlier items wait.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._arrays.torch import to_numpy
from callgate._call import shapes
from callgate._core import dtypes, masked
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._jax import tracing

Arrays = list[np.ndarray[Any, Any]]
_PYTHON_SCALARS = (bool, int, float, complex)


def _default_dtypes() -> dict[type, np.dtype[Any]]:
  """Returns JAX's dtypes of Python scalars, under this thread's `jax_enable_x64`."""
  return {kind: _canonical(np.dtype(kind)) for kind in _PYTHON_SCALARS}


def _canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
  return np.dtype(tracing.canonical_dtype(dtype))


@dataclasses.dataclass(frozen=True)
class ItemTypes:
  """The structure, shapes and dtypes of every item of a feed."""

  feed: str  # the feed's name, for messages
  tree: Any
  types: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # (shape, dtype) of each leaf
  cast: bool = False  # True if items may have other dtypes of the same kind
  # The dtypes of Python scalars.
  defaults: dict[type, np.dtype[Any]] = dataclasses.field(default_factory=_default_dtypes)

  @functools.cached_property
  def sizes(self) -> list[int] | None:
    """Returns the bytes of each array of an item; None if XLA packs elements into bytes."""
    if any(dtypes.is_packed(dtype) for _, dtype in self.types):
      return None
    return [math.prod(shape) * dtype.itemsize for shape, dtype in self.types]

  def of_bytes(self, data: bytes) -> Arrays:
    """Returns an item whose arrays are views of consecutive bytes; read-only."""
    arrays: Arrays = []
    start = 0
    for (shape, dtype), size in zip(self.types, self.sizes or (), strict=True):
      array = np.frombuffer(data, np.uint8, size, start) if size else np.empty(0, np.uint8)
      arrays.append(array.view(dtype).reshape(shape))
      start += size
    return arrays

  @functools.cached_property
  def single(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """The type of items that are a single array."""
    return self.types[0] if self.tree == jax.tree.structure(0) else None

  def convert(self, item: Any, number: int, *, private: bool = True) -> Arrays:
    """Returns the leaves of an item, as arrays; `private` arrays have no other writer."""
    if self.single is not None and type(item) is np.ndarray:  # the usual case, fast
      shape, dtype = self.single
      if item.shape == shape and item.dtype == dtype:
        return [item.copy() if private else item]
    leaves, tree = jax.tree.flatten(item)
    if tree != self.tree:
      expected = f"expected the structure {self.tree}, got {tree}"
      raise ResultError(f"feed '{self.feed}': item {number}: {expected}")
    arrays: Arrays = []
    for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, self.types, strict=True)):
      if type(leaf) is np.ndarray and leaf.shape == shape and leaf.dtype == dtype:
        arrays.append(leaf.copy() if private else leaf)
        continue
      where = functools.partial(_where, self.feed, f"item {number}", item, index)
      array = _to_array(where, leaf, self.defaults)
      got: str | None = type_text(array.dtype, array.shape)
      if array.shape == shape:
        array, got = self._fitted(leaf, array, dtype)
      if got is not None:
        raise ResultError(f"{where()}: expected {type_text(dtype, shape)}, got {got}")
      arrays.append(array)
    return arrays

  def _fitted(
    self, leaf: Any, array: np.ndarray[Any, Any], dtype: np.dtype[Any]
  ) -> tuple[np.ndarray[Any, Any], str | None]:
    """Returns a leaf's array in that dtype, cast as a gate's results, or the actual type."""
    if array.dtype == dtype:
      return array, None
    # A Python scalar has no width.
    weak = type(leaf) in _PYTHON_SCALARS and jnp.result_type(leaf, dtype) == dtype
    made = np.empty(array.shape, dtype)
    return made, _callgate.store(made, leaf if weak else array, self.cast)

  def broadcast(self, value: Any) -> Arrays:
    """Broadcasts a default item, a prefix of arrays or Python scalars, to the items' shapes."""
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
      array, got = self._fitted(leaf, _to_array(where, leaf, self.defaults), dtype)
      try:
        fits = got is None and np.broadcast_shapes(array.shape, shape) == shape
      except ValueError:
        fits = False
      if not fits:
        expected = f"{type_text(dtype, shape)} or an array that broadcasts to it"
        got = got or type_text(array.dtype, array.shape)
        raise GateDefinitionError(f"{where()}: expected {expected}, got {got}")
      arrays.append(np.array(np.broadcast_to(array, shape)))
    return arrays


def from_structs(feed: str, shape: Any, *, cast: bool) -> ItemTypes:
  """Returns the types that the user declares, a pytree of objects with `.shape` and `.dtype`."""
  leaves, tree = jax.tree.flatten(shape, is_leaf=shapes.is_type)
  for index, leaf in enumerate(leaves):
    if not shapes.is_type(leaf):
      where = _where(feed, "shape", shape, index)
      raise GateDefinitionError(f"{where}: expected a value with .shape and .dtype, got {leaf!r}")
  return _checked(feed, "shape", tree, leaves, cast=cast)


def from_item(feed: str, item: Any, what: str = "item 0", *, cast: bool) -> ItemTypes:
  """Returns the types of a sample: the first item, or the default of a feed without items."""
  leaves, tree = jax.tree.flatten(item)
  arrays = [
    _to_array(functools.partial(_where, feed, what, item, index), leaf, _default_dtypes())
    for index, leaf in enumerate(leaves)
  ]
  return _checked(feed, what, tree, arrays, cast=cast)


def _to_array(where: Callable[[], str], value: Any, defaults: dict[type, Any]) -> np.ndarray:
  got, cause = "", None
  if isinstance(value, jax.Array):
    if not jnp.issubdtype(value.dtype, jax.dtypes.extended):
      return np.asarray(value)  # immutable, so a view is enough
    got = f"an array of {value.dtype} (use jax.random.key_data for keys)"
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
  # NumPy counts a timedelta as an integer. JAX has neither long doubles nor the other byte order.
  # The type character isn't unique: 'G' is also that of float8_e4m3fnuz.
  long = dtype.type in (np.longdouble, np.clongdouble)
  held = dtype.kind not in "mM" and not long and dtype.isnative
  return held and (dtype == np.bool_ or jnp.issubdtype(dtype, np.number))


def _checked(feed: str, what: str, tree: Any, leaves: list[Any], *, cast: bool) -> ItemTypes:
  if not leaves:
    raise GateDefinitionError(f"feed '{feed}': {what}: expected at least one array, got {tree}")
  for index, leaf in enumerate(leaves):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      why = f"expected a dtype of numbers, got {leaf.dtype}; use jax.random.key_data for keys"
    elif not _is_number(dtype := np.dtype(leaf.dtype)):
      why = f"expected a numeric dtype of JAX, got {dtype}"
    elif (canonical := _canonical(dtype)) != dtype and dtype.kind not in "iu" and not cast:
      without = f"expected {canonical.name} without it, or cast=True"
      why = f"{dtype.name} needs jax_enable_x64; {without}"
    elif dtypes.is_packed(dtype):
      several = f"{dtype.name} has several elements in a byte"
      why = f"{several}; expected int8, or another dtype of whole bytes"
    else:
      continue
    where = _where(feed, what, jax.tree.unflatten(tree, leaves), index)
    raise GateDefinitionError(f"{where}: {why}")
  shaped = [(tuple(int(extent) for extent in x.shape), np.dtype(x.dtype)) for x in leaves]
  types = ((shape, _canonical(dtype)) for shape, dtype in shaped)
  return ItemTypes(feed, tree, tuple(types), cast)


def _where(feed: str, what: str, item: Any, index: int) -> str:
  """Names an item in messages, with the path of a leaf unless the item is a single array."""
  paths = jax.tree_util.tree_flatten_with_path(item, is_leaf=shapes.is_type)[0]
  return f"feed '{feed}': {what}{jax.tree_util.keystr(paths[index][0])}"
