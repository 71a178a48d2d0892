# SPDX-License-Identifier: Apache-2.0
"""Refuses calls in the functions that XLA applies to pairs of elements.

XLA compiles such a function into its own loops, without calls. A call there would end the process.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax

from callgate._call.primitive import PRIMITIVES
from callgate._core.errors import GateDefinitionError
from callgate._jax import walk
from callgate._jax.callbacks import pure_callback_p
from callgate._loops.control import TAPS

# The names of the functions that take such a function, by the primitive.
USERS = {
  jax.lax.reduce_p: "jax.lax.reduce",
  jax.lax.reduce_window_p: "jax.lax.reduce_window",
  jax.lax.select_and_scatter_p: "the derivative of jax.lax.reduce_window",
  jax.lax.scatter_p: "x.at[...].apply",
}


def refuse(user: str, original: Callable[..., Any], *args: Any, **params: Any) -> Any:
  """The layer around the lowering of a primitive of `USERS`."""
  for jaxpr in walk.subjaxprs(types.SimpleNamespace(params=params)):
    for call in filter(None, map(_call_of, walk.equations(jaxpr))):
      raise GateDefinitionError(
        f"{user}: expected a function of JAX's own operations, got one that calls {call}. XLA "
        "can't make calls between two elements; reduce with jax.lax.associative_scan or "
        "jax.lax.scan, or call it with a whole array"
      )
  return original(*args, **params)


def _call_of(eqn: Any) -> str:
  """Returns the name of a call to the host, for a message; "" for other equations."""
  if eqn.primitive in PRIMITIVES:
    return eqn.params["call"].gate.label
  if eqn.primitive in TAPS:
    return f"tap '{eqn.params['site'].name}'"
  return "jax.pure_callback" if eqn.primitive is pure_callback_p else ""
