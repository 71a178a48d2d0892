# SPDX-License-Identifier: Apache-2.0
"""Finds the findings that reach a program's results: each value has a set of findings.

A value's `origins` are the findings from which a path of values with a NaN or an infinity leads to
it. A value without NaN and infinity has none. A value counts as a whole, except for the elements
that `select_n` selects.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from callgate._jax import refs, tracing


class Followed(NamedTuple):
  """A value of a running program.

  Attributes:
    value: an array or a Ref.
    origins: a flag for each finding; None if origins are not needed.
  """

  value: Any
  origins: Any


def values_of(followed: Sequence[Any]) -> list[Any]:
  return [x.value if isinstance(x, Followed) else x for x in followed]


def origins_of(followed: Sequence[Any]) -> list[Any]:
  """Returns the values' origins; literals of JAX have none."""
  return [x.origins if isinstance(x, Followed) else None for x in followed]


def follow(values: Sequence[Any], origins: Sequence[Any]) -> list[Followed]:
  """Returns the values with their origins, which values without NaN and infinity lose."""
  return [Followed(x, shown(found, x)) for x, found in zip(values, origins, strict=True)]


def shown(origins: Any, value: Any) -> Any:
  """Returns the origins of a value with a NaN or an infinity; no origins for other values."""
  if origins is None:
    return None
  if refs.is_ref(jax.typeof(value)) or not is_real(value):
    return jnp.zeros_like(origins)
  return origins & ~jnp.isfinite(wide(value)).all()


def of_nan(origins: Any, value: Any) -> Any:
  """Returns the origins of an argument with a NaN; infinities of arguments are not reported."""
  return shown(origins & jnp.isnan(wide(value)).any() if is_real(value) else origins, value)


def union(sets: Sequence[Any]) -> Any:
  known = [one for one in sets if one is not None]
  return functools.reduce(operator.or_, known) if known else None


def operands_origins(eqn: Any, ins: Sequence[Any], origins: Sequence[Any]) -> Any:
  """Returns the origins that an equation may pass on."""
  origins = list(origins)
  if eqn.primitive.name == "select_n" and is_real(ins[1]):
    which, *cases = ins
    for number, case in enumerate(cases):
      if origins[number + 1] is not None:
        chosen = (which == number) & ~jnp.isfinite(wide(case))
        origins[number + 1] &= chosen.any()
  return union(origins)


def on_any_device(eqn: Any, flags: Any) -> Any:
  """Combines the flags of a collective's operands over all devices that it connects."""
  named = eqn.params.get("axis_name", eqn.params.get("axes", ()))
  named = named if isinstance(named, (tuple, list)) else (named,)
  names = [name for name in named if name in tracing.region_axes()]
  if flags is None or not names or eqn.primitive.name in ("axis_index", "pvary", "pbroadcast"):
    return flags
  flags = tracing.vary_over(tracing.manual_axes(), flags)
  summed = jax.lax.psum(flags.astype(jnp.int32), tuple(names))
  return tracing.vary_over(tracing.manual_axes(), summed > 0)


def is_real(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact) and jnp.size(x) > 0


def wide(x: Any) -> Any:
  """Returns the array in a dtype that all NumPy functions support."""
  return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 16 else x
