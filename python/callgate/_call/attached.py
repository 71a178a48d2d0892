# SPDX-License-Identifier: Apache-2.0
"""Gives values derivatives in arguments that they don't depend on: a started call's result.

A primitive that passes the values on has the rule. `jax.custom_jvp` would lose it: when JAX 0.10
splits a loop's body for reverse mode, it drops the rule for known values, and their derivative
would be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from callgate._jax.tracing import Primitive

_attached_p = Primitive("attached")
_attached_p.multiple_results = True


def with_derivative(again: Callable[..., Any], results: Any, args: Any) -> Any:
  """Returns the results, with derivatives in `args` as those of `again(results, args)`."""
  leaves, tree = jax.tree.flatten(args)
  flat, out_tree = jax.tree.flatten(results)

  def again_flat(flat: Sequence[Any], *values: Any) -> list[Any]:
    given = jax.tree.unflatten(out_tree, flat)
    return jax.tree.leaves(again(given, jax.tree.unflatten(tree, values)))

  found = _attached_p.bind(*flat, *leaves, again=again_flat, count=len(flat))
  return jax.tree.unflatten(out_tree, found)


def _results(*operands: Any, again: Any, count: int) -> list[Any]:
  del again
  return list(operands[:count])


def _jvp(
  primals: Sequence[Any], tangents: Sequence[Any], *, again: Callable[..., Any], count: int
) -> tuple[Sequence[Any], Sequence[Any]]:
  results = _attached_p.bind(*primals, again=again, count=count)
  args, given = list(primals[count:]), tangents[count:]
  moved = [i for i, tangent in enumerate(given) if type(tangent) is not ad.Zero]
  if not moved:
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

  def of_moved(*values: Any) -> list[Any]:
    flat = list(args)
    for index, value in zip(moved, values, strict=True):
      flat[index] = value
    return again(results, *flat)

  found = jax.jvp(of_moved, [args[i] for i in moved], [given[i] for i in moved])[1]
  return results, [
    ad.Zero(jax.typeof(x).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
    for x, t in zip(results, found, strict=True)
  ]


def _batch(
  operands: Sequence[Any], dims: Sequence[Any], *, again: Callable[..., Any], count: int
) -> tuple[Sequence[Any], Sequence[int]]:
  pairs = list(zip(operands, dims, strict=True))
  size: int = next(x.shape[dim] for x, dim in pairs if dim is not None)
  moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
  results = [
    jnp.broadcast_to(x, (size, *jnp.shape(x))) if dim is None else x
    for x, dim in zip(moved[:count], dims, strict=False)
  ]
  axes = [None if dim is None else 0 for dim in dims[count:]]

  def of_lanes(results: Sequence[Any], *args: Any) -> list[Any]:
    return jax.vmap(again, in_axes=(0, *axes), axis_size=size)(results, *args)

  found = _attached_p.bind(*results, *moved[count:], again=of_lanes, count=count)
  return found, [0] * count


_attached_p.def_impl(_results)
_attached_p.def_abstract_eval(_results)
ad.primitive_jvps[_attached_p] = _jvp
batching.primitive_batchers[_attached_p] = _batch
mlir.register_lowering(_attached_p, lambda _, *operands, **given: _results(*operands, **given))
