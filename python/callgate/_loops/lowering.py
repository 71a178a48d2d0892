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
from callgate._jax import loops, tracing, walk
from callgate._jax.tracing import Literal, jaxpr_as_fun
from callgate._loops import going as _going
from callgate._loops.going import Going
from callgate._loops.primitive import UNKNOWN, Bar, progress_call_p, progress_p

Rule = Callable[..., Any]


def lower(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  """The layer around JAX's lowering of `scan` and `while_loop`."""
  body, run = ("jaxpr", _run_scan) if "jaxpr" in params else ("body_jaxpr", _run_while)
  if not _marks(params[body]) and _going_of(params) is None:
    return original(context, *operands, **params)
  run = functools.partial(run, params)
  return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _going_of(params: dict[str, Any]) -> Going | None:
  """The flag that ends a loop, of a scan's or a `while_loop`'s parameters; see `going`."""
  if "jaxpr" in params:
    return _going.going_of(params["jaxpr"], *loops.scan_counts(params))
  if params["cond_jaxpr"].out_avals[0].shape:  # lanes end one by one
    return None
  consts = params["body_nconsts"]
  return _going.going_of(params["body_jaxpr"], consts, len(params["body_jaxpr"].in_avals) - consts)


def checkpoint_while(original: Rule, *given: Any) -> Any:
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


@dataclasses.dataclass(frozen=True)
class _Begun:
  """A bar, or a lane's each, that a loop has begun.

  Attributes:
    bar: as the loop knows it.
    handle: the board's number; a vector of lanes.
    limits: of a bar by value: where that began and where it ends, with the lanes' axes.
  """

  bar: Bar
  handle: Any
  limits: tuple[Any, Any] | None = None

  def counts(self, count: Any, lanes: Any) -> Any:
    """The operands of the board for a count, and for the lanes' own where they are known."""
    if not self.bar.lanes:
      return count
    if lanes is not None and lanes.shape == self.bar.lanes:
      return lanes.ravel()
    return jnp.broadcast_to(count, (self.bar.count,))

  def at(self, value: Any) -> Any:
    """The operands of the board for the value: where it is, NaN for a bar without."""
    if self.limits is None:
      return jnp.full(self.handle.shape, jnp.nan, np.float32)
    if self.bar.lanes or not value.ndim:
      return value.reshape(self.handle.shape)
    first, last = self.limits  # of many lanes: that which has the longest way to go
    share = jnp.nanmin((value - first) / jnp.where(last == first, 1.0, last - first))
    return _longest(first, last, first) + share * _longest(first, last, last - first)


def _longest(first: Any, last: Any, of: Any) -> Any:
  """The entry of the lane whose value goes the longest way."""
  return of.ravel()[jnp.argmax(jnp.abs(last - first).ravel())]


def _begin(bar: Bar, numbers: Sequence[Any], values: Sequence[Any]) -> _Begun:
  """Begins a bar, once `values` are there; `numbers` are those that the mark reads."""
  anchor = _anchor(values)
  if bar.by_value:
    last, first = (jnp.asarray(x, np.float32) for x in numbers)
    shown = [first, last]
    if not bar.lanes and first.ndim:
      shown = [_longest(first, last, x) for x in shown]
    shape = (bar.count,) if bar.lanes else ()
    shown = [x.reshape(shape) for x in shown]
    return _Begun(bar, _call("begin_at", bar, *shown, *anchor), (first, last))
  if not numbers:
    return _Begun(bar, _call("begin", bar, *anchor))
  total = jnp.asarray(numbers[0]).astype(np.int32)
  total = jnp.broadcast_to(total.ravel(), (bar.count,)) if bar.lanes else jnp.max(total)
  return _Begun(bar, _call("begin_of", bar, total, *anchor))


def _end(begun: _Begun, count: Any, lanes: Any, value: Any, values: Sequence[Any]) -> None:
  """Ends a bar, once `values` are there."""
  counts, at = begun.counts(count, lanes), begun.at(value)
  _call("end", begun.bar, begun.handle, counts, at, *_anchor(values))


def _call(kind: str, bar: Bar, *operands: Any) -> Any:
  return progress_call_p.bind(*operands, kind=kind, bar=bar)[0]


def _anchor(values: Sequence[Any]) -> Sequence[Any]:
  """The smallest of the arrays, if there is one: a call that takes it waits for it."""
  arrays = [x for x in values if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.number)]
  return sorted((x for x in arrays if x.size), key=lambda x: x.size)[:1]


def _run_scan(params: dict[str, Any], *operands: Any) -> list[Any]:
  length, unroll, jaxpr = params["length"], params["unroll"], params["jaxpr"]
  consts, carry = loops.scan_counts(params)
  marks, going = _marks(jaxpr), _going_of(params)
  # An exported program's length may be known when it runs alone.
  count = jnp.asarray(length) if (open_ := is_open(length)) else None
  known = UNKNOWN if open_ else length

  def number(mark: Any, index: int, carried: Sequence[Any]) -> Any:
    """The numbers that a bar by value reads of a carry; it reads nothing that is scanned over."""
    rest = [tracing.zeros_of(aval) for aval in jaxpr.in_avals[consts + carry :]]
    return _of_step(jaxpr, mark.invars[index], [*operands[:consts], *carried, *rest])

  def values(carried: Sequence[Any]) -> list[Any]:
    return [number(mark, 1, carried) if mark.params["bar"].by_value else None for mark in marks]

  def begin(mark: Any) -> _Begun:
    bar = mark.params["bar"]
    if bar.by_value:
      first = operands[consts : consts + carry]
      return _begin(bar, [number(mark, index, first) for index in (0, 1)], operands)
    total = known if bar.total == UNKNOWN else bar.total
    bar = dataclasses.replace(bar, total=total, has_total=False)
    return _begin(bar, [count] if bar.total == UNKNOWN else [], operands)

  begun = [begin(mark) for mark in marks]
  unmarked = {**params, "jaxpr": _going.without_marks(_without_marks(jaxpr))}
  implementation = functools.partial(loops.scan_impl, **unmarked)
  trips = length // unroll if unroll else 0
  if open_ or trips > 1 or (trips == 1 and (unroll == 1 or length % unroll)):
    # Its loop carries the number of rounds, then what the scan does.
    steps = None if going is None or going.count is None else 1 + going.count
    done, results = _run_implementation(
      _Bars(begun, lambda carried: values(carried[1 : 1 + carry]), unroll, steps),
      implementation, operands, functools.partial(_ending_scan, going, params, operands),
    )  # fmt: skip
  else:  # a scan that is unrolled as a whole has no loop, and shows its end alone
    done, results = None, implementation(*operands)
  if going is not None and going.count is not None:
    count = results[going.count] - operands[consts + going.count]
  elif count is None:
    count = np.int32(np.uint32(length & 0xFFFFFFFF))
  for one, at in zip(begun, values(results[:carry]), strict=True):
    _end(one, count.astype(np.int32), None, at, results if done is None else [done])
  return results


def _ending_scan(
  going: Going | None, scan: dict[str, Any], operands: Sequence[Any], params: Any, inputs: Any
) -> tuple[dict[str, Any], list[Any]]:
  if going is None:
    return params, inputs
  flags = None if going.carried else operands[sum(loops.scan_counts(scan)) + going.flag]
  return _going.ending(going, flags, scan["reverse"], scan["unroll"], params, inputs)


def _run_implementation(
  bars: _Bars, implementation: Rule, operands: Sequence[Any], ending_loop: Callable[..., Any]
) -> tuple[Any, list[Any]]:
  """Returns what JAX writes for a scan, with its `while_loop`, the first one there, in chunks.

  And how many steps the loop has done, which nobody knows before it ends; None without bars.
  `ending_loop` gives that loop's parameters and operands a better end.
  """
  closed: Any = jax.make_jaxpr(implementation)(*operands)
  loop, done = next(eqn for eqn in closed.eqns if eqn.primitive is jax.lax.while_p), None

  def rule(eqn: Any, inputs: list[Any]) -> list[Any]:
    nonlocal done
    if eqn is not loop:
      return walk.bind_equation(eqn, inputs)
    with eqn.ctx.manager:
      changed, inputs = ending_loop(eqn.params, inputs)
      if not bars.begun:
        return jax.lax.while_p.bind(*inputs, **changed)
      done, _, results = _run_chunks(bars, changed, inputs)
    return results

  results = walk.interpret(closed, operands, rule)
  return done, results


def _run_while(params: dict[str, Any], *operands: Any) -> list[Any]:
  body, inputs = params["body_jaxpr"], operands[params["cond_nconsts"] :]
  marks = _marks(body)
  begun: list[_Begun] = []
  for mark in marks:
    bar = mark.params["bar"]
    numbers = [_of_step(body, variable, inputs) for variable in mark.invars[: bar.numbers]]
    begun.append(_begin(bar, numbers, operands))

  def values(carried: Sequence[Any]) -> list[Any]:
    inputs = [*loops.split_operands(params, operands)[1], *carried]
    return [
      _of_step(body, mark.invars[1], inputs) if one.bar.by_value else None
      for one, mark in zip(begun, marks, strict=True)
    ]

  going = _going_of(params)
  params = {**params, "body_jaxpr": _going.without_marks(_without_marks(body))}
  if going is not None and going.carried:
    params, ended = _going.ending_while(going.flag, params, operands)
    operands = tuple(ended)
  if not begun:
    return jax.lax.while_p.bind(*operands, **params)
  steps_at = None if going is None else going.count
  steps, lanes, results = _run_chunks(_Bars(begun, values, steps=steps_at), params, operands)
  for one, at in zip(begun, values(results), strict=True):
    _end(one, steps, lanes, at, [steps])
  return results


def _of_step(body: Any, variable: Any, operands: Sequence[Any]) -> Any:
  """Returns what a variable of a loop's body is in a step; it depends on no effect."""
  if isinstance(variable, Literal):
    return jnp.asarray(variable.val)
  pure = [eqn for eqn in body.jaxpr.eqns if not eqn.effects]
  jaxpr = body.jaxpr.replace(eqns=pure, outvars=[variable], effects=frozenset())
  jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used_outputs=True, instantiate=True)
  return jaxpr_as_fun(body.replace(jaxpr=jaxpr))(*operands)[0]


@dataclasses.dataclass(frozen=True)
class _Bars:
  """The bars of a loop.

  Attributes:
    begun: they.
    values_of: what a carry says of bars by value, of each bar.
    unit: steps in one round of the loop.
    steps: the place in the carry of the number of steps that have run, where rounds don't tell.
  """

  begun: Sequence[_Begun]
  values_of: Callable[[Sequence[Any]], list[Any]]
  unit: int = 1
  steps: int | None = None


def _run_chunks(
  bars: _Bars, params: dict[str, Any], operands: Sequence[Any]
) -> tuple[Any, Any, list[Any]]:
  """The loop of a `while_loop`'s parameters, in chunks.

  Returns:
    The steps it took, those of each lane or None, and its results. A batched loop runs until its
    last lane has ended.
  """
  begun, unit = bars.begun, bars.unit
  cond_consts, body_consts, begin = loops.split_operands(params, operands)
  closed = params["cond_jaxpr"]
  predicate = functools.partial(jaxpr_as_fun(closed), *cond_consts)
  one_step = functools.partial(jaxpr_as_fun(params["body_jaxpr"]), *body_consts)
  batched: tuple[int, ...] = closed.out_avals[0].shape
  by_lane = batched != () and any(one.bar.lanes == batched for one in begun)

  def body(counted: Any, before: Sequence[Any]) -> tuple[Any, list[Any]]:
    if not batched:
      return counted, one_step(*before)
    lanes = tracing.unvaried(predicate(*before)[0])
    return counted + lanes if by_lane else counted, [
      jax.lax.select(jax.lax.broadcast_in_dim(lanes, new.shape, tuple(range(lanes.ndim))), new, old)
      for new, old in zip(one_step(*before), before, strict=True)
    ]

  def cond(carry: Sequence[Any]) -> Any:
    (lanes,) = predicate(*carry)
    return jnp.any(lanes) if lanes.shape else lanes

  def chunk(state: Any) -> Any:
    done, wanted, counted, carry = state
    if closed.effects:  # it must not be asked more often than the loop does
      steps, (counted, carry) = 1, body(counted, carry)
    else:
      trips = jnp.maximum(wanted // unit, 1)
      steps, counted, carry = jax.lax.while_loop(
        lambda s: (s[0] < trips) & cond(s[2]),
        lambda s: (s[0] + 1, *body(s[1], s[2])),
        (np.int32(0), counted, carry),
      )
    if bars.steps is None:
      done = done + steps * unit
    else:
      done = (carry[bars.steps] - begin[bars.steps]).astype(np.int32)
    going = predicate(*carry)[0].astype(np.int32) if by_lane and not closed.effects else None
    waits = [
      _update(one, done, counted, at, going)
      for one, at in zip(begun, bars.values_of(carry), strict=True)
    ]  # fmt: skip
    return done, functools.reduce(jnp.minimum, waits), counted, carry

  first = np.zeros(batched if by_lane else (), np.int32)
  state = (np.int32(0), np.int32(1), first, begin)
  done, _, counted, results = jax.lax.while_loop(lambda s: cond(s[3]), chunk, state)
  return done, counted if by_lane else None, list(results)


def _update(begun: _Begun, done: Any, counted: Any, at: Any, going: Any) -> Any:
  counts = begun.counts(done, counted)
  if begun.bar.lanes and going is not None and going.shape == begun.bar.lanes:
    going = going.ravel()
  else:
    going = jnp.ones(begun.handle.shape, np.int32)
  return _call("update", begun.bar, begun.handle, counts, begun.at(at), going)
