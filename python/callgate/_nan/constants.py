# SPDX-License-Identifier: Apache-2.0
"""Constants of a program with a NaN: the arrays that f closes over, and literals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, refs, sources, tracing, walk
from callgate._nan.findings import EqnPlace, Equation
from callgate._nan.reach import Followed


def has_nan(value: Any) -> bool:
  """Returns True for a constant or a literal of the program with a NaN."""
  if isinstance(value, Followed) or not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
    return False
  return bool(np.isnan(np.asarray(value)).any())


def first_followed(eqn: Any) -> int | None:
  """Returns the index of the first operand that a step or a device changes; None without one."""
  if eqn.primitive.name == "scan":
    return loops.scan_counts(eqn.params)[0]
  if eqn.primitive.name == "while":
    return eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
  return 0 if eqn.primitive.name == "shard_map" else None


def most(jaxpr: Any) -> int:
  """Returns the most constants that a `Watch` may follow."""
  count = len(jaxpr.outvars)
  for eqn in walk.equations(jaxpr):
    inner = walk.subjaxprs(eqn)
    if inner or any(refs.is_ref(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
      count += len(eqn.invars) + sum(len(one.outvars) for one in inner)
  return count


def described(number: int, aval: Any, source: str, place: EqnPlace) -> Equation:
  """Describes a constant of the program as an equation without operands."""
  return Equation(
    number, "constant", None, source, len(place.loops), place.lane_counts, ((),), (), (aval,),
    place.around,
  )  # fmt: skip


def arrays(closed: Any, source: str) -> Iterator[tuple[Any, str]]:
  """Yields each array with a NaN that a program closes over, and the source of its first use.

  Scalars such as `jnp.nan` are no such arrays. `source` is that of an array without a use.
  """
  held = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  seen = set[int]()
  uses = ((eqn.invars, sources.source_of(eqn)) for eqn in walk.equations(closed))
  for atoms, line in (*uses, (closed.jaxpr.outvars, source)):
    for atom in atoms:
      value: Any = atom.val if isinstance(atom, tracing.Literal) else held.get(atom)
      if np.ndim(value) and id(value) not in seen and has_nan(value):
        yield value, line or source
      seen.add(id(value))
