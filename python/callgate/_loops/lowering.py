# SPDX-License-Identifier: Apache-2.0
"""Lowers loops with progress marks: in chunks, with one call of the board a chunk.

In XLA's CPU code a step may take nanoseconds; any call in the body makes it a hundred times as
long. So a loop `while cond: body` becomes

    while cond:
      while cond and steps < chunk: body
      chunk = update(...)

with the same results. The board chooses `chunk` such that updates come every few milliseconds.
Scans are taken as JAX's own implementation writes them, a `while_loop` on whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir, partial_eval

from callgate._core.effects import PROGRESS_EFFECT
from callgate._core.encoding import is_open
from callgate._jax import loops, tracing
from callgate._jax.tracing import Literal, jaxpr_as_fun
from callgate._loops.primitive import UNKNOWN, Bar, progress_call_p, progress_p

Rule = Callable[..., Any]
_Bars = Sequence[tuple[Bar, Any]]  # with their totals or, once begun, their handles


def start() -> None:
  """Puts the rules around JAX's own; called once by `import callgate`."""
  while_p = jax.lax.while_p
  for primitive, body, run in (
    (jax.lax.scan_p, "jaxpr", _run_scan), (while_p, "body_jaxpr", _run_while),
  ):  # fmt: skip
    rule = functools.partial(_rule, tracing.lowering_rule(primitive), body, run)
    mlir.register_lowering(primitive, rule)
  rules: dict[Any, Any] = partial_eval.partial_eval_jaxpr_custom_rules
  rules[while_p] = functools.partial(_remat_rule, rules[while_p])


def _rule(original: Rule, body: str, run: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  if not _marks(params[body]):
    return original(context, *operands, **params)
  run = functools.partial(run, params)
  return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _remat_rule(original: Rule, *given: Any) -> Any:
  """Under `jax.checkpoint` a while loop runs again in the backward pass: without a bar."""
  known, staged, *rest = original(*given)
  if known is not None and staged is not None and _marks(staged.params["body_jaxpr"]):
    body = _without_marks(staged.params["body_jaxpr"])
    effects = staged.effects if PROGRESS_EFFECT in body.effects else _others(staged.effects)
    staged = staged.replace(params={**staged.params, "body_jaxpr": body}, effects=effects)
  return (known, staged, *rest)


def _marks(closed: Any) -> list[Any]:
  """The marks at the top of a loop's body."""
  if PROGRESS_EFFECT not in closed.effects:
    return []
  return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is progress_p]


def _without_marks(closed: Any) -> Any:
  eqns = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is not progress_p]
  marked = any(PROGRESS_EFFECT in eqn.effects for eqn in eqns)
  effects = closed.jaxpr.effects if marked else _others(closed.jaxpr.effects)
  return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, effects=effects))


def _others(effects: Any) -> Any:
  return type(effects)(effect for effect in effects if effect != PROGRESS_EFFECT)


def _begin(bars: _Bars, values: Sequence[Any]) -> _Bars:
  """Begins bars with their totals, once `values` are there; a total of None is the bar's own."""

  def begin(bar: Bar, total: Any) -> Any:
    if total is None:
      return _call("begin", bar, *anchor)
    return _call("begin_of", bar, jnp.max(total).astype(np.int32), *anchor)

  anchor = _anchor(values)
  return [(bar, begin(bar, total)) for bar, total in bars]


def _end(begun: _Bars, count: Any, values: Sequence[Any]) -> None:
  """Ends the bars, once `values` are there."""
  for bar, handle in begun:
    _call("end", bar, handle, count, *_anchor(values))


def _call(kind: str, bar: Bar, *operands: Any) -> Any:
  return progress_call_p.bind(*operands, kind=kind, bar=bar)[0]


def _anchor(values: Sequence[Any]) -> Sequence[Any]:
  """The smallest of the arrays, if there is one: a call that takes it waits for it."""
  arrays = [x for x in values if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.number)]
  return sorted((x for x in arrays if x.size), key=lambda x: x.size)[:1]


def _run_scan(params: dict[str, Any], *operands: Any) -> list[Any]:
  length, unroll = params["length"], params["unroll"]
  bars = [mark.params["bar"] for mark in _marks(params["jaxpr"])]
  # An exported program's length may be known when it runs alone.
  count = jnp.asarray(length) if (open_ := is_open(length)) else None
  known = UNKNOWN if open_ else length
  totals = [known if bar.total == UNKNOWN else bar.total for bar in bars]
  own = [
    dataclasses.replace(b, total=t, has_total=False) for b, t in zip(bars, totals, strict=True)
  ]
  begun = _begin([(bar, count if bar.total == UNKNOWN else None) for bar in own], operands)
  params = {**params, "jaxpr": _without_marks(params["jaxpr"])}
  implementation = functools.partial(loops.scan_impl, **params)
  trips = length // unroll if unroll else 0
  if open_ or trips > 1 or (trips == 1 and (unroll == 1 or length % unroll)):
    results = _run_implementation(begun, implementation, operands, unroll)
  else:  # a scan that is unrolled as a whole has no loop, and shows its end alone
    results = implementation(*operands)
  if count is None:
    count = np.int32(np.uint32(length & 0xFFFFFFFF))
  _end(begun, count.astype(np.int32), results)
  return results


def _run_implementation(
  begun: _Bars, implementation: Rule, operands: Sequence[Any], unroll: int
) -> list[Any]:
  """Returns what JAX writes for a scan, with its `while_loop`, the first one there, in chunks."""
  closed: Any = jax.make_jaxpr(implementation)(*operands)
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))

  def read(variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else values[variable]

  loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive is jax.lax.while_p)
  for eqn in jaxpr.eqns:
    inputs = [read(v) for v in eqn.invars]
    with eqn.ctx.manager:
      if eqn is loop:
        results = _run_chunks(begun, eqn.params, inputs, unit=unroll)[1]
      else:
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        results = results if eqn.primitive.multiple_results else [results]
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _run_while(params: dict[str, Any], *operands: Any) -> list[Any]:
  body, consts = params["body_jaxpr"], operands[params["cond_nconsts"] :]
  marks = [(mark.params["bar"], mark.invars[0]) for mark in _marks(body)]
  totals = [_before_first_step(body, x, consts) if bar.has_total else None for bar, x in marks]
  begun = _begin([(bar, total) for (bar, _), total in zip(marks, totals, strict=True)], operands)
  params = {**params, "body_jaxpr": _without_marks(body)}
  steps, results = _run_chunks(begun, params, operands, unit=1)
  _end(begun, steps, results)
  return results


def _before_first_step(body: Any, variable: Any, operands: Sequence[Any]) -> Any:
  """Returns what a variable of a loop's body is in its first step; it depends on no effect."""
  pure = [eqn for eqn in body.jaxpr.eqns if not eqn.effects]
  jaxpr = body.jaxpr.replace(eqns=pure, outvars=[variable], effects=frozenset())
  jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used_outputs=True, instantiate=True)
  return jaxpr_as_fun(body.replace(jaxpr=jaxpr))(*operands)[0]


def _run_chunks(
  begun: _Bars, params: dict[str, Any], operands: Sequence[Any], unit: int
) -> tuple[Any, list[Any]]:
  """The loop of a `while_loop`'s parameters, in chunks: the steps it took, and its results.

  A batched loop runs until its last lane has ended.
  """
  cond_consts, body_consts, carry = loops.split_operands(params, operands)
  predicate = functools.partial(jaxpr_as_fun(params["cond_jaxpr"]), *cond_consts)
  one_step = functools.partial(jaxpr_as_fun(params["body_jaxpr"]), *body_consts)

  def body(before: Sequence[Any]) -> list[Any]:
    if not params["cond_jaxpr"].out_avals[0].shape:
      return one_step(*before)
    (lanes,) = predicate(*before)
    return [
      jax.lax.select(jax.lax.broadcast_in_dim(lanes, new.shape, tuple(range(lanes.ndim))), new, old)
      for new, old in zip(one_step(*before), before, strict=True)
    ]

  def cond(carry: Sequence[Any]) -> Any:
    (lanes,) = predicate(*carry)
    return jnp.any(lanes) if lanes.shape else lanes

  def chunk(state: Any) -> Any:
    done, wanted, carry = state
    if params["cond_jaxpr"].effects:  # it must not be asked more often than the loop does
      steps, carry = 1, body(carry)
    else:
      trips = jnp.maximum(wanted // unit, 1)
      steps, carry = jax.lax.while_loop(
        lambda s: (s[0] < trips) & cond(s[1]),
        lambda s: (s[0] + 1, body(s[1])),
        (np.int32(0), carry),
      )
    done = done + steps * unit
    waits = [_call("update", bar, handle, done) for bar, handle in begun]
    return done, functools.reduce(jnp.minimum, waits), carry

  state = (np.int32(0), np.int32(1), carry)
  done, _, results = jax.lax.while_loop(lambda s: cond(s[2]), chunk, state)
  return done, list(results)
