# SPDX-License-Identifier: Apache-2.0
"""`Handle`: a value of a program that refers to a Python object on the host."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from callgate._core import encoding
from callgate._core.errors import HandleError
from callgate._core.public import Public, core
from callgate._objects.table import WORDS
from callgate._places import threads, workers
from callgate._places.threads import Thread
from callgate._places.workers import Workers

# The keyword for the loop whose step makes an object: the last operand, since it sorts last.
SCOPE = "\U0010fffdcallgate_scope"
TYPE = jax.ShapeDtypeStruct((WORDS,), np.uint32)


class HandleWords(NamedTuple):
  """The core of a handle.

  Attributes:
    words: the leaf.
    place: the object's place as programs hold it.
    solver: the name of the `callgate.linear_solver` whose `factor` made the object; None for other
      objects.
  """

  words: Any
  place: str | None
  solver: str | None


class Handle(Public[HandleWords]):
  """A value of a program that refers to a Python object on the host; made by `callgate.hold`.

  A handle is a pytree with one leaf, uint32[..., 2]. Loops can carry it, programs can return it,
  and `callgate.use` takes it; its numbers have no other use. Under `jax.vmap` it refers to one
  object for each lane. Its tangents have the type float0. Handles of objects in different places,
  and of different solvers' factors, are different types for loops and branches.
  """

  __slots__ = ()

  def __init__(self, words: Any, place: str | None = None, solver: str | None = None) -> None:
    super().__init__(HandleWords(words, place, solver))

  def __repr__(self) -> str:
    lanes = getattr(self._core.words, "shape", TYPE.shape)[: -len(TYPE.shape)]
    shown = [str(list(lanes))] if lanes else []
    return f"Handle({', '.join([*shown, *filter(None, [self._core.place])])})"

  @property
  def place(self) -> Workers | Thread | None:
    """The workers or the thread where the object lives; None for this process's default thread.

    Raises:
      HandleError: these workers, or this thread, no longer exist.
    """
    name = self._core.place
    if name is None:
      return None
    found = workers.at_place(name) or threads.at_place(name)
    if found is None:
      raise HandleError(
        f"expected the handle of a live object, got one of {name}, which is closed; its objects "
        "were freed"
      )
    return found


jax.tree_util.register_pytree_node(
  Handle,
  lambda handle: ((core(handle).words,), core(handle)[1:]),
  lambda kind, leaves: Handle(*leaves, *kind),
)


@functools.lru_cache(256)
def places(spec: str) -> tuple[int, ...]:
  """Returns the flat places of handles among the arguments of a call site."""
  if spec in ("", "*"):
    return ()
  tree = encoding.signature(spec).in_tree
  numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
  found = jax.tree.leaves(numbered, is_leaf=lambda x: isinstance(x, Handle))
  return tuple(core(x).words for x in found if isinstance(x, Handle))
