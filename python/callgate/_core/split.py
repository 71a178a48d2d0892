# SPDX-License-Identifier: Apache-2.0
"""Pytrees that hold more than arrays: modules with functions, names of modes, and so on.

JAX's transformations take arrays. So while a call is traced, each other leaf becomes part of the
tree, as a node without leaves (`Static`), and is put back where a function of the user's is called.
A PRNG key becomes a node of one leaf, its data (`KeyNode`): the runtime moves arrays of numbers.
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


class _NoEntry:
  """The data's place in its key, of which the path of an argument says nothing."""

  def __str__(self) -> str:
    return ""


@jax.tree_util.register_pytree_with_keys_class
class KeyNode:
  """A PRNG key, or an array of keys, as a node: its leaf is the data, of the key's shape and more.

  Attributes:
    data: uint32[*shape, *shape of one key's data]; a ShapeDtypeStruct of it, or anything else that
      stands for it.
    impl: of the key, as `jax.random.key_impl` says.
  """

  def __init__(self, data: Any, impl: Any) -> None:
    self.data, self.impl = data, impl

  @classmethod
  def of(cls, key: Any) -> KeyNode:
    """The node of a typed key, or of a ShapeDtypeStruct of one."""
    if not isinstance(key, jax.ShapeDtypeStruct):
      return cls(jax.random.key_data(key), jax.random.key_impl(key))
    impls: list[Any] = []  # no tracer leaves the function

    def data(key: Any) -> Any:
      impls.append(jax.random.key_impl(key))
      return jax.random.key_data(key)

    return cls(jax.eval_shape(data, key), impls[0])

  def key(self) -> Any:
    """The key: an array, a ShapeDtypeStruct, or, of a tangent, float0 zeros of its shape."""
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
  """True for a typed PRNG key, an array of them, or a ShapeDtypeStruct of one."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None or isinstance(dtype, np.dtype):  # asked of each result of a call
    return False
  is_of_jax = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
  return is_of_jax and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


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
  """The pytree with a `Static` for each leaf that is no array, and a `KeyNode` for each typed key.

  A leaf by itself that is no key is as it is.
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
  """The pytree with a `KeyNode` for each typed key; other leaves are as they are."""
  return jax.tree.map(lambda leaf: KeyNode.of(leaf) if is_key(leaf) else leaf, value)


def split_tangents(results: Any, tangents: Any) -> Any:
  """The tangents of results, in the structure of what `split_keys` makes of these."""
  return jax.tree.map(_tangent, results, tangents)


def _tangent(result: Any, tangent: Any) -> Any:
  if not is_key(result):
    return tangent
  node = KeyNode.of(result)
  return KeyNode(np.zeros(node.data.shape, jax.dtypes.float0), node.impl)


def joined(value: Any) -> Any:
  """The pytree that was split, also as a part of `value`."""
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


_ARRAY = object()  # stands for one


def _whole(tree: Any) -> tuple[Any, list[Any]]:
  """The structure of what was split to `tree`, and its leaves: `_ARRAY`, `Static` or `KeyNode`."""
  nodes = jax.tree.unflatten(tree, [_ARRAY] * tree.num_leaves)
  leaves, whole = jax.tree.flatten(nodes, is_leaf=_is_part)
  return whole, leaves


def is_split(tree: Any) -> bool:
  """True if a pytree of this structure has static parts, or keys."""
  return any(leaf is not _ARRAY for leaf in _whole(tree)[1])


def unflattener(tree: Any, *, keys: bool) -> Callable[[Iterable[Any]], Any]:
  """The function that makes what was split to the structure `tree`, of arrays.

  `keys`: True for typed keys; False for their data.
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
  """The arrays of a pytree that is to be split to the structure `tree`; None if it is another.

  In a key's place there may be its data.

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
  """Flags in the structure of what was split to `tree`: those of its arrays, and else False."""
  whole, leaves = _whole(tree)
  rest = iter(of_arrays)
  return whole.unflatten([not isinstance(leaf, Static) and next(rest) for leaf in leaves])


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
  return tree.unflatten([value for value, leaf in pairs if not isinstance(leaf, Static)])
