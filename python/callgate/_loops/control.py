# SPDX-License-Identifier: Apache-2.0
"""vmap of branches and loops that contain calls with effects.

For a `cond` with a batched predicate JAX runs every branch for every lane. For such a `while_loop`
it runs the body for finished lanes, too. If they contain an io gate, a tap or a wait for a started
call, lanes run one after the other instead, and their gates and taps get the lane's number. So do
the lanes of a branch that uses host objects of lanes, made outside of it. In derivatives JAX passes
zeros, which are no handle, for the residuals of a branch that a lane doesn't take. `find_nan` does
so for all branches and loops. With taps of all lanes at once (`TapSite.whole`) a loop sees each
iteration once.

A collective needs all lanes and all devices: none of them may skip it. So a branch with a
collective runs for every lane, as in JAX. callgate's calls in it run only for the lanes that take
the branch: a tap by `where`, any other call in a `cond` of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import primitive as _gates
from callgate._call.batching import one_by_one
from callgate._call.site import BoundCall, shared_by_lanes, unknown_lane
from callgate._core.effects import (
  HANDLE_EFFECT,
  GateEffect,
  ProgressEffect,
  TapEffect,
  WaitEffect,
  WholeTapEffect,
)
from callgate._core.errors import GateDefinitionError
from callgate._jax import batching, loops, refs, tracing, walk
from callgate._loops import carried
from callgate._tap import primitive as _taps

_Rule = Callable[..., Any]
_Values = Sequence[Any]
TAPS = (_taps.tap_p, _taps.cotangent_p)
# The first entry with an effect's type is the effect's kind.
_KINDS = (
  (WholeTapEffect, "whole tap"),
  (TapEffect, "tap"),
  (GateEffect, "gate"),
  (WaitEffect, "wait"),
  (ProgressEffect, "bar"),
)
_APART = frozenset({"gate", "tap", "wait"})  # the kinds of calls that each lane makes separately


def batch_cond(original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any) -> Any:
  # The index of a platform is the same for all lanes: JAX unbatches it.
  apart = dims[0] is not None and "branches_platforms" not in params
  if apart and _use_objects(params["branches"], dims[1:], whole=True):
    params = {name: walk.with_params(value, _skipping) for name, value in params.items()}
  branches = params["branches"]
  calls = apart and (kinds_in(branches) & _APART or _use_objects(branches, dims[1:]))
  if apart and (calls or batching.is_marking()):
    if not _needs_all_lanes(branches):
      return _lane_after_lane(jax.lax.cond_p, axis_data, args, dims, params)
    if calls:
      return _masked_cond(axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def batch_while(
  original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any
) -> Any:
  jaxprs = params["cond_jaxpr"], params["body_jaxpr"]
  if params["cond_jaxpr"].out_avals[0].shape:  # lanes' flags: `_masked_while` has masked the calls
    return original(axis_data, args, dims, **params)
  kinds = kinds_in(jaxprs)
  apart = kinds & _APART or batching.is_marking()
  if (apart or "whole tap" in kinds) and _predicate_batched(axis_data, dims, params):
    if apart and not (_needs_all_lanes(jaxprs) or "bar" in kinds):
      return _lane_after_lane(jax.lax.while_p, axis_data, args, dims, params)
    if kinds & {*_APART, "whole tap"}:
      return _masked_while(original, axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def _predicate_batched(axis_data: Any, dims: Sequence[Any], params: dict[str, Any]) -> bool:
  """True if lanes may end a `while_loop` at different times."""
  cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
  cond_consts, body_consts, carry = loops.split_operands(params, [dim is not None for dim in dims])
  while True:  # each iteration makes at least one more carry batched, or is the last
    after = tracing.batched(body_jaxpr, axis_data, [*body_consts, *carry], carry)[1]
    if after == carry:
      return tracing.batched(cond_jaxpr, axis_data, [*cond_consts, *carry], False)[1][0]
    carry = [a or b for a, b in zip(after, carry, strict=True)]


def kinds_in(jaxprs: Sequence[Any]) -> set[str]:
  """Returns the kinds of calls in jaxprs: "gate", "tap", "whole tap", "wait", "bar"."""
  kinds = kinds_of(effect for jaxpr in jaxprs for effect in jaxpr.effects)
  kinds |= {"tap"} if _taps.dataflow_taps_in(jaxprs) else set()
  return kinds | ({"whole tap"} if _taps.dataflow_taps_in(jaxprs, whole=True) else set())


def kinds_of(effects: Iterable[Any]) -> set[str]:
  """Returns the kinds of calls with these effects."""
  each = ([kind for of, kind in _KINDS if isinstance(it, of)] for it in effects)
  return {kinds[0] for kinds in each if kinds}


def _use_objects(branches: _Values, dims: Sequence[Any], *, whole: bool = False) -> bool:
  """True if a branch may use objects that lanes have from outside of it.

  `whole` asks for calls of all lanes at once.
  """
  flags = [dim is not None for dim in dims]
  return any(HANDLE_EFFECT in it.effects and _uses_objects(it, flags, whole) for it in branches)


def _uses_objects(jaxpr: Any, flags: Sequence[bool], whole: bool) -> bool:
  """True if a call in a jaxpr may use an object by a handle from the operands with flags."""
  pairs = zip(jaxpr.invars, flags, strict=True)
  handles = {variable for variable, flag in pairs if flag and _may_be_handles(variable.aval)}
  for eqn in jaxpr.eqns:
    own = [not isinstance(atom, tracing.Literal) and atom in handles for atom in eqn.invars]
    if not any(own):
      continue
    if _is_use(eqn, whole):
      return True
    if isinstance(eqn.params.get("call"), BoundCall):
      continue  # an object that it makes is the lane's own
    if (inner := loops.called(eqn)) is not None:
      found = _uses_objects(inner, own, whole)
    elif eqn.primitive is jax.lax.cond_p:
      found = any(_uses_objects(branch, own[1:], whole) for branch in eqn.params["branches"])
    else:
      found = HANDLE_EFFECT in eqn.effects
    if found:
      return True
    handles.update(variable for variable in eqn.outvars if _may_be_handles(variable.aval))
  return False


def _holds_uses(eqn: Any) -> bool:
  """True for a call that uses objects, and for an equation that contains one."""
  if HANDLE_EFFECT not in eqn.effects:
    return False
  within = (each for inner in walk.subjaxprs(eqn) for each in walk.equations(inner))
  return any(map(_is_use, (eqn, *within)))


def _is_use(eqn: Any, whole: bool = False) -> bool:
  """True for a call that uses the objects of one lane; with `whole`, of all lanes at once."""
  call = eqn.params.get("call")
  is_use = isinstance(call, BoundCall) and call.gate.traits.handles == "uses"
  return is_use and (call.gate.vmap == "each") is not whole


def _skipping(params: dict[str, Any]) -> dict[str, Any]:
  """Returns a call's parameters; a call of all lanes at once leaves out lanes without an object."""
  call = params.get("call")
  if not isinstance(call, BoundCall) or call.gate.traits.handles != "uses":
    return params
  return {**params, "call": dataclasses.replace(call, skips=True)}


def _may_be_handles(aval: Any) -> bool:
  """True for the type of a handle's words, or of several handles'."""
  return getattr(aval, "dtype", None) == np.uint32 and aval.shape[-1:] == (2,)


def _needs_all_lanes(jaxprs: _Values) -> bool:
  """True if jaxprs contain a collective, the name of a mapped axis, or a Ref from outside."""
  return any(
    refs.touches(jaxpr.effects)
    or batching.names_axis(jaxpr)
    or any(
      eqn.primitive is _gates.mesh_gate_p and eqn.params["call"].gate.collective
      for eqn in walk.equations(jaxpr)
    )
    for jaxpr in jaxprs
  )


# -- lane after lane -------------------------------------------------------------------------------
def _lane_after_lane(
  primitive: Any, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """Loops over the lanes; each runs the control flow by itself, and its calls know its number."""
  pairs = list(zip(args, dims, strict=True))
  # A loop can't run along an axis that is split over devices.
  moved = [x if d is None else batching.split_along(None, jnp.moveaxis(x, d, 0)) for x, d in pairs]
  flow = types.SimpleNamespace(primitive=primitive, params=params)
  rule = functools.partial(_in_lane, axis_data.size)
  mark = batching.lane_p.bind if batching.is_marking() else lambda x: x

  def lane(operands: Sequence[Any], number: Any) -> Sequence[Any]:
    results = carried.bind(rule, flow, number, list(map(mark, operands)))
    return list(map(mark, results))

  results = one_by_one(lane, [d is not None for d in dims], moved)
  results = [batching.split_along(axis_data.explicit_mesh_axis, result) for result in results]
  return results, [0] * len(results)


def _in_lane(size: int, lane: Any, eqn: Any, inputs: _Values) -> _Values:
  if eqn.primitive in _gates.PRIMITIVES:
    with eqn.ctx.manager:
      return _gates.bind_in_lane(inputs, eqn.params["call"], lane, size)
  if eqn.primitive in TAPS:
    with eqn.ctx.manager:
      return _taps.bind_in_lane(eqn.primitive, inputs, eqn.params, lane, size)
  if not any(map(_holds_calls, walk.subjaxprs(eqn))):
    return walk.bind_equation(eqn, inputs)
  if carried.can_carry(eqn.primitive):
    with eqn.ctx.manager:
      return carried.bind(functools.partial(_in_lane, size), eqn, lane, inputs)
  params = {name: walk.with_params(value, _without_number) for name, value in eqn.params.items()}
  return walk.bind_equation(eqn.replace(params=params), inputs)


def _holds_calls(jaxpr: Any) -> bool:
  calls = (*_gates.PRIMITIVES, *TAPS)
  return any(eqn.primitive in calls for eqn in walk.equations(jaxpr))


def _without_number(params: dict[str, Any]) -> dict[str, Any]:
  """Returns a call's parameters if its number can't be passed in."""
  call = params.get("call")
  if not isinstance(call, BoundCall):
    return params
  if call.gate.traits.by_lane:
    raise unknown_lane(call.gate)
  return {**params, "call": shared_by_lanes(call)}


# -- all lanes, with masked calls ------------------------------------------------------------------
def _masked_cond(axis_data: Any, args: _Values, dims: _Values, params: dict[str, Any]) -> Any:
  """Evaluates a batched `cond_p` in which all lanes run each branch."""
  branches = params["branches"]

  def lane(index: Any, *operands: Any) -> Any:
    results: list[_Values] = []
    for number, branch in enumerate(branches):
      taken = index == number
      # As in JAX's own rule: values of lanes that don't take a branch have no derivative.
      inputs = [_kept_from(taken, x) for x in operands]
      results.append(carried.run(_where, branch, taken, inputs))
    return [jax.lax.select_n(index, *each) for each in zip(*results, strict=True)]

  index = batching.lane_aval(axis_data, args[0], dims[0])
  with batching.in_lane(axis_data):
    closed = jax.make_jaxpr(lane)(index, *branches[0].in_avals)
  batched = batching.batched_at(closed, axis_data, dims, [0] * len(closed.out_avals))
  return tracing.jaxpr_as_fun(batched)(*args), [0] * len(closed.out_avals)


def _kept_from(taken: Any, value: Any) -> Any:
  return (
    value if refs.is_ref(jax.typeof(value)) else _chosen(taken, value, jax.lax.stop_gradient(value))
  )


def _chosen(taken: Any, value: Any, otherwise: Any) -> Any:
  return jax.lax.select_n(jnp.broadcast_to(taken, jnp.shape(value)), otherwise, value)


def _masked_while(
  rule: Callable[..., Any], axis_data: Any, args: _Values, dims: _Values, params: dict[str, Any]
) -> Any:
  """Evaluates a batched `while_p` in which all lanes run the body until the last lane has ended.

  The loop carries a flag for each lane. `rule` is JAX's own, in which lanes that have ended keep
  their values.
  """
  asked, held, first = loops.split_operands(params, range(len(args)))
  asks, body = params["cond_jaxpr"], params["body_jaxpr"]

  def begin(going: Any, *operands: Any) -> Any:
    return carried.run(_where, asks, going, operands)

  def step(*operands: Any) -> Any:
    consts, (going, *carry) = operands[: len(asked) + len(held)], operands[len(asked) + len(held) :]
    after = carried.run(_where, body, going, (*consts[len(asked) :], *carry))
    # A collective in the predicate sees the last values of ended lanes.
    carry = [_chosen(going, new, old) for new, old in zip(after, carry, strict=True)]
    (goes_on,) = carried.run(_where, asks, going, (*consts[: len(asked)], *carry))
    return goes_on, *carry

  consts = [*asks.in_avals[: len(asked)], *body.in_avals[: len(held)]]
  carry = body.in_avals[len(held) :]
  every = batching.to_lanes(axis_data, jnp.bool_(True))
  going = batching.lane_aval(axis_data, every, 0)
  with batching.in_lane(axis_data):
    beginning = jax.make_jaxpr(begin)(going, *asks.in_avals)
    going = beginning.out_avals[0]
    stepping = jax.make_jaxpr(step)(*consts, going, *carry)
    going_on = jax.make_jaxpr(lambda going, *_: going)(going, *carry)
  inputs = [*asked, *first]
  batched = batching.batched_at(beginning, axis_data, [0, *(dims[i] for i in inputs)], [0])
  goes = tracing.jaxpr_as_fun(batched)(every, *(args[i] for i in inputs))
  operands = [*(args[i] for i in (*asked, *held)), *goes, *(args[i] for i in first)]
  places = [*(dims[i] for i in (*asked, *held)), 0, *(dims[i] for i in first)]
  results, result_dims = rule(
    axis_data, operands, places, cond_nconsts=0, cond_jaxpr=going_on,
    body_nconsts=len(consts), body_jaxpr=stepping,
  )  # fmt: skip
  return results[1:], result_dims[1:]


def _where(mask: Any, eqn: Any, inputs: _Values) -> _Values:
  if eqn.primitive in TAPS:
    return _tap(eqn, mask, inputs)
  inner = walk.subjaxprs(eqn)
  calls = (kinds_of(eqn.effects) | kinds_in(inner)) & _APART
  calls = calls or (inner and refs.touches(eqn.effects))
  if not (calls or _holds_uses(eqn)):
    return refs.bind_masked(eqn, mask, inputs)
  if not _needs_all_lanes(inner):
    return _only_where(mask, lambda: walk.bind_equation(eqn, inputs), eqn.outvars)
  if carried.can_carry(eqn.primitive):
    with eqn.ctx.manager:
      return carried.bind(_where, eqn, mask, inputs)
  if not calls:  # right if each lane has an object
    return walk.bind_equation(eqn, inputs)
  name = eqn.primitive.name
  raise GateDefinitionError(
    f"vmap of a branch or loop that only some lanes take: {name} holds both a collective (or a "
    "Ref) and a callgate call with an effect. Move one of the two out of it"
  )


def _only_where(mask: Any, call: Callable[[], _Values], results: _Values) -> _Values:
  zeros = lambda: [tracing.zeros_of(variable.aval) for variable in results]  # noqa: E731
  return jax.lax.cond(mask, lambda: list(call()), zeros)


def _tap(eqn: Any, mask: Any, inputs: _Values) -> _Values:
  site = eqn.params["site"]
  if site.whole:
    return walk.bind_equation(eqn, inputs)
  place = site.values + len(site.logical)
  before, after = inputs[:place], inputs[place + site.where :]
  where = inputs[place] & mask if site.where else mask
  params = eqn.params if site.where else _taps.with_scalar(eqn.params, place)
  params = {**params, "site": dataclasses.replace(site, where=True)}
  results = eqn.primitive.bind(*before, where, *after, **params)
  return results[: len(eqn.outvars)]
