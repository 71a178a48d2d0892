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
from jax.extend.core import Literal, jaxpr_as_fun
from jax.interpreters import mlir, partial_eval

from callgate._core.effects import PROGRESS_EFFECT
from callgate._jax import tracing
from callgate._loops.primitive import UNKNOWN, Bar, progress_call_p, progress_p

Rule = Callable[..., Any]


def start() -> None:
  """Puts the rules around JAX's own; called once by `import callgate`."""
  scan_p, while_p = jax.lax.scan_p, jax.lax.while_p
  mlir.register_lowering(scan_p, _scan_rule(tracing.lowering_rule(scan_p)))
  mlir.register_lowering(while_p, _while_rule(tracing.lowering_rule(while_p)))
  rules = partial_eval.partial_eval_jaxpr_custom_rules
  rules[while_p] = _remat_rule(rules[while_p])


def _scan_rule(original: Rule) -> Rule:
  def rule(context: Any, *operands: Any, **params: Any) -> Any:
    marks = _marks(params["jaxpr"])
    if not marks:
      return original(context, *operands, **params)
    bars = [_with_total(mark.params["bar"], params["length"]) for mark in marks]
    params = {**params, "jaxpr": _without_marks(params["jaxpr"])}
    run = functools.partial(_run_scan, bars, params)
    return mlir.lower_fun(run, multiple_results=True)(context, *operands)

  return rule


def _while_rule(original: Rule) -> Rule:
  def rule(context: Any, *operands: Any, **params: Any) -> Any:
    if not _marks(params["body_jaxpr"]):
      return original(context, *operands, **params)
    run = functools.partial(_run_while, params)
    return mlir.lower_fun(run, multiple_results=True)(context, *operands)

  return rule


def _remat_rule(original: Rule) -> Rule:
  """Under `jax.checkpoint` a while loop runs again in the backward pass: without a bar."""

  def rule(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    known, staged, *rest = original(saveable, unknown, instantiated, eqn)
    if known is not None and staged is not None and _marks(staged.params["body_jaxpr"]):
      body = _without_marks(staged.params["body_jaxpr"])
      effects = staged.effects if PROGRESS_EFFECT in body.effects else _others(staged.effects)
      staged = staged.replace(params={**staged.params, "body_jaxpr": body}, effects=effects)
    return (known, staged, *rest)

  return rule


# -- marks ---------------------------------------------------------------------------------------
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


def _with_total(bar: Bar, total: int) -> Bar:
  known = bar.total if bar.total != UNKNOWN else total
  return dataclasses.replace(bar, total=known, has_total=False)


# -- loops ---------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Feed:
  """The bars of one loop, begun."""

  bars: Sequence[Bar]
  handles: Sequence[Any]

  @classmethod
  def begin(cls, bars: Sequence[Bar], totals: Sequence[Any], values: Sequence[Any]) -> _Feed:
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
  closed: Any = jax.make_jaxpr(implementation)(*operands)
  feed = _Feed.begin(bars, [None] * len(bars), operands)

  def run_loop(eqn: Any, values: Sequence[Any]) -> list[Any]:
    return _run_chunks(feed, eqn.params, values, unit=unroll)[1]

  # A scan that is unrolled as a whole has no loop, and shows its end alone.
  trips = length // unroll if unroll else 0
  index = -1
  if trips > 1 or (trips == 1 and (unroll == 1 or length % unroll)):
    index = _first_while(closed)
  results = _evaluate(closed, operands, index, run_loop)
  feed.end(np.int32(np.uint32(length & 0xFFFFFFFF)), results)
  return results


def _run_while(params: dict[str, Any], *operands: Any) -> list[Any]:
  body = params["body_jaxpr"]
  marks = _marks(body)
  consts = operands[params["cond_nconsts"] :]
  totals = [
    _before_first_step(body, mark.invars[0], consts) if mark.params["bar"].has_total else None
    for mark in marks
  ]
  feed = _Feed.begin([mark.params["bar"] for mark in marks], totals, operands)
  params = {**params, "body_jaxpr": _without_marks(body)}
  steps, results = _run_chunks(feed, params, operands, unit=1)
  feed.end(steps, results)
  return results


def _before_first_step(body: Any, variable: Any, values: Sequence[Any]) -> Any:
  """What a variable of a loop's body is in its first step."""
  if isinstance(variable, Literal):
    return variable.val
  (result,) = _evaluate(body, values, -1, None, [variable])
  return result


def _run_chunks(
  feed: _Feed, params: dict[str, Any], operands: Sequence[Any], unit: int
) -> tuple[Any, list[Any]]:
  """The loop of a `while_loop`'s parameters, in chunks: the steps it took, and its results."""
  cond, body, carry = _loop_functions(params, operands)
  if params["cond_jaxpr"].effects:
    return _run_steps(feed, cond, body, carry)

  def chunk(state: Any) -> Any:
    done, wanted, carry = state
    trips = jnp.maximum(wanted // unit, 1)
    steps, carry = jax.lax.while_loop(
      lambda s: (s[0] < trips) & cond(s[1]),
      lambda s: (s[0] + 1, body(s[1])),
      (np.int32(0), carry),
    )
    done = done + steps * unit
    return done, feed.update(done), carry

  state = (np.int32(0), np.int32(1), carry)
  done, _, results = jax.lax.while_loop(lambda s: cond(s[2]), chunk, state)
  return done, list(results)


def _run_steps(feed: _Feed, cond: Rule, body: Rule, carry: Sequence[Any]) -> tuple[Any, list[Any]]:
  """A condition with effects must not be asked more often than the loop does: a call a step."""

  def step(state: Any) -> Any:
    done, _, carry = state
    carry = body(carry)
    return done + 1, feed.update(done + 1), carry

  state = (np.int32(0), np.int32(0), carry)
  done, _, results = jax.lax.while_loop(lambda s: cond(s[2]), step, state)
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


# -- programs ------------------------------------------------------------------------------------
def _first_while(closed: Any) -> int:
  eqns = closed.jaxpr.eqns
  return next((i for i, eqn in enumerate(eqns) if eqn.primitive is jax.lax.while_p), -1)


def _evaluate(
  closed: Any,
  operands: Sequence[Any],
  index: int,
  replacement: Callable[[Any, Sequence[Any]], Sequence[Any]] | None,
  wanted: Sequence[Any] | None = None,
) -> list[Any]:
  """Runs a program, with `replacement` for its equation number `index`.

  Args:
    closed: the ClosedJaxpr.
    operands: its arguments.
    index: of the equation that is replaced; -1 for none.
    replacement: gives the equation's results.
    wanted: the variables to return, in place of the program's results.

  Returns:
    The program's results; for `wanted`, without running what they don't depend on.
  """
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))
  needed = None if wanted is None else _dependencies(jaxpr, wanted)

  def read(variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else values[variable]

  for number, eqn in enumerate(jaxpr.eqns):
    if needed is not None and number not in needed:
      continue
    inputs = [read(v) for v in eqn.invars]
    with eqn.ctx.manager:
      if number == index and replacement is not None:
        results = replacement(eqn, inputs)
      else:
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*inputs, **params)
        results = results if eqn.primitive.multiple_results else [results]
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in (jaxpr.outvars if wanted is None else wanted)]


def _dependencies(jaxpr: Any, wanted: Sequence[Any]) -> set[int]:
  """The numbers of the equations that `wanted` depends on."""
  live = set(wanted)
  numbers: set[int] = set()
  for number in reversed(range(len(jaxpr.eqns))):
    eqn = jaxpr.eqns[number]
    if live.intersection(eqn.outvars):
      numbers.add(number)
      live.update(v for v in eqn.invars if not isinstance(v, Literal))
  return numbers
