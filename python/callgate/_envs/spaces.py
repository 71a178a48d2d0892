# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's spaces as pytrees of shapes and dtypes, and the conversion of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import extras
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._jax import tracing

Path = tuple[Any, ...]


def gymnasium(label: str) -> Any:
  """Returns the library; raises an error with the command to install it."""
  return extras.library("gymnasium", "Gymnasium", "envs", by=label)


def types(label: str, which: str, space: Any) -> Any:
  """Returns a space as a pytree of ShapeDtypeStructs, of JAX's canonical dtypes.

  Dict becomes a dict and Tuple a tuple; Box, Discrete, MultiDiscrete and MultiBinary are leaves.

  Args:
    label: the beginning of messages.
    which: "observation_space" or "action_space", for the names of its parts.
    space: the space of one environment.

  Raises:
    GateDefinitionError: a part has no fixed shape and dtype, or has values that JAX's dtype can't
      represent.
  """
  kinds = gymnasium(label).spaces
  if isinstance(space, kinds.Dict):
    return {key: types(label, f"{which}[{key!r}]", one) for key, one in space.spaces.items()}
  if isinstance(space, kinds.Tuple):
    return tuple(types(label, f"{which}[{i}]", one) for i, one in enumerate(space.spaces))
  if not isinstance(space, (kinds.Box, kinds.Discrete, kinds.MultiDiscrete, kinds.MultiBinary)):
    expected = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
    raise GateDefinitionError(
      f"{label}: {which}: expected a space with a fixed shape and dtype ({expected}), got {space}"
    )
  own = np.dtype(space.dtype)
  dtype = tracing.canonical_dtype(own)
  if dtype != own and np.issubdtype(own, np.integer):
    least, most = _bounds(kinds, space)
    limits = np.iinfo(dtype)
    if least < limits.min or most > limits.max:
      raise GateDefinitionError(
        f"{label}: {which}: {space} has values from {least} to {most}; expected values that "
        f"{dtype.name} holds. Set jax_enable_x64 for larger ones"
      )
  return jax.ShapeDtypeStruct(tuple(space.shape), dtype)


def _bounds(kinds: Any, space: Any) -> tuple[int, int]:
  if isinstance(space, kinds.Discrete):
    return int(space.start), int(space.start) + int(space.n) - 1
  if isinstance(space, kinds.MultiDiscrete):
    start = np.asarray(getattr(space, "start", 0))
    return int(start.min()), int((start + space.nvec).max()) - 1
  if isinstance(space, kinds.Box):
    return int(np.min(space.low)), int(np.max(space.high))
  return 0, 1


# -- actions ---------------------------------------------------------------------------------------
def check_numbers(label: str, actions: Any) -> None:
  """Raises if the actions contain something that can't become an array of numbers."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(actions)[0]:
    kind = getattr(getattr(leaf, "dtype", None), "kind", "V")
    if kind in "OSU" or not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float)):
      raise GateDefinitionError(
        f"{label}: actions{jax.tree_util.keystr(path)}: expected an array of numbers, got {leaf!r}"
      )


def check_actions(label: str, space: Any, want: Any, actions: Any, count: int) -> None:
  """Raises unless the traced actions, a pytree of arrays, fit `count` environments."""
  tree = jax.tree.structure(want)
  if jax.tree.structure(actions) != tree:
    raise GateDefinitionError(
      f"{label}: actions: expected the structure of {space}, {tree}, got "
      f"{jax.tree.structure(actions)}"
    )
  found = jax.tree_util.tree_flatten_with_path(want)[0]
  kinds = dtypes_of(space)
  for (path, type_), own, got in zip(found, kinds, jax.tree.leaves(actions), strict=True):
    shape = (count, *type_.shape)
    fits = got.shape == shape and (got.dtype == type_.dtype or _holds(own, got.dtype))
    if not fits:
      where = f"actions{jax.tree_util.keystr(path)}"
      raise GateDefinitionError(
        f"{label}: {where}: expected {type_text(type_.dtype, shape)}, an action for each of "
        f"{count} environments, got {type_text(got.dtype, got.shape)}"
      )


def _holds(own: Any, got: Any) -> bool:
  """True if the space's dtype has every value of another dtype of the same kind."""
  kind = jax.numpy.integer if jax.numpy.issubdtype(own, np.integer) else jax.numpy.floating
  return bool(jax.numpy.issubdtype(got, kind)) and np.can_cast(got, own, "safe")


def dtypes_of(space: Any) -> list[Any]:
  """Returns the dtypes of a space's leaves, in JAX's order."""
  inner = getattr(space, "spaces", None)
  if inner is None:
    return [np.dtype(space.dtype)]
  parts = [inner[key] for key in sorted(inner)] if isinstance(inner, Mapping) else list(inner)
  return [dtype for part in parts for dtype in dtypes_of(part)]


def rows(space: Any, value: Any) -> Sequence[Any]:
  """Returns copies of the actions for each environment, as Gymnasium's vector environments do."""
  inner = getattr(space, "spaces", None)
  if inner is None:
    return list(np.array(value, np.dtype(space.dtype)))
  if isinstance(inner, Mapping):
    columns = [rows(part, value[key]) for key, part in inner.items()]
    return [dict(zip(inner, row, strict=True)) for row in zip(*columns, strict=True)]
  return list(zip(*(rows(part, one) for part, one in zip(inner, value, strict=True)), strict=True))


def batch(space: Any, value: Any, rows: Any) -> Any:
  """Returns copies of several environments' actions, as a vector environment takes them."""
  inner = getattr(space, "spaces", None)
  if inner is None:
    return np.array(value[rows], np.dtype(space.dtype))
  if isinstance(inner, Mapping):
    return {key: batch(part, value[key], rows) for key, part in inner.items()}
  return tuple(batch(part, one, rows) for part, one in zip(inner, value, strict=True))


# -- results of environments -----------------------------------------------------------------------
def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
  """Yields each leaf of dictionaries and tuples, with the keys that lead to it."""
  if isinstance(tree, dict):
    for key in tree:
      yield from leaves(tree[key], (*path, key))
  elif isinstance(tree, tuple):
    for index, one in enumerate(tree):
      yield from leaves(one, (*path, index))
  else:
    yield path, tree


def tree_of(found: Mapping[Path, Any]) -> Any:
  """Returns values by path as nested dictionaries, for the parts of `Store`s."""
  if list(found) == [()]:
    return found[()]
  made: dict[Any, Any] = {}
  for (*outer, last), value in found.items():
    inner = made
    for key in outer:
      inner = inner.setdefault(key, {})
    inner[last] = value
  return made


def at(tree: Any, path: Path) -> Any:
  for key in path:
    tree = tree[key]
  return tree


@dataclasses.dataclass(frozen=True)
class Store:
  """Stores one part of an environment's values in its row of an array.

  Attributes:
    what: "observation['x']", for messages.
    path: the keys that lead to it.
    shape, dtype: the type of one environment's part.
  """

  what: str
  path: Path
  shape: tuple[int, ...]
  dtype: np.dtype[Any]

  @classmethod
  def all_of(cls, what: str, tree: Any) -> list[Store]:
    return [
      cls(what + "".join(f"[{key!r}]" for key in path), path, tuple(one.shape), one.dtype)
      for path, one in leaves(tree)
    ]

  def part(self, value: Any) -> Any:
    """Returns its part of an environment's value."""
    try:
      return at(value, self.path)
    except (KeyError, IndexError, TypeError):
      raise ResultError(f"{self.what}: expected a value as in the space, got none") from None

  def put_all(self, view: Any, values: list[Any]) -> bool:
    """Stores values in the first rows if all are arrays of exactly this type. False if not."""
    dtype, shape = self.dtype, self.shape
    if not shape or not values:
      return not values
    for value in values:
      if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
        return False
    flat = view[: len(values)].reshape(len(values) * shape[0], *shape[1:])
    np.concatenate(values, out=flat)
    return True

  def put_rows(self, view: Any, rows: Any, value: Any) -> None:
    """Stores the values of several environments, an array with a row for each."""
    given = np.asarray(value)
    shape = (len(rows), *self.shape)
    if given.shape == shape and given.dtype == self.dtype:
      view[rows] = given
      return
    if given.shape != shape:
      expected, got = type_text(self.dtype, shape), type_text(given.dtype, given.shape)
      raise ResultError(f"{self.what}: expected {expected}, got {got}")
    for row, one in zip(rows, given, strict=True):
      self.put(view, int(row), one)

  def put(self, view: Any, row: int, value: Any) -> None:
    """Stores an environment's value, of this shape and of a dtype of this kind."""
    if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
      view[row] = value
      return
    given = np.asarray(value)
    same = given.shape == self.shape and np.can_cast(given.dtype, self.dtype, "same_kind")
    if same or (given.shape == self.shape and _is_number(value, self.dtype)):
      made = given.astype(self.dtype)
      if self.dtype.kind not in "iu" or bool((made == given).all()):
        view[row] = made
        return
    expected, got = type_text(self.dtype, self.shape), type_text(given.dtype, given.shape)
    shown = f"{got} ({value!r})" if given.size <= _SHOWN else got
    raise ResultError(f"{self.what}: expected {expected}, got {shown}")


_SHOWN = 4  # the most values in a message


def _is_number(value: Any, dtype: np.dtype[Any]) -> bool:
  """True for a Python number of a kind that the dtype includes; bools count as numbers."""
  if isinstance(value, (bool, np.bool_)):
    return dtype.kind in "biuf"
  return isinstance(value, (int, np.integer)) and dtype.kind in "iuf"
