"""How loops with progress marks are lowered: in chunks, with one call of the board a chunk.

XLA's CPU compiler turns a loop of small steps into one function, in which a step takes nanoseconds;
a call in its body, even a conditional one, makes every step a hundred times as long. So a loop
`while cond: body` becomes

    while cond:
      while cond and steps < chunk: body
      chunk = update(...)

with the same body, in the same order, on the same buffers: results are those of the loop as it was.
The board chooses `chunk` such that updates come every few milliseconds. Scans are taken as JAX's
own implementation writes them, a `while_loop` on whole arrays; nothing is sliced or copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir, partial_eval

from callgate._core.effects import PROGRESS_EFFECT
from callgate._jax import tracing
from callgate._jax.tracing import Literal, jaxpr_as_fun
from callgate._loops.primitive import UNKNOWN, Bar, progress_call_p, progress_p

Rule = Callable[..., Any]


def start() -> None:
  """Puts the rules around JAX's own; called once by `import callgate`."""
  scan_p, while_p = jax.lax.scan_p, jax.lax.while_p
  for primitive, rule in ((scan_p, _scan_rule), (while_p, _while_rule)):
    original = tracing.lowering_rule(primitive)
    mlir.register_lowering(primitive, functools.partial(rule, original))
  rules: dict[Any, Any] = partial_eval.partial_eval_jaxpr_custom_rules
  rules[while_p] = functools.partial(_remat_rule, rules[while_p])


def _scan_rule(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  marks = _marks(params["jaxpr"])
  if not marks:
    return original(context, *operands, **params)
  bars: list[Bar] = []
  for bar in (mark.params["bar"] for mark in marks):
    total = params["length"] if bar.total == UNKNOWN else bar.total
    bars.append(dataclasses.replace(bar, total=total, has_total=False))
  params = {**params, "jaxpr": _without_marks(params["jaxpr"])}
  run = functools.partial(_run_scan, bars, params)
  return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _while_rule(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  if not _marks(params["body_jaxpr"]):
    return original(context, *operands, **params)
  run = functools.partial(_run_while, params)
  return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _remat_rule(
  original: Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  """Under `jax.checkpoint` a while loop runs again in the backward pass: without a bar."""
  known, staged, *rest = original(saveable, unknown, instantiated, eqn)
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
  effects = closed.jaxpr.effects
  if not any(PROGRESS_EFFECT in eqn.effects for eqn in eqns):
    effects = _others(effects)
  return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, effects=effects))


def _others(effects: Any) -> Any:
  return type(effects)(effect for effect in effects if effect != PROGRESS_EFFECT)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Bars:
  """The bars of one loop, begun."""

  bars: Sequence[Bar]
  handles: Sequence[Any]

  @classmethod
  def begin(cls, bars: Sequence[Bar], totals: Sequence[Any], values: Sequence[Any]) -> _Bars:
    """Begins the bars, once `values` are there; a total of None is the bar's own."""
    anchor = _anchor(values)
    handles = [
      _call("begin", bar, *anchor)
      if total is None
      else _call("begin_of", bar, jnp.max(total).astype(np.int32), *anchor)
      for bar, total in zip(bars, totals, strict=True)
    ]
    return cls(bars, handles)

  def update(self, count: Any) -> Any:
    """The number of steps until the next update."""
    waits = [_call("update", bar, h, count) for bar, h in zip(self.bars, self.handles, strict=True)]
    return functools.reduce(jnp.minimum, waits)

  def end(self, count: Any, values: Sequence[Any]) -> None:
    """Ends the bars, once `values` are there."""
    for bar, handle in zip(self.bars, self.handles, strict=True):
      _call("end", bar, handle, count, *_anchor(values))


def _call(kind: str, bar: Bar, *operands: Any) -> Any:
  (result,) = progress_call_p.bind(*operands, kind=kind, bar=bar)
  return result


def _anchor(values: Sequence[Any]) -> Sequence[Any]:
  """The smallest of the arrays, if there is one: a call that takes it waits for it."""
  arrays = [
    x for x in values if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.number) and x.size
  ]
  return sorted(arrays, key=lambda x: math.prod(x.shape))[:1]


def _run_scan(bars: Sequence[Bar], params: dict[str, Any], *operands: Any) -> list[Any]:
  length, unroll = params["length"], params["unroll"]
  implementation = functools.partial(tracing.scan_impl, **params)
  begun = _Bars.begin(bars, [None] * len(bars), operands)
  trips = length // unroll if unroll else 0
  if trips > 1 or (trips == 1 and (unroll == 1 or length % unroll)):
    results = _run_implementation(begun, implementation, operands, unroll)
  else:  # a scan that is unrolled as a whole has no loop, and shows its end alone
    results = implementation(*operands)
  begun.end(np.int32(np.uint32(length & 0xFFFFFFFF)), results)
  return results


def _run_implementation(
  bars: _Bars, implementation: Rule, operands: Sequence[Any], unroll: int
) -> list[Any]:
  """What JAX writes for a scan, with its `while_loop`, the first one there, in chunks."""
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
        results = _run_chunks(bars, eqn.params, inputs, unit=unroll)[1]
      else:
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        results = results if eqn.primitive.multiple_results else [results]
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _run_while(params: dict[str, Any], *operands: Any) -> list[Any]:
  body = params["body_jaxpr"]
  marks = _marks(body)
  consts = operands[params["cond_nconsts"] :]
  totals = [
    _before_first_step(body, mark.invars[0], consts) if mark.params["bar"].has_total else None
    for mark in marks
  ]
  bars = _Bars.begin([mark.params["bar"] for mark in marks], totals, operands)
  params = {**params, "body_jaxpr": _without_marks(body)}
  steps, results = _run_chunks(bars, params, operands, unit=1)
  bars.end(steps, results)
  return results


def _before_first_step(body: Any, variable: Any, operands: Sequence[Any]) -> Any:
  """What a variable of a loop's body is in its first step; it depends on no effect."""
  pure = [eqn for eqn in body.jaxpr.eqns if not eqn.effects]
  jaxpr = body.jaxpr.replace(eqns=pure, outvars=[variable], effects=frozenset())
  jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used_outputs=True, instantiate=True)
  return jaxpr_as_fun(body.replace(jaxpr=jaxpr))(*operands)[0]


def _run_chunks(
  bars: _Bars, params: dict[str, Any], operands: Sequence[Any], unit: int
) -> tuple[Any, list[Any]]:
  """The loop of a `while_loop`'s parameters, in chunks: the steps it took, and its results."""
  cond, body, carry = _loop_functions(params, operands)

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
    return done, bars.update(done), carry

  state = (np.int32(0), np.int32(1), carry)
  done, _, results = jax.lax.while_loop(lambda s: cond(s[2]), chunk, state)
  return done, list(results)


def _loop_functions(
  params: dict[str, Any], operands: Sequence[Any]
) -> tuple[Rule, Rule, list[Any]]:
  """(condition, body, first carry). A batched loop runs until its last lane has ended."""
  first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  predicate = functools.partial(jaxpr_as_fun(params["cond_jaxpr"]), *operands[:first])
  one_step = functools.partial(jaxpr_as_fun(params["body_jaxpr"]), *operands[first:second])
  carry = list(operands[second:])
  if not params["cond_jaxpr"].out_avals[0].shape:
    return lambda c: predicate(*c)[0], lambda c: one_step(*c), carry

  def body(before: Sequence[Any]) -> list[Any]:
    (lanes,) = predicate(*before)
    return [
      jax.lax.select(jax.lax.broadcast_in_dim(lanes, new.shape, tuple(range(lanes.ndim))), new, old)
      for new, old in zip(one_step(*before), before, strict=True)
    ]

  return lambda c: jnp.any(predicate(*c)[0]), body, carry
