# SPDX-License-Identifier: Apache-2.0
"""Pytrees that hold more than arrays: modules with functions, names of modes, and so on.

JAX's transformations take arrays. So while a call is traced, each other leaf becomes part of the
tree, as a node without leaves (`Static`), and is put back where a function of the user's is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from callgate._core import exact

NUMBERS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)
_PROTOCOLS = ("__jax_array__", "__array__", "__dlpack__", "__cuda_array_interface__")


@jax.tree_util.register_pytree_node_class
class Static(exact.Keyed):
  """A leaf that is no array, as a node of its pytree.

  It is equal to another if nothing tells the two values apart (`_core/exact.py`). `by_identity`:
  only to one of the very same object, since it is an object whose method is called.
  """

  by_identity = False

  def __init__(self, value: Any) -> None:
    self.value = value
    self._exact = exact.exact(value)

  @classmethod
  def of_object(cls, value: Any) -> Static:
    """The node of an object whose method is called."""
    made = cls.__new__(cls)
    made.value, made.by_identity = value, True
    made._exact = exact.exact_object(value)
    return made

  def tree_flatten(self) -> tuple[tuple[()], Static]:
    return (), self

  @classmethod
  def tree_unflatten(cls, node: Static, _: object) -> Static:
    return node

  def exact_key(self) -> Any:
    return self.by_identity, self._exact.key

  def exact_text(self, name: exact.Name) -> str:
    if self.by_identity:
      return exact.object_text(self.value, name)
    return f"static {exact.content_text(self.value, name)}"

  def __hash__(self) -> int:
    return hash(self._exact)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Static) and self.exact_key() == other.exact_key()

  def __repr__(self) -> str:
    return repr(self.value)


def is_array(leaf: Any) -> bool:
  """True if a leaf is an array or a number, or an object that gives one."""
  if isinstance(leaf, NUMBERS):
    return True
  if isinstance(leaf, (type, str, bytes)):  # classes have their instances' methods
    return False
  if any(hasattr(leaf, protocol) for protocol in _PROTOCOLS):
    return True
  try:
    memoryview(leaf)
  except TypeError:
    return False
  return True


def split(value: Any) -> Any:
  """The pytree with a `Static` for each leaf that is no array; what is a leaf itself, as it is."""
  leaves, tree = jax.tree.flatten(value)
  if all(map(is_array, leaves)) or leaves[0] is value:
    return value
  return jax.tree.unflatten(tree, [leaf if is_array(leaf) else Static(leaf) for leaf in leaves])


def joined(value: Any) -> Any:
  """The pytree that was split, also as a part of `value`."""
  leaves, tree = jax.tree.flatten(value, is_leaf=_is_static)
  if not any(map(_is_static, leaves)):
    return value
  return jax.tree.unflatten(tree, [x.value if _is_static(x) else x for x in leaves])


def _is_static(node: Any) -> bool:
  return isinstance(node, Static)


_ARRAY = object()  # stands for one


def _whole(tree: Any) -> tuple[Any, list[Any]]:
  """The structure of what was split to `tree`, and its leaves: `_ARRAY`, or a `Static`."""
  nodes = jax.tree.unflatten(tree, [_ARRAY] * tree.num_leaves)
  leaves, whole = jax.tree.flatten(nodes, is_leaf=_is_static)
  return whole, leaves


def is_split(tree: Any) -> bool:
  """True if a pytree of this structure has static parts."""
  return len(_whole(tree)[1]) != tree.num_leaves


def unflattener(tree: Any) -> Callable[[Iterable[Any]], Any]:
  """The function that makes what was split to the structure `tree`, of arrays."""
  whole, leaves = _whole(tree)
  if len(leaves) == tree.num_leaves:
    return tree.unflatten

  def unflatten(arrays: Iterable[Any]) -> Any:
    rest = iter(arrays)
    return whole.unflatten([next(rest) if leaf is _ARRAY else leaf.value for leaf in leaves])

  return unflatten


def flags(tree: Any, of_arrays: Iterable[bool]) -> Any:
  """Flags in the structure of what was split to `tree`: those of its arrays, and else False."""
  whole, leaves = _whole(tree)
  rest = iter(of_arrays)
  return whole.unflatten([leaf is _ARRAY and next(rest) for leaf in leaves])


def split_as(tree: Any, values: Any) -> Any:
  """Values for the arrays of what was split to `tree`, in that structure or with None for parts.

  Values in the places of static parts are dropped. The result is of the structure `tree`.

  Raises:
    ValueError: they are of another structure.
  """
  whole, leaves = _whole(tree)
  full = whole.unflatten(range(len(leaves)))
  filled = jax.tree.broadcast(values, full, is_leaf=lambda node: node is None)
  pairs = zip(whole.flatten_up_to(filled), leaves, strict=True)
  return tree.unflatten([value for value, leaf in pairs if leaf is _ARRAY])
