# SPDX-License-Identifier: Apache-2.0
"""`Handle`: a value of a program that stands for an object of the host."""

from __future__ import annotations

from typing import Any, Self

import jax
import numpy as np

from callgate._objects.table import WORDS

TYPE = jax.ShapeDtypeStruct((WORDS,), np.uint32)


@jax.tree_util.register_pytree_node_class
class Handle:
  """A value of a program that stands for an object of the host; made by `callgate.hold`.

  A pytree with one leaf, uint32[..., 2], which means nothing to anybody else: to be carried by
  loops, returned, mapped over and given to `callgate.use`. Under `jax.vmap` it stands for an object
  a lane. Its tangents are of type float0.
  """

  __slots__ = ("_words",)

  def __init__(self, words: Any) -> None:
    self._words = words

  @property
  def words(self) -> Any:
    """The leaf."""
    return self._words

  def tree_flatten(self) -> tuple[tuple[Any], None]:
    return (self._words,), None

  @classmethod
  def tree_unflatten(cls, aux: None, leaves: Any) -> Self:
    del aux
    made = object.__new__(cls)
    (made._words,) = leaves
    return made

  def __repr__(self) -> str:
    lanes = getattr(self._words, "shape", TYPE.shape)[: -len(TYPE.shape)]
    return f"Handle({list(lanes)})" if lanes else "Handle()"
