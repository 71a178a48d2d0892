# SPDX-License-Identifier: Apache-2.0
"""Lowers loops with marks: of progress bars, and of flags that end a loop (`going.py`).

In XLA's CPU code a step may take nanoseconds; any call in the body makes it a hundred times as
long. So a loop with bars, `while cond: body`, becomes

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
from callgate._loops.board import Begun, begin
from callgate._loops.going import Going
from callgate._loops.primitive import UNKNOWN, progress_p

Rule = Callable[..., Any]
_Values = Sequence[Any]


def lower(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  """The layer around JAX's lowering of `scan` and `while_loop`."""
  body, loop_of = ("jaxpr", _of_scan) if "jaxpr" in params else ("body_jaxpr", _of_while)
  going = _going_of(params)
  if not _marks(params[body]) and going is None:
    return original(context, *operands, **params)
  unmarked = {**params, body: _unmarked(params[body])}

  def run(*operands: Any) -> _Values:
    return _run(loop_of(params[body], going, unmarked, operands))

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
    body = _unmarked(staged.params["body_jaxpr"])
    left = (it for it in staged.effects if it != PROGRESS_EFFECT or it in body.effects)
    effects = type(staged.effects)(left)
    staged = staged.replace(params={**staged.params, "body_jaxpr": body}, effects=effects)
  return (known, staged, *rest)


def _marks(closed: Any) -> list[Any]:
  """The marks of bars at the top of a loop's body."""
  if PROGRESS_EFFECT not in closed.effects:
    return []
  return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is progress_p]


def _unmarked(closed: Any) -> Any:
  """A loop's body without the marks that this module finds in it."""

  def rule(eqn: Any, inputs: _Values) -> _Values:
    if eqn.primitive is progress_p:
      return []
    return _going.evaluate(eqn, inputs)

  def body(*inputs: Any) -> _Values:
    return walk.interpret(closed, inputs, rule)

  return jax.make_jaxpr(body)(*closed.in_avals)


# -- the two kinds of loops, as one ----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _MarkedLoop:
  """A loop whose body has marks.

  Attributes:
    body: with its marks.
    consts, first: what the body gets in the first step, but for what is scanned over.
    operands: all of the loop's.
    lowered, inner: what JAX makes of the loop without marks, and the `while_loop` in that, which
      carries something else `before` what the loop does; None for one that is unrolled as a whole.
    unit: steps in one round of the `while_loop`.
    length: the number of steps, where it is known before the loop runs.
    going, flags, reverse: where the flag is that ends the loop, and all its values if it is scanned
      over, which may go backwards.
  """

  body: Any
  consts: _Values
  first: _Values
  operands: _Values
  lowered: Any
  inner: Any
  going: Going | None
  unit: int = 1
  before: int = 0
  length: Any = None
  flags: Any = None
  reverse: bool = False

  def begin(self, mark: Any) -> Begun:
    bar = mark.params["bar"]
    numbers = [self.read(mark, place, self.first) for place in range(bar.numbers)]
    if self.length is not None and bar.total == UNKNOWN and not bar.by_value:
      # An exported program's length may be known when it runs alone.
      is_known = not is_open(self.length)
      bar = dataclasses.replace(bar, total=self.length if is_known else UNKNOWN, has_total=False)
      numbers = [] if is_known else [self.length]
    return begin(bar, numbers, self.operands)

  def read(self, mark: Any, place: int, carry: _Values) -> Any:
    """An operand of a mark in the step that a carry begins; it depends on no effect."""
    variable = mark.invars[place]
    if isinstance(variable, Literal):
      return jnp.asarray(variable.val)
    pure = [eqn for eqn in self.body.jaxpr.eqns if not eqn.effects]
    jaxpr = self.body.jaxpr.replace(eqns=pure, outvars=[variable], effects=frozenset())
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used_outputs=True, instantiate=True)
    inputs = [*self.consts, *carry]
    rest = map(tracing.zeros_of, self.body.in_avals[len(inputs) :])  # what is scanned over
    return jaxpr_as_fun(self.body.replace(jaxpr=jaxpr))(*inputs, *rest)[0]

  def values(self, carry: _Values) -> list[Any]:
    """Where the value of each bar is with a carry; None for a bar of steps."""
    carry = carry[: len(self.first)]
    return [
      self.read(mark, 1, carry) if mark.params["bar"].by_value else None
      for mark in _marks(self.body)
    ]

  def counted(self, carry: _Values) -> Any:
    """The number of steps that have run, if the carry says that."""
    if self.going is None or (place := self.going.count) is None:
      return None
    return (carry[place] - self.first[place]).astype(np.int32)


def _of_scan(
  body: Any, going: Going | None, unmarked: dict[str, Any], operands: _Values
) -> _MarkedLoop:
  length, unroll = unmarked["length"], unmarked["unroll"]
  consts, first, xs = loops.split_scan(unmarked, operands)
  lowered: Any = jax.make_jaxpr(functools.partial(loops.scan_impl, **unmarked))(*operands)
  trips = length // unroll if unroll else 0
  has_loop = is_open(length) or trips > 1 or (trips == 1 and (unroll == 1 or length % unroll))
  loop = next(it for it in lowered.eqns if it.primitive is jax.lax.while_p) if has_loop else None
  flags = None if going is None or going.carried else xs[going.flag]
  return _MarkedLoop(
    body, consts, first, operands, lowered, loop, going,
    unit=unroll, before=1, length=length, flags=flags, reverse=unmarked["reverse"],
  )  # fmt: skip


def _of_while(
  body: Any, going: Going | None, unmarked: dict[str, Any], operands: _Values
) -> _MarkedLoop:
  _, consts, first = loops.split_operands(unmarked, operands)
  lowered: Any = jax.make_jaxpr(functools.partial(jax.lax.while_p.bind, **unmarked))(*operands)
  return _MarkedLoop(body, consts, first, operands, lowered, lowered.eqns[0], going)


# -- a loop as it runs -----------------------------------------------------------------------------
def _run(loop: _MarkedLoop) -> _Values:
  """The results of a loop, which ends early, and in chunks if it has bars."""
  begun = list(map(loop.begin, _marks(loop.body)))
  done: Any = None  # as many steps as the `while_loop` makes, which nobody knows before its end
  lanes: Any = None

  def rule(eqn: Any, inputs: list[Any]) -> _Values:
    nonlocal done, lanes
    if eqn is not loop.inner:
      return walk.bind_equation(eqn, inputs)
    with eqn.ctx.manager:
      params, inputs = _ending(loop, eqn.params, inputs)
      if not begun:
        return jax.lax.while_p.bind(*inputs, **params)
      done, lanes, results = _run_chunks(loop, begun, params, inputs)
    return results

  results = walk.interpret(loop.lowered, loop.operands, rule)
  steps = loop.counted(results)
  if steps is None:
    steps = done if loop.length is None else _count(loop.length)
  for one, at in zip(begun, loop.values(results), strict=True):
    one.end(steps, lanes, at, results if done is None else [done])
  return results


def _count(length: Any) -> Any:
  """A length as programs count steps: its lowest 32 bits."""
  is_known = not is_open(length)
  return np.int32(np.uint32(length & 0xFFFFFFFF)) if is_known else jnp.asarray(length, np.int32)


def _ending(
  loop: _MarkedLoop, params: dict[str, Any], inputs: _Values
) -> tuple[dict[str, Any], list[Any]]:
  """The parameters and operands of the `while_loop`, which ends with the loop's flag."""
  if loop.going is None:
    return params, list(inputs)
  if loop.going.carried:
    return _going.ending(loop.before + loop.going.flag, params, inputs)
  return _going.in_range(loop.flags, loop.reverse, loop.unit, params, inputs)


def _run_chunks(
  loop: _MarkedLoop, begun: Sequence[Begun], params: dict[str, Any], operands: _Values
) -> tuple[Any, Any, list[Any]]:
  """The loop's `while_loop`, of these parameters and operands, in chunks.

  Returns:
    The steps it took, those of each lane or None, and its results. A batched loop runs until its
    last lane has ended.
  """
  cond_consts, body_consts, first = loops.split_operands(params, operands)
  closed = params["cond_jaxpr"]
  predicate = functools.partial(jaxpr_as_fun(closed), *cond_consts)
  one_step = functools.partial(jaxpr_as_fun(params["body_jaxpr"]), *body_consts)
  batched: tuple[int, ...] = closed.out_avals[0].shape
  by_lane = batched != () and any(one.bar.lanes == batched for one in begun)

  def body(counted: Any, before: _Values) -> tuple[Any, list[Any]]:
    if not batched:
      return counted, one_step(*before)
    lanes = tracing.unvaried(predicate(*before)[0])
    return counted + lanes if by_lane else counted, loops.chosen(lanes, one_step(*before), before)

  def cond(carry: _Values) -> Any:
    return loops.any_lane(predicate(*carry)[0])

  def chunk(state: Any) -> Any:
    done, wanted, counted, carry = state
    if closed.effects:  # it must not be asked more often than the loop does
      rounds, (counted, carry) = 1, body(counted, carry)
    else:
      trips = jnp.maximum(wanted // loop.unit, 1)
      rounds, counted, carry = jax.lax.while_loop(
        lambda s: (s[0] < trips) & cond(s[2]),
        lambda s: (s[0] + 1, *body(s[1], s[2])),
        (np.int32(0), counted, carry),
      )
    own = carry[loop.before :]
    steps = loop.counted(own)
    done = done + rounds * loop.unit if steps is None else steps
    going = predicate(*carry)[0].astype(np.int32) if by_lane and not closed.effects else None
    pairs = zip(begun, loop.values(own), strict=True)
    waits = [one.update(done, counted, at, going) for one, at in pairs]
    return done, functools.reduce(jnp.minimum, waits), counted, carry

  zeros = np.zeros(batched if by_lane else (), np.int32)
  state = (np.int32(0), np.int32(1), zeros, first)
  done, _, counted, results = jax.lax.while_loop(lambda s: cond(s[3]), chunk, state)
  return done, counted if by_lane else None, list(results)
