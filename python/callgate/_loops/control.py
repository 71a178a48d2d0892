# SPDX-License-Identifier: Apache-2.0
"""Control flow around gates with effects, where JAX would call them more than once, or refuses.

vmap: JAX runs every branch of a `cond` with a batched predicate for every lane, and the body of
such a `while_loop` for finished lanes too. With an io gate inside, or a wait for a started call,
they run lane after lane instead, and so do all others for `find_nan`; beside a collective, which
takes all lanes, they run for all, with their calls masked (`_loops/masked.py`). With taps of all
lanes at once (`TapSite.whole`) a loop sees each round once.

checkpoint: JAX runs a `while_loop` again in the backward pass. With an io gate it runs in the
forward pass alone, and its results are kept. `jax_remat3` runs everything again, whatever its
effects: programs with calls take the old implementation.

scan under grad: JAX moves what depends on constants alone out of the loop. Nothing is moved out of
one that holds a call with an effect, which would run once instead of in every step.

linearize: JAX runs a `while_loop` that carries a tangent again for each tangent. With an io gate in
it, that is refused; `jax.jvp` is not. Its taps send again, marked (`_loops/repeats.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from callgate._call.batching import one_by_one
from callgate._core.effects import (
  PROGRESS_EFFECT,
  GateEffect,
  ProgressEffect,
  TapEffect,
  WaitEffect,
  WholeTapEffect,
)
from callgate._core.errors import GateDefinitionError
from callgate._jax import batching, loops, tracing
from callgate._loops import masked, numbered, repeats
from callgate._tap import primitive as _primitive

_Rule = Callable[..., Any]
_Values = Sequence[Any]


def batch_cond(original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any) -> Any:
  # A platform's index is the same for all lanes: JAX unbatches it.
  apart = dims[0] is not None and "branches_platforms" not in params
  gates = apart and _goes_apart(params["branches"])
  if apart and (gates or batching.is_marking()):
    if not masked.needs_all_lanes(params["branches"]):
      return _lane_after_lane(jax.lax.cond_p, axis_data, args, dims, params)
    if gates:
      return masked.cond(axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def batch_while(
  original: _Rule, axis_data: Any, args: _Values, dims: _Values, **params: Any
) -> Any:
  jaxprs = _jaxprs(params)
  whole, gates = _holds_whole_taps(jaxprs), _goes_apart(jaxprs)
  apart = gates or batching.is_marking()
  if (whole or apart) and _predicate_batched(axis_data, dims, params):
    if apart and not (masked.needs_all_lanes(jaxprs) or _has_bar(jaxprs)):
      return _lane_after_lane(jax.lax.while_p, axis_data, args, dims, params)
    if whole or gates:
      return masked.while_loop(original, axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def linearize_while(original: _Rule, trace: Any, *tracers: Any, **params: Any) -> Any:
  unknown = [not tracer.pval.is_known() for tracer in tracers]
  if not any(unknown) or all(unknown):
    return original(trace, *tracers, **params)
  if _has_gate_effect(_jaxprs(params), taps=False):
    raise GateDefinitionError(_RUNS_TWICE)
  return repeats.linearize(original, trace, tracers, unknown, params)


def checkpoint_while(
  original: _Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  jaxprs = _jaxprs(eqn.params)
  if any(unknown):
    if _has_gate_effect(jaxprs, taps=False):
      raise GateDefinitionError(_RUNS_TWICE)
    return repeats.checkpoint(original, saveable, unknown, instantiated, eqn)
  if not _has_gate_effect(jaxprs):
    return original(saveable, unknown, instantiated, eqn)
  later = [False] * len(eqn.outvars)
  return eqn, None, later, later, []


def must_not_repeat(closed: Any) -> bool:
  """True if calls, also taps, or bars are in there, which have rules under `jax.checkpoint`."""
  return (
    any(isinstance(effect, (GateEffect, ProgressEffect)) for effect in closed.effects)
    or _primitive.dataflow_taps_in([closed])
    or _primitive.dataflow_taps_in([closed], whole=True)
  )


def checkpoint_scan(original: _Rule, *given: Any) -> Any:
  before = _in_scan()
  _thread.in_scan = _has_gate_effect([given[-1].params["jaxpr"]])
  try:
    return original(*given)
  finally:
    _thread.in_scan = before


_thread = threading.local()


def _in_scan() -> bool:
  """True if this thread is in JAX's rule for `scan` under `checkpoint`, with a gate in the loop."""
  return getattr(_thread, "in_scan", False)


def _jaxprs(params: dict[str, Any]) -> tuple[Any, Any]:
  return params["cond_jaxpr"], params["body_jaxpr"]


def hoist(original: _Rule, jaxpr: Any, consts: Any, residuals: int, *rest: Any) -> Any:
  if _has_gate_effect([jaxpr]):
    return jaxpr, consts, [False] * residuals, []
  return original(jaxpr, consts, residuals, *rest)


def split(original: _Rule, jaxpr: Any, unknown: Sequence[bool], instantiate: Any) -> Any:
  """Returns what of a jaxpr is known: nothing, where the rule above asks what it may hoist."""
  if not (_in_scan() and _has_gate_effect([jaxpr])):
    return original(jaxpr, unknown, instantiate)
  known = [not flag for flag in unknown]
  avals = [aval for aval, flag in zip(jaxpr.in_avals, known, strict=True) if flag]
  same = original(jax.make_jaxpr(lambda *values: values)(*avals), [False] * len(avals), False)[0]
  rest = loops.move_binders_to_front(jaxpr, known)
  return same, rest, [True] * len(jaxpr.out_avals), avals


_RUNS_TWICE = (
  "a while_loop with a gate of effect 'io' or 'ordered' was linearized, and carries a tangent: the "
  "gate would run again for each tangent. Expected: jax.jvp, jax.lax.scan instead of the loop, the "
  "gate outside of it, or effect='pure'"
)


def _goes_apart(jaxprs: Sequence[Any]) -> bool:
  """True if calls are in there that each lane makes for itself alone."""
  waits = any(isinstance(it, WaitEffect) for jaxpr in jaxprs for it in jaxpr.effects)
  return waits or _has_gate_effect(jaxprs)


def _has_gate_effect(jaxprs: Sequence[Any], *, taps: bool = True) -> bool:
  """True if calls of callgate's with effects are in there; with `taps` False, others than taps."""
  # Taps of all lanes at once don't count: they send what JAX's own control flow computes.
  ignored = WholeTapEffect if taps else TapEffect
  return any(
    isinstance(it, GateEffect) and not isinstance(it, ignored)
    for jaxpr in jaxprs
    for it in jaxpr.effects
  ) or (taps and _primitive.dataflow_taps_in(jaxprs))


def _holds_whole_taps(jaxprs: Sequence[Any]) -> bool:
  """True if taps of all lanes at once are in there."""
  has_effect = any(isinstance(it, WholeTapEffect) for jaxpr in jaxprs for it in jaxpr.effects)
  return has_effect or _primitive.dataflow_taps_in(jaxprs, whole=True)


def _has_bar(jaxprs: Sequence[Any]) -> bool:
  return any(PROGRESS_EFFECT in jaxpr.effects for jaxpr in jaxprs)


def _predicate_batched(axis_data: Any, dims: Sequence[Any], params: dict[str, Any]) -> bool:
  """True if lanes may end a `while_loop` at different times."""
  cond_jaxpr, body_jaxpr = _jaxprs(params)
  cond_consts, body_consts, carry = loops.split_operands(params, [dim is not None for dim in dims])
  while True:  # each round makes at least one more carry batched, or is the last
    after = tracing.batched(body_jaxpr, axis_data, [*body_consts, *carry], carry)[1]
    if after == carry:
      return tracing.batched(cond_jaxpr, axis_data, [*cond_consts, *carry], False)[1][0]
    carry = [a or b for a, b in zip(after, carry, strict=True)]


def _lane_after_lane(
  primitive: Any, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """A loop over the lanes, each with control flow of its own, whose calls know its number."""
  pairs = list(zip(args, dims, strict=True))
  # No loop goes along an axis that is split.
  moved = [x if d is None else batching.lie_along(None, jnp.moveaxis(x, d, 0)) for x, d in pairs]
  flow = numbered.Flow(primitive, params)
  mark = batching.lane_p.bind if batching.is_marking() else lambda x: x

  def lane(operands: Sequence[Any], number: Any) -> Sequence[Any]:
    results = numbered.bind(flow, number, axis_data.size, list(map(mark, operands)))
    return list(map(mark, results))

  results = one_by_one(lane, [d is not None for d in dims], moved)
  results = [batching.lie_along(axis_data.explicit_mesh_axis, result) for result in results]
  return results, [0] * len(results)
