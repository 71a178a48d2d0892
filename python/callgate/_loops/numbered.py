# SPDX-License-Identifier: Apache-2.0
"""Control flow in a loop over lanes, whose gates and taps get the number of their lane."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from callgate._call import primitive as _gates
from callgate._call.batching import one_by_one
from callgate._call.site import BoundCall, shared_by_lanes, unknown_lane
from callgate._jax import batching, walk
from callgate._loops import carried
from callgate._tap import primitive as _taps

_Values = Sequence[Any]
_TAPS = (_taps.tap_p, _taps.cotangent_p)


def lane_after_lane(
  primitive: Any, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """A loop over the lanes, each with control flow of its own, whose calls know its number."""
  pairs = list(zip(args, dims, strict=True))
  # No loop goes along an axis that is split.
  moved = [x if d is None else batching.lie_along(None, jnp.moveaxis(x, d, 0)) for x, d in pairs]
  flow = types.SimpleNamespace(primitive=primitive, params=params)
  run = functools.partial(_run, axis_data.size)
  mark = batching.lane_p.bind if batching.is_marking() else lambda x: x

  def lane(operands: Sequence[Any], number: Any) -> Sequence[Any]:
    results = carried.bind(run, flow, number, list(map(mark, operands)))
    return list(map(mark, results))

  results = one_by_one(lane, [d is not None for d in dims], moved)
  results = [batching.lie_along(axis_data.explicit_mesh_axis, result) for result in results]
  return results, [0] * len(results)


def _run(size: int, jaxpr: Any, lane: Any, operands: _Values) -> list[Any]:
  return walk.interpret(jaxpr, operands, functools.partial(_equation, size, lane))


def _equation(size: int, lane: Any, eqn: Any, inputs: _Values) -> _Values:
  if eqn.primitive in _gates.PRIMITIVES:
    with eqn.ctx.manager:
      return _gates.bind_in_lane(inputs, eqn.params["call"], lane, size)
  if eqn.primitive in _TAPS:
    with eqn.ctx.manager:
      return _taps.bind_in_lane(eqn.primitive, inputs, eqn.params, lane, size)
  if not any(map(_holds_calls, walk.subjaxprs(eqn))):
    return walk.bind_equation(eqn, inputs)
  if carried.can_carry(eqn.primitive):
    with eqn.ctx.manager:
      return carried.bind(functools.partial(_run, size), eqn, lane, inputs)
  params = {name: walk.with_params(value, _without_number) for name, value in eqn.params.items()}
  return walk.bind_equation(eqn.replace(params=params), inputs)


def _holds_calls(jaxpr: Any) -> bool:
  calls = (*_gates.PRIMITIVES, *_TAPS)
  return any(eqn.primitive in calls for eqn in walk.equations(jaxpr))


def _without_number(params: dict[str, Any]) -> dict[str, Any]:
  """A call's parameters, where nothing can carry the number to it."""
  call = params.get("call")
  if not isinstance(call, BoundCall):
    return params
  if call.gate.traits.by_lane:
    raise unknown_lane(call.gate)
  return {**params, "call": shared_by_lanes(call)}
