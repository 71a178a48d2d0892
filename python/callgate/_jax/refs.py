# SPDX-License-Identifier: Apache-2.0
"""JAX's mutable arrays (`jax.Ref`): their values, and their changes in a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.state import primitives as _primitives
from jax._src.state import types as _types

from callgate._jax import walk


def touches(effects: Any) -> bool:
  """Returns True if a jaxpr's effects read or write a Ref from outside of it (0.10 to 0.12)."""
  return any(isinstance(effect, _types.RefEffect) for effect in effects)


def is_ref(aval: Any) -> bool:
  """Returns True for the abstract value of a Ref (0.10 to 0.12)."""
  return isinstance(aval, _types.AbstractRef)


def read(tree: Any) -> Any:
  """Returns the pytree with the current values of Refs, or of parts (`ref.at[...]`).

  A host function can't get a Ref, so the caller means its value (0.10 to 0.12).
  """
  if not any(isinstance(leaf, _REFS) for leaf in jax.tree.leaves(tree)):
    return tree
  return jax.tree.map(lambda leaf: leaf[...] if isinstance(leaf, _REFS) else leaf, tree)


_REFS: Any = (jax.Ref, _types.TransformedRef)


def bind_masked(eqn: Any, mask: Any, operands: Sequence[Any]) -> list[Any]:
  """Returns the results of an equation that changes a Ref where `mask` is True (0.10 to 0.12)."""
  if eqn.primitive is _primitives.swap_p:
    ref, value, *index = operands
    before = _primitives.get_p.bind(ref, *index, **eqn.params)
    operands = ref, jnp.where(mask, value, before), *index
  elif eqn.primitive is _primitives.addupdate_p:
    ref, value, *index = operands
    operands = ref, jnp.where(mask, value, jnp.zeros_like(value)), *index
  return walk.bind_equation(eqn, operands)
