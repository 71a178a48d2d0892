# SPDX-License-Identifier: Apache-2.0
"""Pytrees with leaves other than arrays: modules with functions, names of modes, and so on.

JAX's transformations take arrays. So each other leaf becomes part of the tree during tracing, as a
node without leaves (`Static`), and returns as a leaf when a user's function is called. A PRNG key
becomes a node with one leaf, its data (`KeyNode`), because the runtime moves arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from callgate._core import exact
from callgate._core.errors import ResultError

NUMBERS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)
_PROTOCOLS = ("__jax_array__", "__array__", "__dlpack__", "__cuda_array_interface__")


@jax.tree_util.register_pytree_node_class
class Static(exact.Keyed):
  """A leaf other than an array, as a node of its pytree.

  Two nodes are equal if their values are indistinguishable (`_core/exact.py`). With `by_identity`,
  for an object whose method is called, they are equal only for the same object.
  """

  by_identity = False

  def __init__(self, value: Any) -> None:
    self.value = value
    self._exact = exact.exact(value)

  @classmethod
  def of_object(cls, value: Any) -> Static:
    """Returns the node of an object whose method is called."""
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


class _NoEntry:
  """The place of the data in its key, which paths of arguments leave out."""

  def __str__(self) -> str:
    return ""


@jax.tree_util.register_pytree_with_keys_class
class KeyNode:
  """A PRNG key, or an array of keys, as a node; its leaf is the data, with additional axes.

  Attributes:
    data: uint32[*shape, *shape of one key's data], or a ShapeDtypeStruct or other replacement.
    impl: the key's kind, as in `jax.random.key_impl`.
  """

  def __init__(self, data: Any, impl: Any) -> None:
    self.data, self.impl = data, impl

  @classmethod
  def of(cls, key: Any) -> KeyNode:
    """Returns the node of a typed key, or of a ShapeDtypeStruct of one."""
    if not isinstance(key, jax.ShapeDtypeStruct):
      return cls(jax.random.key_data(key), jax.random.key_impl(key))
    impls: list[Any] = []  # keeps tracers inside the function

    def data(key: Any) -> Any:
      impls.append(jax.random.key_impl(key))
      return jax.random.key_data(key)

    return cls(jax.eval_shape(data, key), impls[0])

  def key(self) -> Any:
    """The key: an array, a ShapeDtypeStruct, or for a tangent float0 zeros of its shape."""
    data = self.data
    if isinstance(data, jax.ShapeDtypeStruct):
      return jax.eval_shape(self._wrapped, data)
    if getattr(data, "dtype", None) == jax.dtypes.float0:
      shape = jax.eval_shape(self._wrapped, jax.ShapeDtypeStruct(data.shape, np.uint32)).shape
      return np.zeros(shape, jax.dtypes.float0)
    return self._wrapped(data) if hasattr(data, "dtype") else data

  def _wrapped(self, data: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=self.impl)

  def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Any]:
    return ((_NoEntry(), self.data),), self.impl

  @classmethod
  def tree_unflatten(cls, impl: Any, leaves: Iterable[Any]) -> KeyNode:
    (data,) = leaves
    return cls(data, impl)

  def __repr__(self) -> str:
    return f"KeyNode({self.data!r}, {self.impl!r})"


def is_key(leaf: Any) -> bool:
  """Returns True for a typed PRNG key, an array of keys, or a ShapeDtypeStruct of one."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None or isinstance(dtype, np.dtype):  # the fast path, for each result of a call
    return False
  is_of_jax = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
  return is_of_jax and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_array(leaf: Any) -> bool:
  """Returns True for an array or a number, or an object that converts to an array."""
  if isinstance(leaf, NUMBERS):
    return True
  if isinstance(leaf, (type, str, bytes)):  # a class has the methods of its instances
    return False
  if any(hasattr(leaf, protocol) for protocol in _PROTOCOLS):
    return True
  try:
    memoryview(leaf)
  except TypeError:
    return False
  return True


def split(value: Any) -> Any:
  """Returns the pytree with a `Static` for each leaf other than an array, a `KeyNode` for each key.

  A single leaf that is no key is unchanged.
  """
  if is_key(value):
    return KeyNode.of(value)
  leaves, tree = jax.tree.flatten(value)
  if leaves and leaves[0] is value:
    return value
  nodes = [_node(leaf) for leaf in leaves]
  if all(node is leaf for node, leaf in zip(nodes, leaves, strict=True)):
    return value
  return jax.tree.unflatten(tree, nodes)


def _node(leaf: Any) -> Any:
  if is_key(leaf):
    return KeyNode.of(leaf)
  return leaf if is_array(leaf) else Static(leaf)


def split_keys(value: Any) -> Any:
  """Returns the pytree with a `KeyNode` for each typed key; other leaves are unchanged."""
  return jax.tree.map(lambda leaf: KeyNode.of(leaf) if is_key(leaf) else leaf, value)


def split_tangents(results: Any, tangents: Any) -> Any:
  """Returns the tangents of results, in the structure of `split_keys` of the results."""
  return jax.tree.map(_tangent, results, tangents)


def _tangent(result: Any, tangent: Any) -> Any:
  if not is_key(result):
    return tangent
  node = KeyNode.of(result)
  return KeyNode(np.zeros(node.data.shape, jax.dtypes.float0), node.impl)


def joined(value: Any) -> Any:
  """Returns the pytree before the split, also inside of `value`."""
  leaves, tree = jax.tree.flatten(value, is_leaf=_is_part)
  if not any(map(_is_part, leaves)):
    return value
  return jax.tree.unflatten(tree, [_whole_of(leaf) for leaf in leaves])


def _is_part(node: Any) -> bool:
  return isinstance(node, (Static, KeyNode))


def _whole_of(node: Any) -> Any:
  if isinstance(node, KeyNode):
    return node.key()
  return node.value if isinstance(node, Static) else node


_ARRAY = object()  # represents an array


def _whole(tree: Any) -> tuple[Any, list[Any]]:
  """Returns the structure before the split, and its leaves: `_ARRAY`, `Static` or `KeyNode`."""
  nodes = jax.tree.unflatten(tree, [_ARRAY] * tree.num_leaves)
  leaves, whole = jax.tree.flatten(nodes, is_leaf=_is_part)
  return whole, leaves


def is_split(tree: Any) -> bool:
  """Returns True if a pytree of this structure has static parts, or keys."""
  return any(leaf is not _ARRAY for leaf in _whole(tree)[1])


def unflattener(tree: Any, *, keys: bool) -> Callable[[Iterable[Any]], Any]:
  """Returns the function that rebuilds the pytree before the split to `tree`, from arrays.

  keys: True for typed keys; False for their data.
  """
  whole, leaves = _whole(tree)
  if all(leaf is _ARRAY for leaf in leaves):
    return tree.unflatten

  def unflatten(arrays: Iterable[Any]) -> Any:
    rest = iter(arrays)
    return whole.unflatten([made(leaf, rest) for leaf in leaves])

  def made(leaf: Any, rest: Iterator[Any]) -> Any:
    if isinstance(leaf, Static):
      return leaf.value
    data = next(rest)
    return KeyNode(data, leaf.impl).key() if keys and leaf is not _ARRAY else data

  return unflatten


def flatten_as(tree: Any, value: Any, label: str) -> list[Any] | None:
  """Returns the arrays of a pytree that splits to the structure `tree`; None for another structure.

  Data may be in a key's place.

  Raises:
    ResultError: a key is of another kind.
  """
  whole, nodes = _whole(tree)
  leaves, own = jax.tree.flatten(value)
  if own != whole:
    return None
  for index, (leaf, node) in enumerate(zip(leaves, nodes, strict=True)):
    if is_key(leaf):
      impl = jax.random.key_impl(leaf)
      if not isinstance(node, KeyNode) or impl != node.impl:
        expected = f"a key of {node.impl}" if isinstance(node, KeyNode) else "an array of numbers"
        raise ResultError(f"{label}: result {index}: expected {expected}, got a key of {impl}")
      leaves[index] = jax.random.key_data(leaf)
  return leaves


def flags(tree: Any, of_arrays: Iterable[bool]) -> Any:
  """Returns flags in the structure before the split: those of its arrays, else False."""
  whole, leaves = _whole(tree)
  rest = iter(of_arrays)
  return whole.unflatten([not isinstance(leaf, Static) and next(rest) for leaf in leaves])


def split_as(tree: Any, values: Any) -> Any:
  """Returns values for a split pytree's arrays, given in its structure before or after the split.

  A part may be None. Values in the places of static parts are dropped. The result has the structure
  `tree`.

  Raises:
    ValueError: the values have another structure.
  """
  whole, leaves = _whole(tree)
  full = whole.unflatten(range(len(leaves)))
  filled = jax.tree.broadcast(values, full, is_leaf=lambda node: node is None)
  pairs = zip(whole.flatten_up_to(filled), leaves, strict=True)
  return tree.unflatten([value for value, leaf in pairs if not isinstance(leaf, Static)])
