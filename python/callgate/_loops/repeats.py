# SPDX-License-Identifier: Apache-2.0
"""Loops that JAX's derivatives run more than once, or move computations out of.

checkpoint: JAX runs a `while_loop` again in the backward pass, without its bar. A loop with an io
gate runs only in the forward pass, and its results are kept. `jax_remat3` runs everything again,
regardless of effects; so programs with calls use the old implementation.

scan under grad: JAX moves computations that depend only on constants out of the loop. A loop that
contains a call with an effect keeps everything, because the call would otherwise run once instead
of in every step.

linearize: JAX makes two loops of a `while_loop` that carries a tangent. The first computes
everything that depends on no tangent. The second computes everything, once for each tangent. So an
io gate in such a loop raises an error; use `jax.jvp`. A call on a named thread, or with objects,
raises an error, too, when JAX asks which results of the loop `checkpoint` keeps: it saves the
results of effects, and a loop can't say how many there are. A tap in the first loop sends again in
the second, with `info.repeated`. A tap of a tangent is only in the second loop.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from callgate._call.site import BoundCall
from callgate._core.effects import HANDLE_EFFECT, PROGRESS_EFFECT
from callgate._core.errors import GateDefinitionError
from callgate._jax import loops, walk
from callgate._loops import marks
from callgate._loops.control import kinds_in

_Rule = Callable[..., Any]
_Params = dict[str, Any]


# -- while loops -----------------------------------------------------------------------------------
def linearize_while(original: _Rule, trace: Any, *tracers: Any, **params: Any) -> Any:
  unknown = [not tracer.pval.is_known() for tracer in tracers]
  if not any(unknown) or all(unknown) or not _repeats(params, "tap", "whole tap"):
    return original(trace, *tracers, **params)
  closed = jax.make_jaxpr(lambda *values: jax.lax.while_p.bind(*values, **params))(
    *(tracer.aval for tracer in tracers)
  )
  rules: dict[Any, Any] = partial_eval.partial_eval_jaxpr_custom_rules
  _, second, *_ = rules[jax.lax.while_p](None, unknown, [True] * len(unknown), closed.eqns[-1])

  def process(primitive: Any, tracers: Sequence[Any], _: Any) -> Any:
    return trace.default_process_primitive(primitive, tracers, second.params)

  # JAX's rule passes its trace only the second loop.
  return original(types.SimpleNamespace(default_process_primitive=process), *tracers, **params)


def checkpoint_while(
  original: _Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  if any(unknown) and HANDLE_EFFECT in eqn.effects:
    call = _first(
      _jaxprs(eqn.params), lambda call: call.gate.traits.handles or call.gate.traits.of_thread
    )
    raise GateDefinitionError(_KEEPS.format(call))
  if any(unknown) and _repeats(eqn.params, "tap", "whole tap"):
    first, second, *rest = _with_marked_taps(original, saveable, unknown, instantiated, eqn)
  elif not any(unknown) and kinds_in(_jaxprs(eqn.params)) & {"gate", "tap"}:
    later = [False] * len(eqn.outvars)
    return eqn, None, later, later, []
  else:
    first, second, *rest = original(saveable, unknown, instantiated, eqn)
  if first is not None and second is not None and marks.are_in(second.params["body_jaxpr"]):
    second = _without_bars(second)
  return first, second, *rest


def _repeats(params: _Params, *kinds: str) -> bool:
  """True if a loop that runs again contains such calls; raises for gates with effects."""
  held = kinds_in(_jaxprs(params))
  if "gate" in held:
    call = _first(_jaxprs(params), lambda call: call.gate.effect != "pure")
    raise GateDefinitionError(_RUNS_TWICE.format(call))
  return bool(held.intersection(kinds))


def _jaxprs(params: _Params) -> tuple[Any, Any]:
  return params["cond_jaxpr"], params["body_jaxpr"]


def _first(jaxprs: Sequence[Any], holds: Callable[[BoundCall], Any]) -> str:
  """Returns the label of the first call for which `holds`."""
  calls = (eqn.params.get("call") for jaxpr in jaxprs for eqn in walk.equations(jaxpr))
  found = (it.gate.label for it in calls if isinstance(it, BoundCall) and holds(it))
  return next(found, "a gate")


_RUNS_TWICE = (
  "JAX linearizes a while_loop that carries a tangent and calls {}, of effect 'io' or 'ordered': "
  "the gate would run again for each tangent. Use jax.jvp or jax.lax.scan, or move the call out of "
  "the loop. If the gate has no effect, declare effect='pure'"
)


_KEEPS = (
  "JAX linearizes, under jax.checkpoint or with a tap in it, a while_loop that carries a tangent "
  "and calls {}, on a named thread or with an object: JAX would keep the results of every step of "
  "the loop. Use jax.jvp or jax.lax.scan, or move the call out of the loop"
)


def _with_marked_taps(
  rule: _Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  """Runs JAX's rule under `jax.checkpoint`; it splits a loop with numbers as the taps' marks."""
  before: list[bool] = []
  in_first: set[int] = set()

  def number(mark: bool) -> int:
    before.append(mark)
    return len(before) + 1  # differs from False and True

  def of_first(number: int) -> bool:
    in_first.add(number)
    return before[number - 2]

  numbered = eqn.replace(params=_of_taps(eqn.params, number))
  first, second, *rest = rule(saveable, unknown, instantiated, numbered)
  if first is not None:
    first = first.replace(params=_of_taps(first.params, of_first))
  params = _of_taps(second.params, lambda number: before[number - 2] or number in in_first)
  return first, second.replace(params=params), *rest


def _of_taps(params: _Params, change: Callable[[Any], Any]) -> _Params:
  """Returns a loop's parameters with other marks of its taps."""

  def changed(of_one: _Params) -> _Params:
    return {**of_one, "repeated": change(of_one["repeated"])} if "repeated" in of_one else of_one

  return {name: walk.with_params(value, changed) for name, value in params.items()}


def _without_bars(eqn: Any) -> Any:
  body = marks.taken_out(eqn.params["body_jaxpr"]).closed
  left = (it for it in eqn.effects if it != PROGRESS_EFFECT or it in body.effects)
  effects = type(eqn.effects)(left)
  return eqn.replace(params={**eqn.params, "body_jaxpr": body}, effects=effects)


# -- all loops -------------------------------------------------------------------------------------
def must_not_repeat(closed: Any) -> bool:
  """True if it contains calls, taps or bars, which have rules under `jax.checkpoint`."""
  return bool(kinds_in([closed]) - {"wait"})


def checkpoint_scan(original: _Rule, *given: Any) -> Any:
  before = _in_scan()
  _thread.in_scan = _must_stay(given[-1].params["jaxpr"])
  try:
    return original(*given)
  finally:
    _thread.in_scan = before


_thread = threading.local()


def _in_scan() -> bool:
  """True if this thread is in JAX's rule for `scan` under `checkpoint`, for a loop with a gate."""
  return getattr(_thread, "in_scan", False)


def hoist(original: _Rule, jaxpr: Any, consts: Any, residuals: int, *rest: Any) -> Any:
  if _must_stay(jaxpr):
    return jaxpr, consts, [False] * residuals, []
  return original(jaxpr, consts, residuals, *rest)


def split(original: _Rule, jaxpr: Any, unknown: Sequence[bool], instantiate: Any) -> Any:
  """Returns the known part of a jaxpr: nothing, when the rule above asks what it may hoist."""
  if not (_in_scan() and _must_stay(jaxpr)):
    return original(jaxpr, unknown, instantiate)
  known = [not flag for flag in unknown]
  avals = [aval for aval, flag in zip(jaxpr.in_avals, known, strict=True) if flag]
  same = original(jax.make_jaxpr(lambda *values: values)(*avals), [False] * len(avals), False)[0]
  rest = loops.move_binders_to_front(jaxpr, known)
  return same, rest, [True] * len(jaxpr.out_avals), avals


def _must_stay(jaxpr: Any) -> bool:
  return bool(kinds_in([jaxpr]) & {"gate", "tap"})
