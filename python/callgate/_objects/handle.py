# SPDX-License-Identifier: Apache-2.0
"""`Handle`: a value of a program that stands for an object of the host."""

from __future__ import annotations

from typing import Any, Self

import jax
import numpy as np

from callgate._core.errors import HandleError
from callgate._objects.table import WORDS
from callgate._workers import threads, workers
from callgate._workers.threads import Thread
from callgate._workers.workers import Workers

# The keyword of the loop whose step makes an object: the last operand, as it sorts behind names.
SCOPE = "\U0010fffdcallgate_scope"
TYPE = jax.ShapeDtypeStruct((WORDS,), np.uint32)


@jax.tree_util.register_pytree_node_class
class Handle:
  """A value of a program that stands for an object of the host; made by `callgate.hold`.

  A pytree with one leaf, uint32[..., 2], which means nothing to anybody else: to be carried by
  loops, returned, mapped over and given to `callgate.use`. Under `jax.vmap` it stands for an object
  a lane. Its tangents are of type float0.

  Handles of objects that live in two places are of two types for loops and branches.
  """

  __slots__ = ("_place", "_words")

  def __init__(self, words: Any, place: str | None = None) -> None:
    self._words, self._place = words, place

  @property
  def place(self) -> Workers | Thread | None:
    """The workers or the thread where the object lives; None for this process's default.

    Raises:
      HandleError: nothing is left of them.
    """
    if self._place is None:
      return None
    found = workers.at_place(self._place) or threads.at_place(self._place)
    if found is None:
      raise HandleError(
        f"expected the handle of a live object, got one of {self._place}, which has been closed, "
        "and its objects with it"
      )
    return found

  @property
  def words(self) -> Any:
    """The leaf."""
    return self._words

  def tree_flatten(self) -> tuple[tuple[Any], Any]:
    return (self._words,), self._place

  @classmethod
  def tree_unflatten(cls, aux: Any, leaves: Any) -> Self:
    made = object.__new__(cls)
    (made._words,), made._place = leaves, aux
    return made

  def __repr__(self) -> str:
    lanes = getattr(self._words, "shape", TYPE.shape)[: -len(TYPE.shape)]
    return f"Handle({list(lanes)})" if lanes else "Handle()"
