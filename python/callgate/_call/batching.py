# SPDX-License-Identifier: Apache-2.0
"""Batch levels of gates: one folded axis for "whole" and "broadcast", or the user's own rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import shapes
from callgate._call.site import Callee, CallSite
from callgate._core import split
from callgate._core.dtypes import is_packed
from callgate._core.errors import GateDefinitionError
from callgate._core.levels import Level
from callgate._jax import sources


def batch_whole(
  bind: Callable[[Sequence[Any], Level], Sequence[Any]],
  method: str,
  level: Level,
  operands: Sequence[Any],
  whole: Level | None,
) -> Sequence[Any]:
  """Folds a batch level into the one leading axis that a "whole" or "broadcast" callable gets.

  `bind` makes the call of operands with that axis. `method` is the gate's `vmap`, `level` is the
  new, outermost level, and `whole` is the axis so far. Batched operands and the results have
  `level`'s axis first.
  """
  size, mask = level
  inner_size, inner_mask = whole if whole is not None else (1, (False,) * len(mask))
  flat: list[Any] = []
  combined: list[bool] = []
  for x, outer, inner in zip(operands, mask, inner_mask, strict=True):
    batched = outer or inner or method == "broadcast"
    if batched:  # fold both axes into one
      core = x.shape[outer + inner :]
      x = x.reshape((size if outer else 1, inner_size if inner else 1, *core))
      x = jnp.broadcast_to(x, (size, inner_size, *core)).reshape((size * inner_size, *core))
    flat.append(x)
    combined.append(batched)
  results = bind(flat, (size * inner_size, tuple(combined)))
  lead = (size,) if whole is None else (size, inner_size)
  return [r.reshape((*lead, *r.shape[1:])) for r in results]


def of_lanes_with_objects(
  call: Callable[[Sequence[Any]], Sequence[Any]],
  handles: Sequence[int],
  mask: Sequence[bool],
  operands: Sequence[Any],
) -> Sequence[Any]:
  """Makes a "whole" call in which lanes without an object repeat one that has its objects.

  Without such a lane there is no call, and the results are zeros. A lane without an object is one
  that doesn't take the call's branch: JAX then drops its results. `handles` are the places of the
  batched handles.
  """
  found = [jnp.any(operands[i] != 0, axis=-1) for i in handles]
  has = functools.reduce(jnp.logical_and, found)
  some = jnp.argmax(has)

  def filled(x: Any) -> Any:
    return jnp.where(has.reshape(-1, *(1,) * (x.ndim - 1)), x, x[some])

  values = [filled(x) if flag else x for x, flag in zip(operands, mask, strict=True)]
  results = jax.eval_shape(call, values)
  zeros = lambda: [jnp.zeros(each.shape, each.dtype) for each in results]  # noqa: E731
  return jax.lax.cond(jnp.any(has), lambda: list(call(values)), zeros)


def cuts_bytes(
  operands: Sequence[Any], mask: Sequence[bool], results: Sequence[tuple[Sequence[int], Any]]
) -> bool:
  """Returns True if lanes of packed types (several elements in a byte) would begin within a byte.

  Batched operands have their axis first; `results` has the shape and dtype of each result of one
  lane.
  """
  lanes = [(x.shape[1:], x.dtype) for x, flag in zip(operands, mask, strict=True) if flag]
  return any(
    math.prod(shape) * jax.dtypes.itemsize_bits(dtype) % 8 != 0
    for shape, dtype in (*lanes, *results)
    if is_packed(dtype)
  )


def one_by_one(
  bind: Callable[[Sequence[Any], Any], Sequence[Any]], mask: Sequence[bool], operands: Sequence[Any]
) -> Sequence[Any]:
  """Makes a call for each lane, in order, by a loop in the program, in which XLA slices the lanes.

  `bind` makes the call of one lane from its operands and its number (int32). Batched operands and
  the results have the lanes' axis first.
  """

  def lane(carry: None, batched: Sequence[Any]) -> tuple[None, Sequence[Any]]:
    number, *rest = batched
    rows = iter(rest)
    values = [next(rows) if flag else x for x, flag in zip(operands, mask, strict=True)]
    return carry, list(bind(values, number))

  rows = [x for x, flag in zip(operands, mask, strict=True) if flag]
  with sources.traced_here():
    return jax.lax.scan(lane, None, [jnp.arange(rows[0].shape[0], dtype=np.int32), *rows])[1]


def apply_vmap_rule(
  gate: Callee, site: CallSite, size: int, mask: tuple[bool, ...], operands: Sequence[Any],
  levels: Sequence[Level] = (),
) -> tuple[Sequence[Any], Sequence[bool]]:  # fmt: skip
  """Runs the user's batching rule on flat values, which already have the batch `levels`."""
  assert gate.vmap_rule is not None
  args, kwargs = jax.tree.unflatten(site.in_tree, operands)
  lead = size, list(split.flags(site.in_tree, mask)[0])
  rule = f"{gate.label}: the vmap rule"
  found = gate.call_rule(gate.vmap_rule, lead, args, kwargs, site.static)
  out, out_batched = shapes.pair(rule, "(out, out_batched)", found)
  out = shapes.numbers_as_arrays(out)
  leaves, tree = jax.tree.flatten(split.split_keys(out))
  if tree != site.out_tree:
    raise GateDefinitionError(
      f"{rule} returned results of structure {tree}; expected {site.out_tree}"
    )
  try:
    flags = jax.tree.broadcast(out_batched, out)
  except ValueError as error:
    raise GateDefinitionError(
      f"{rule} returned out_batched of structure {jax.tree.structure(out_batched)}; expected a "
      f"bool, or bools in the structure of its results, {tree}"
    ) from error
  batched = [bool(flag) for flag in jax.tree.leaves(flags)]
  inner = tuple(extent for extent, _ in levels)
  for leaf, (one, dtype), flag in zip(leaves, site.results, batched, strict=True):
    shape = (*inner, *one)
    want = ((size, *shape) if flag else shape, dtype)
    if (jnp.shape(leaf), leaf.dtype) != want:
      raise GateDefinitionError(
        f"{rule} returned {leaf.dtype}{list(jnp.shape(leaf))}; expected {want[1]}{list(want[0])}"
      )
  return leaves, batched
