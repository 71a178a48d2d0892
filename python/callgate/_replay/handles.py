# SPDX-License-Identifier: Apache-2.0
"""Handles among operands: each run has others, so recordings hold what made their objects."""

from __future__ import annotations

import functools

import jax

from callgate._core import encoding, registry
from callgate._core.dtypes import Value
from callgate._core.public import core
from callgate._objects.handle import Handle
from callgate._objects.hold import of_objects


def without_handles(gate: str, spec: str, operands: tuple[Value, ...]) -> tuple[Value, ...]:
  """The operands with the numbers of the recorded calls that made the objects of handles."""
  handles = getattr(getattr(registry.get(gate), "traits", None), "handles", "")  # a feed has none
  if not handles:
    return operands
  places = range(len(operands)) if handles == "takes" else _places(spec)
  return tuple(of_objects(x) if i in places else x for i, x in enumerate(operands))


@functools.lru_cache(256)
def _places(spec: str) -> frozenset[int]:
  """The flat positions of handles among a site's arguments."""
  if spec in ("", "*"):
    return frozenset()
  tree = encoding.signature(spec).in_tree
  numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
  found = jax.tree.leaves(numbered, is_leaf=lambda x: isinstance(x, Handle))
  return frozenset(core(x).words for x in found if isinstance(x, Handle))
