# SPDX-License-Identifier: Apache-2.0
"""vmap of branches and loops that hold calls with effects.

JAX runs every branch of a `cond` with a batched predicate for every lane, and the body of such a
`while_loop` for finished lanes too. With an io gate inside, or a wait for a started call, they run
lane after lane instead (`_loops/numbered.py`), and so do all others for `find_nan`; beside a
collective, which takes all lanes, they run for all, with their calls masked (`_loops/masked.py`).
With taps of all lanes at once (`TapSite.whole`) a loop sees each round once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate._jax import batching, loops, tracing
from callgate._loops import masked, numbered
from callgate._loops.calls import APART, kinds_in

_Rule = Callable[..., Any]
_Values = Sequence[Any]


def batch_cond(original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any) -> Any:
  # A platform's index is the same for all lanes: JAX unbatches it.
  apart = dims[0] is not None and "branches_platforms" not in params
  branches = params["branches"]
  gates = apart and kinds_in(branches) & APART
  if apart and (gates or batching.is_marking()):
    if not masked.needs_all_lanes(branches):
      return numbered.lane_after_lane(jax.lax.cond_p, axis_data, args, dims, params)
    if gates:
      return masked.cond(axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def batch_while(
  original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any
) -> Any:
  jaxprs = params["cond_jaxpr"], params["body_jaxpr"]
  kinds = kinds_in(jaxprs)
  apart = kinds & APART or batching.is_marking()
  if (apart or "whole tap" in kinds) and _predicate_batched(axis_data, dims, params):
    if apart and not (masked.needs_all_lanes(jaxprs) or "bar" in kinds):
      return numbered.lane_after_lane(jax.lax.while_p, axis_data, args, dims, params)
    if kinds & {*APART, "whole tap"}:
      return masked.while_loop(original, axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def _predicate_batched(axis_data: Any, dims: Sequence[Any], params: dict[str, Any]) -> bool:
  """True if lanes may end a `while_loop` at different times."""
  cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
  cond_consts, body_consts, carry = loops.split_operands(params, [dim is not None for dim in dims])
  while True:  # each round makes at least one more carry batched, or is the last
    after = tracing.batched(body_jaxpr, axis_data, [*body_consts, *carry], carry)[1]
    if after == carry:
      return tracing.batched(cond_jaxpr, axis_data, [*cond_consts, *carry], False)[1][0]
    carry = [a or b for a, b in zip(after, carry, strict=True)]
