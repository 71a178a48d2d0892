# SPDX-License-Identifier: Apache-2.0
"""Lowers loops with marks: of progress bars, and of flags that end a loop (`marks.py`).

In XLA's CPU code a step may take nanoseconds, and a call in the body takes a hundred times as long.
So a loop with bars, `while cond: body`, becomes

    while cond:
      while cond and steps < chunk: body
      chunk = update(...)

with the same results. The board chooses `chunk` so that updates come every few milliseconds. A scan
is first lowered by JAX's own implementation to a `while_loop` on whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from callgate._core.encoding import is_open
from callgate._jax import loops, tracing, walk
from callgate._jax.tracing import jaxpr_as_fun
from callgate._loops import marks
from callgate._loops.marks import Going, Unmarked
from callgate._loops.primitive import UNKNOWN, Bar, Begun, begin

Rule = Callable[..., Any]
_Values = Sequence[Any]


def lower(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  """Wraps JAX's lowering of `scan` and `while_loop`."""
  name, loop_of = ("jaxpr", _of_scan) if "jaxpr" in params else ("body_jaxpr", _of_while)
  if not marks.are_in(params[name]):
    return original(context, *operands, **params)
  body = marks.taken_out(params[name])

  def run(*operands: Any) -> _Values:
    return _run(loop_of(body, {**params, name: body.closed}, operands))

  return mlir.lower_fun(run, multiple_results=True)(context, *operands)


# -- a common form of both kinds of loops ----------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _MarkedLoop:
  """A loop whose body has marks.

  Attributes:
    body: the body without its marks.
    consts, first: the body's inputs in the first step, except the scanned arrays' slices.
    operands: all operands of the loop.
    lowered, inner: JAX's lowering of the loop, and the `while_loop` in it, which carries `before`
      further values before the loop's own; None for a completely unrolled loop.
    going: the place of the flag that ends the loop.
    unit: the number of steps in one iteration of the `while_loop`.
    length: the number of steps, if it is known before the loop runs.
    rounds: the first iteration that has an effect and the one after the last, if the flag is
      scanned over.
  """

  body: Unmarked
  consts: _Values
  first: _Values
  operands: _Values
  lowered: Any
  inner: Any
  going: Going | None
  unit: int = 1
  before: int = 0
  length: Any = None
  rounds: tuple[Any, Any] | None = None

  def begin(self) -> list[Begun]:
    """Begins the bars."""
    return list(map(self._begin, self.body.bars, self.numbers(self.first)))

  def _begin(self, bar: Bar, numbers: _Values) -> Begun:
    if self.length is not None and bar.total == UNKNOWN and not bar.by_value:
      # An exported program may know its length only when it runs.
      is_known = not is_open(self.length)
      bar = dataclasses.replace(bar, total=self.length if is_known else UNKNOWN, has_total=False)
      numbers = [] if is_known else [self.length]
    return begin(bar, numbers, self.operands)

  def numbers(self, carry: _Values) -> list[_Values]:
    """Returns the numbers that each bar reads in the step that begins with this carry."""
    if not self.body.numbers.out_avals:
      return [[] for _ in self.body.bars]
    inputs = [*self.consts, *carry[: len(self.first)]]
    # The scanned arrays' slices.
    rest = map(tracing.zeros_of, self.body.closed.in_avals[len(inputs) :])
    read = map(jnp.asarray, jaxpr_as_fun(self.body.numbers)(*inputs, *rest))
    return [list(itertools.islice(read, bar.numbers)) for bar in self.body.bars]

  def counted(self, carry: _Values) -> Any:
    """Returns the number of steps that have run, if the carry has it."""
    if self.going is None or (place := self.going.count) is None:
      return None
    return (carry[place] - self.first[place]).astype(np.int32)

  def goes_on(self, carry: _Values) -> Any:
    """False if the flag in this carry has ended the `while_loop`."""
    if self.rounds is not None:
      return carry[0] < self.rounds[1].astype(carry[0].dtype)
    return loops.any_lane(carry[self.before + self.going.flag]) if self.going is not None else True


def _of_scan(body: Unmarked, params: dict[str, Any], operands: _Values) -> _MarkedLoop:
  length, unroll = params["length"], params["unroll"]
  consts, first, xs = loops.split_scan(params, operands)
  lowered: Any = jax.make_jaxpr(functools.partial(loops.scan_impl, **params))(*operands)
  trips = length // unroll if unroll else 0
  has_loop = is_open(length) or trips > 1 or (trips == 1 and (unroll == 1 or length % unroll))
  loop = next(it for it in lowered.eqns if it.primitive is jax.lax.while_p) if has_loop else None
  going, rounds = body.going(len(consts), len(first)), None
  if going is not None and going.carried and jnp.ndim(first[going.flag]) and unroll != 1:
    # The residuals of a step that only some lanes skip aren't zeros, and an iteration of the
    # backward loop may contain steps of two forward iterations.
    going = None
  if going is not None and not going.carried and not is_open(length) and length == 0:
    going = None  # no step has a flag
  if going is not None and not going.carried:
    flags = tracing.unvaried(xs[going.flag])
    flags = jnp.any(flags, tuple(range(1, flags.ndim)))
    begins, ends = _range_of(flags, params["reverse"])
    rounds = begins // unroll, (ends + unroll - 1) // unroll
  return _MarkedLoop(
    body, consts, first, operands, lowered, loop, going,
    unit=unroll, before=1, length=length, rounds=rounds,
  )  # fmt: skip


def _of_while(body: Unmarked, params: dict[str, Any], operands: _Values) -> _MarkedLoop:
  _, consts, first = loops.split_operands(params, operands)
  lowered: Any = jax.make_jaxpr(functools.partial(jax.lax.while_p.bind, **params))(*operands)
  is_batched = params["cond_jaxpr"].out_avals[0].shape  # lanes end at different times
  going = None if is_batched else body.going(len(consts), len(first))
  return _MarkedLoop(body, consts, first, operands, lowered, lowered.eqns[0], going)


def _range_of(flags: Any, reverse: bool) -> tuple[Any, Any]:
  """Returns the first step with a true flag, and the step after the last one, in the loop's order.

  The flags change at most once, so a bisection finds the change.
  """
  length = flags.shape[0]

  def flag(step: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(flags, length - 1 - step if reverse else step, 0, False)

  def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
    same, other = bounds
    middle = same + (other - same) // 2
    is_same = flag(middle) == begins
    return jnp.where(is_same, middle, same), jnp.where(is_same, other, middle)

  begins, end = flag(np.int32(0)), jnp.asarray(length, np.int32)
  _, change = jax.lax.fori_loop(0, 32, halve, (jnp.zeros_like(end), end))
  return jnp.where(begins, 0, change), jnp.where(begins, change, end)


# -- running a loop --------------------------------------------------------------------------------
def _run(loop: _MarkedLoop) -> _Values:
  """Runs a loop, which ends early, and in chunks if it has bars; returns its results."""
  begun = loop.begin()
  done: Any = None  # the steps that the `while_loop` makes; unknown before its end
  lanes: Any = None

  def rule(eqn: Any, inputs: list[Any]) -> _Values:
    nonlocal done, lanes
    if eqn is not loop.inner:
      return walk.bind_equation(eqn, inputs)
    with eqn.ctx.manager:
      done, lanes, results = _run_while(loop, begun, eqn.params, inputs)
    return results

  results = walk.interpret(loop.lowered, loop.operands, rule)
  steps = loop.counted(results)
  if steps is None:
    steps = done if loop.length is None else _count(loop.length)
  for one, numbers in zip(begun, loop.numbers(results), strict=True):
    one.end(steps, lanes, numbers, results if done is None else [done])
  return results


def _count(length: Any) -> Any:
  """Returns a length as programs count steps: its lowest 32 bits."""
  is_known = not is_open(length)
  return np.int32(np.uint32(length & 0xFFFFFFFF)) if is_known else jnp.asarray(length, np.int32)


def _run_while(
  loop: _MarkedLoop, begun: Sequence[Begun], params: dict[str, Any], operands: _Values
) -> tuple[Any, Any, list[Any]]:
  """Runs the loop's `while_loop`, of these parameters and operands, in chunks if it has bars.

  Returns:
    The number of steps, the numbers of the lanes or None, and the results. A batched loop runs
    until its last lane has ended.
  """
  cond_consts, body_consts, first = loops.split_operands(params, operands)
  closed = params["cond_jaxpr"]
  predicate = functools.partial(jaxpr_as_fun(closed), *cond_consts)
  stepping = params["body_jaxpr"]
  types = stepping.in_avals[len(body_consts) :]
  batched: tuple[int, ...] = closed.out_avals[0].shape
  by_lane = batched != () and any(one.bar.lanes == batched for one in begun)
  if loop.rounds is not None:
    first[0] = loop.rounds[0].astype(first[0].dtype)

  def one_step(*before: Any) -> list[Any]:
    # With masks of lanes, results may vary over devices of a `shard_map` over which the carry
    # doesn't vary. JAX doesn't check this for a loop that is being lowered.
    results = jaxpr_as_fun(stepping)(*body_consts, *before)
    return [tracing.vary_as(aval, x) for aval, x in zip(types, results, strict=True)]

  def body(counted: Any, before: _Values) -> tuple[Any, list[Any]]:
    if not batched:
      return counted, one_step(*before)
    lanes = tracing.unvaried(predicate(*before)[0])
    return counted + lanes if by_lane else counted, loops.chosen(lanes, one_step(*before), before)

  def cond(carry: _Values) -> Any:
    return loops.any_lane(predicate(*carry)[0]) & loop.goes_on(carry)

  def chunk(state: Any) -> Any:
    done, wanted, counted, carry = state
    if closed.effects:  # it must be evaluated exactly as often as in the loop
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
    pairs = zip(begun, loop.numbers(own), strict=True)
    waits = [one.update(done, counted, numbers, going) for one, numbers in pairs]
    return done, functools.reduce(jnp.minimum, waits), counted, carry

  if not begun:
    return None, None, list(jax.lax.while_loop(cond, lambda carry: body(0, carry)[1], first))
  zeros = np.zeros(batched if by_lane else (), np.int32)
  state = (np.int32(0), np.int32(1), zeros, first)
  done, _, counted, results = jax.lax.while_loop(lambda s: cond(s[3]), chunk, state)
  return done, counted if by_lane else None, list(results)
