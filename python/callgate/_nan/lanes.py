# SPDX-License-Identifier: Apache-2.0
"""Finds the lanes of a program's values by marks that vmap leaves during tracing.

A mark is an identity on a value, with the value's axes from `jax.vmap`, the outermost first.
Further transformations carry it along.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from callgate._jax import batching as _batching
from callgate._jax import refs, tracing

Axes = tuple[int, ...]
lanes_p = tracing.Primitive("callgate_lanes")
MARKS = (lanes_p, _batching.lane_p)


def has_step_for_each(eqn: Any) -> bool:
  """Returns True for a `scan` whose steps are lanes, with branches and loops of their own."""
  return any(inner.primitive is _batching.lane_p for inner in eqn.params["jaxpr"].eqns)


def marking() -> contextlib.AbstractContextManager[None]:
  """Marks the operations that the block traces."""
  return _batching.marking(_mark)


def _mark(value: Any, axis: int) -> Any:
  if refs.is_ref(jax.typeof(value)) or not jnp.issubdtype(value.dtype, jnp.inexact):
    return value
  return lanes_p.bind(value, axes=(axis,))


def axes_of(jaxpr: Any) -> dict[Any, Axes]:
  """Returns the lane axes of a jaxpr's variables, as far as they are known.

  A variable without a mark, such as in the batching rule of an operation, has the axes of an
  operand of the same shape.
  """
  known: dict[Any, Axes] = {}
  for eqn in reversed(jaxpr.eqns):
    if eqn.primitive is lanes_p:  # the last mark of a value has most axes
      (given,), (made,) = eqn.invars, eqn.outvars
      known[made] = max(known.get(made, ()), eqn.params["axes"], key=len)
      if not isinstance(given, tracing.Literal):
        known[given] = max(known.get(given, ()), known[made], key=len)
  for eqn in jaxpr.eqns:
    operands = [v for v in eqn.invars if not isinstance(v, tracing.Literal) and v in known]
    for made in eqn.outvars:
      alike = (known[v] for v in operands if v.aval.shape == getattr(made.aval, "shape", None))
      if made not in known and (axes := next(alike, None)) is not None:
        known[made] = axes
  return known


# -- the primitive ---------------------------------------------------------------------------------
lanes_p.def_impl(lambda x, *, axes: x)
lanes_p.def_abstract_eval(lambda x, *, axes: x)
ad.deflinear2(lanes_p, lambda ct, _, *, axes: [_transposed(ct, axes)])


def _transposed(ct: Any, axes: Axes) -> Any:
  return ct if isinstance(ct, ad.Zero) else lanes_p.bind(ct, axes=axes)


def _batch(args: Any, dims: Any, *, axes: Axes) -> Any:
  (x,), (dim,) = args, dims
  inner = tuple(axis + (axis >= dim) for axis in axes)
  return lanes_p.bind(x, axes=(dim, *inner)), dim


batching.primitive_batchers[lanes_p] = _batch
mlir.register_lowering(lanes_p, lambda context, x, *, axes: [x])
