# SPDX-License-Identifier: Apache-2.0
"""Branches and loops' bodies that all lanes run, with their calls masked.

A collective takes all lanes, and all devices: none of them may skip it. So a branch that holds one
runs for every lane, as JAX has it, and its calls of callgate's run for those lanes alone that take
the branch: a tap by `where`, any other call in a `cond` of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from callgate._call import primitive as _gates
from callgate._core.errors import GateDefinitionError
from callgate._jax import batching, loops, refs, tracing, walk
from callgate._loops import carried
from callgate._loops.calls import APART, kinds_in, kinds_of
from callgate._tap import primitive as _taps

_Values = Sequence[Any]


def needs_all_lanes(jaxprs: _Values) -> bool:
  """True if jaxprs hold a collective, the name of a mapped axis, or a Ref from outside."""
  return any(
    refs.touches(jaxpr.effects)
    or batching.names_axis(jaxpr)
    or any(
      eqn.primitive is _gates.mesh_gate_p and eqn.params["call"].gate.collective
      for eqn in walk.equations(jaxpr)
    )
    for jaxpr in jaxprs
  )


def cond(axis_data: Any, args: _Values, dims: _Values, params: dict[str, Any]) -> Any:
  """A batched `cond_p` of which all lanes run each branch."""
  branches = params["branches"]

  def lane(index: Any, *operands: Any) -> Any:
    results: list[_Values] = []
    for number, branch in enumerate(branches):
      taken = index == number
      # As in JAX's own rule: what a lane that doesn't take a branch makes has no derivative.
      inputs = [_kept_from(taken, x) for x in operands]
      results.append(run(branch, taken, inputs))
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


def while_loop(
  rule: Callable[..., Any], axis_data: Any, args: _Values, dims: _Values, params: dict[str, Any]
) -> Any:
  """A batched `while_p` of which all lanes run the body until the last has ended.

  The loop carries whether the lane goes on. `rule` is JAX's own, by which lanes that have ended
  keep what they have.
  """
  asked, held, first = loops.split_operands(params, range(len(args)))
  asks, body = params["cond_jaxpr"], params["body_jaxpr"]

  def begin(going: Any, *operands: Any) -> Any:
    return run(asks, going, operands)

  def step(*operands: Any) -> Any:
    consts, (going, *carry) = operands[: len(asked) + len(held)], operands[len(asked) + len(held) :]
    after = run(body, going, (*consts[len(asked) :], *carry))
    # A collective of the predicate sees what ended lanes keep.
    carry = [_chosen(going, new, old) for new, old in zip(after, carry, strict=True)]
    (goes_on,) = run(asks, going, (*consts[: len(asked)], *carry))
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


# -- a jaxpr whose calls are masked ----------------------------------------------------------------
def run(jaxpr: Any, mask: Any, operands: _Values) -> list[Any]:
  """The results of a jaxpr, closed or open, whose calls are made where `mask` is True."""
  return walk.interpret(jaxpr, operands, functools.partial(_equation, mask))


def _equation(mask: Any, eqn: Any, inputs: _Values) -> _Values:
  if eqn.primitive in (_taps.tap_p, _taps.cotangent_p):
    return _tap(eqn, mask, inputs)
  inner = walk.subjaxprs(eqn)
  calls = (kinds_of(eqn.effects) | kinds_in(inner)) & APART
  if not calls and not (inner and refs.touches(eqn.effects)):
    return refs.bind_masked(eqn, mask, inputs)
  if not needs_all_lanes(inner):
    return _only_where(mask, lambda: walk.bind_equation(eqn, inputs), eqn.outvars)
  if not carried.can_carry(eqn.primitive):
    name = eqn.primitive.name
    raise GateDefinitionError(
      f"vmap of a branch or loop that not all lanes take: {name} in it holds both a collective "
      "(or a Ref) and a call of callgate's with an effect. Expected one of the two outside of it"
    )
  with eqn.ctx.manager:
    return carried.bind(run, eqn, mask, inputs)


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
