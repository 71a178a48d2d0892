"""Items of a feed: pytrees of arrays, their types, and how a host value becomes one of them.

`ItemTypes` is what all items of a feed have in common. It is made on the thread that makes the feed
and read on the feed's producer thread, which converts and checks what the iterator gives; nothing
here changes after it was made. Arrays that the user could still write to are copied, since an
iterator may fill one buffer again and again while its earlier items wait in the queue.
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
from callgate._core import registry
from callgate._core.dtypes import is_packed
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._core.masked import is_masked, shown
from callgate._jax import tracing

Arrays = list[np.ndarray[Any, Any]]
Defaults = dict[type, np.dtype[Any]]
_PYTHON_SCALARS = (bool, int, float, complex)


def default_dtypes() -> Defaults:
  """The dtypes that JAX gives Python scalars, under this thread's `jax_enable_x64`."""
  return {kind: np.dtype(tracing.canonical_dtype(np.dtype(kind))) for kind in _PYTHON_SCALARS}


@dataclasses.dataclass(frozen=True)
class ItemTypes:
  """The structure, shapes and dtypes of every item of a feed."""

  feed: str  # its name, for messages
  tree: Any
  types: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # (shape, dtype) of each leaf
  defaults: Defaults  # what Python scalars become

  def structs(self) -> Any:
    """The item as a pytree of ShapeDtypeStructs."""
    return jax.tree.unflatten(self.tree, [jax.ShapeDtypeStruct(s, d) for s, d in self.types])

  def convert(self, item: Any, number: int) -> Arrays:
    """The leaves of the item of that number, from 0, as arrays that nobody else writes to.

    Raises:
      ResultError: its structure, a shape or a dtype differs from what the feed expects.
    """
    leaves, tree = jax.tree.flatten(item)
    if tree != self.tree:
      raise ResultError(
        f"feed '{self.feed}': item {number}: expected the structure {self.tree}, got {tree}"
      )
    arrays: Arrays = []
    for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, self.types, strict=True)):
      if type(leaf) is np.ndarray and leaf.shape == shape and leaf.dtype == dtype:
        arrays.append(leaf.copy())  # the usual case, quickly
        continue
      where = functools.partial(_where, self.feed, f"item {number}", item, index)
      array = _to_array(where, leaf, self.defaults)
      if array.shape != shape or array.dtype != dtype:
        raise ResultError(
          f"{where()}: expected {_describe(shape, dtype)}, got "
          f"{_describe(array.shape, array.dtype)} (items are never cast silently)"
        )
      arrays.append(array)
    return arrays

  def broadcast(self, value: Any) -> Arrays:
    """A default item: a pytree (prefix) of values, broadcast to the items' shapes.

    Values are arrays of the items' dtypes, or Python scalars of their kind or a narrower one.

    Raises:
      GateDefinitionError: it does not fit.
    """
    full = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
    try:
      given = jax.tree.leaves(jax.tree.broadcast(value, full))
    except (ValueError, TypeError) as error:
      raise GateDefinitionError(
        f"feed '{self.feed}': default: expected the items' structure {self.tree} or a prefix of "
        f"it, got {jax.tree.structure(value)}"
      ) from error
    return [self._broadcast_leaf(leaf, full, index) for index, leaf in enumerate(given)]

  def _broadcast_leaf(self, value: Any, full: Any, index: int) -> np.ndarray[Any, Any]:
    shape, dtype = self.types[index]
    where = functools.partial(_where, self.feed, "default", full, index)
    array = _to_array(where, value, self.defaults)
    try:
      if type(value) in _PYTHON_SCALARS and jnp.result_type(value, dtype) == dtype:
        array = np.array(value, dtype)
      if array.dtype == dtype:
        return np.array(np.broadcast_to(array, shape))
    except (ValueError, OverflowError):
      pass  # said below
    raise GateDefinitionError(
      f"{where()}: expected {_describe(shape, dtype)} or what broadcasts to it, got "
      f"{_describe(array.shape, array.dtype)}"
    )


def from_structs(feed: str, shape: Any) -> ItemTypes:
  """The types that the user declares, as a pytree of anything with `.shape` and `.dtype`.

  Raises:
    GateDefinitionError: a leaf is something else, or can't be in an item.
  """
  leaves, tree = jax.tree.flatten(shape, is_leaf=shapes.is_type)
  for index, leaf in enumerate(leaves):
    if not shapes.is_type(leaf):
      where = _where(feed, "shape", shape, index)
      raise GateDefinitionError(f"{where}: expected a value with .shape and .dtype, got {leaf!r}")
  return _checked(feed, "shape", tree, leaves)


def from_item(feed: str, item: Any, what: str = "item 0") -> ItemTypes:
  """The types of a sample: the first item, or the default of a feed that has no items.

  Raises:
    GateDefinitionError: a leaf can't be in an item.
  """
  leaves, tree = jax.tree.flatten(item)
  defaults = default_dtypes()
  arrays = [
    _to_array(functools.partial(_where, feed, what, item, index), leaf, defaults)
    for index, leaf in enumerate(leaves)
  ]
  return _checked(feed, what, tree, arrays)


def _to_array(where: Callable[[], str], value: Any, defaults: Defaults) -> np.ndarray[Any, Any]:
  if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
    return np.asarray(value)  # immutable: a view does
  if is_masked(value):
    raise _no_array(where(), value)
  try:
    if type(value) in defaults:
      return np.array(value, defaults[type(value)])
    array = np.array(to_numpy(value))
  except (TypeError, ValueError, OverflowError) as error:
    raise _no_array(where(), value) from error
  if not _is_number(array.dtype):
    raise _no_array(where(), value)
  return array


def _is_number(dtype: Any) -> bool:
  # A timedelta is an integer to NumPy; JAX has no long doubles, nor the other byte order.
  if dtype.kind in "mM" or dtype.char in "gG" or not dtype.isnative:
    return False
  return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _no_array(where: str, value: Any) -> ResultError:
  got = shown(value)
  if isinstance(value, jax.Array):
    got = f"an array of {value.dtype} (pass jax.random.key_data of keys)"
  return ResultError(f"{where}: expected an array or a number that JAX can hold, got {got}")


def _checked(feed: str, what: str, tree: Any, leaves: list[Any]) -> ItemTypes:
  types: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
  if not leaves:
    raise GateDefinitionError(f"feed '{feed}': {what}: expected at least one array, got {tree}")
  for index, leaf in enumerate(leaves):
    where = _where(feed, what, jax.tree.unflatten(tree, leaves), index)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise GateDefinitionError(
        f"{where}: expected a dtype of numbers, got {leaf.dtype}; feed jax.random.key_data of keys"
      )
    dtype = np.dtype(leaf.dtype)
    if not _is_number(dtype):
      raise GateDefinitionError(f"{where}: expected a dtype of numbers that JAX has, got {dtype}")
    canonical = np.dtype(tracing.canonical_dtype(dtype))
    if canonical != dtype:
      raise GateDefinitionError(
        f"{where}: {dtype.name} needs jax_enable_x64; expected {canonical.name} without it"
      )
    if is_packed(dtype):
      raise GateDefinitionError(
        f"{where}: {dtype.name} has several elements in a byte; expected int8, or another dtype "
        "of whole bytes"
      )
    types.append((tuple(int(extent) for extent in leaf.shape), dtype))
  return ItemTypes(feed, tree, tuple(types), default_dtypes())


def _where(feed: str, what: str, item: Any, index: int) -> str:
  """A feed's item and the path of one of its leaves; the item alone where it is one array."""
  paths = jax.tree_util.tree_flatten_with_path(item, is_leaf=shapes.is_type)[0]
  return f"feed '{feed}': {what}{registry.keystr(paths[index][0])}"


def _describe(shape: tuple[int, ...], dtype: Any) -> str:
  return f"{np.dtype(dtype).name}{list(shape)}"
