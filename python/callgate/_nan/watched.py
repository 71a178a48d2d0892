# SPDX-License-Identifier: Apache-2.0
"""A program that watches itself: each equation's results are looked at for the first NaN or Inf.

The program's equations are evaluated one by one, in loops, branches and inner jits too, with a
`State` beside their values: what was found first. Nothing leaves the program before its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, refs, sources, tracing, walk
from callgate._nan import lanes

Values = Sequence[Any]
NONE, NAN, INF = 0, 1, 2


class State(NamedTuple):
  """The first finding.

  Attributes:
    kind: NONE, NAN or INF.
    number: of the equation in `Watch.equations`.
    result: which of its results.
    place: the flat index of the first such element.
    steps: of the loops around it, outermost first; -1 where there are fewer.
    lanes: likewise, of loops whose steps are lanes.
    operands: least and greatest number of each operand; NaN for those that are no numbers.
    shard: the number of the device's part in a `jax.shard_map`; -1 outside of one.
  """

  kind: Any
  number: Any
  result: Any
  place: Any
  steps: Any
  lanes: Any
  operands: Any
  shard: Any


class Equation(NamedTuple):
  """Describes an equation before the program runs."""

  primitive: str
  callee: str | None  # "gate 'score'", of a call of callgate's
  source: str
  loops: int  # around it
  lane_counts: tuple[int, ...]  # of the loops around it whose steps are lanes
  lanes: tuple[lanes.Axes, ...]  # of each result, the axes of vmap's
  operands: tuple[Any, ...]  # abstract values
  results: tuple[Any, ...]
  around: tuple[int, ...]  # the numbers of the first equations of the loops around it


@dataclasses.dataclass(frozen=True)
class EqnPlace:
  """Where an equation stands, and the indices of the loops around it."""

  path: tuple[int, ...] = ()  # ids of the equations around it
  loops: tuple[Any, ...] = ()
  lanes: tuple[Any, ...] = ()  # indices of loops whose steps are lanes
  lane_counts: tuple[int, ...] = ()
  around: tuple[int, ...] = ()  # the numbers of their first equations
  source: str = ""  # of the innermost equation around it that has one

  def inside(self, eqn: Any) -> EqnPlace:
    source = sources.source_of(eqn) or self.source
    return dataclasses.replace(self, path=(*self.path, id(eqn)), source=source)


class Watch:
  """Evaluates a closed jaxpr and looks at what its equations give."""

  def __init__(self, closed: Any) -> None:
    self.closed = closed
    self.equations: list[Equation] = []
    self._numbers: dict[tuple[int, ...], int] = {}  # by path: bodies may be traced again
    self._loops: dict[tuple[int, ...], int] = {}  # likewise, of loops' first equations
    self._axes: dict[int, dict[Any, lanes.Axes]] = {}  # of jaxprs' variables, by the jaxpr's id
    depth, self._operands = _extents(closed)
    self._depth = max(depth, 1)  # XLA of JAX 0.11 crashes where arrays without elements are split

  def run(self, *args: Any) -> State:
    """Runs the program and returns its finding; for `jax.jit`."""
    nothing = jnp.int32(NONE)
    steps = jnp.full(self._depth, -1, np.int32)
    ranges = jnp.zeros((self._operands, 2))
    state = State(nothing, nothing, nothing, nothing, steps, steps, ranges, jnp.int32(-1))
    return self._jaxpr(self.closed, args, state, EqnPlace())[1]

  def _jaxpr(
    self, jaxpr: Any, args: Values, state: State, place: EqnPlace
  ) -> tuple[list[Any], State]:
    if id(jaxpr) not in self._axes:
      self._axes[id(jaxpr)] = lanes.axes_of(jaxpr)
    axes = self._axes[id(jaxpr)]

    def evaluate(eqn: Any, ins: Values) -> Values:
      nonlocal state
      if eqn.primitive is lanes.lanes_p:
        return ins
      rule = self._rule(eqn)
      if rule is None:
        outs, state = self._leaf(eqn, ins, state, place, axes)
      else:
        outs, state = rule(eqn, ins, state, place)
      return outs

    return walk.interpret(jaxpr, args, evaluate), state

  def _rule(self, eqn: Any) -> Callable[..., tuple[Values, State]] | None:
    control = {
      "cond": self._cond, "scan": self._scan, "while": self._while, "shard_map": self._shard_map,
    }  # fmt: skip
    return control.get(eqn.primitive.name, None if loops.called(eqn) is None else self._call)

  # -- equations -----------------------------------------------------------------------------------
  def _leaf(
    self, eqn: Any, ins: Values, state: State, place: EqnPlace, axes: Mapping[Any, lanes.Axes]
  ) -> tuple[Sequence[Any], State]:
    outs = walk.bind_equation(eqn, ins)
    # A Ref holds what other equations have made.
    has_ref = any(refs.is_ref(jax.typeof(x)) for x in (*ins, *outs))
    watched = [] if has_ref else [i for i, out in enumerate(outs) if _is_real(out)]
    if not watched:
      return outs, state
    number = self._number(eqn, place, axes)
    ins = [x if hasattr(x, "size") else jnp.asarray(x) for x in ins]  # JAX's literals
    reals = [x for x in ins if _is_real(x)]
    had_nan = _any(jnp.isnan(_wide(x)) for x in reals)
    had_any = had_nan | _any(jnp.isinf(_wide(x)) for x in reals)
    for index in watched:
      out = _wide(outs[index])
      nan, inf = jnp.isnan(out), jnp.isinf(out)
      made_nan, made_inf = nan.any() & ~had_nan, inf.any() & ~had_any
      kind = jnp.where(made_nan, NAN, jnp.where(made_inf, INF, NONE)).astype(np.int32)

      def found(kind: Any = kind, index: int = index, nan: Any = nan, inf: Any = inf) -> State:
        where = jnp.argmax(jnp.where(kind == NAN, nan, inf).reshape(-1)).astype(np.int32)
        steps, numbers = (self._padded(these) for these in (place.loops, place.lanes))
        ranges = [_range(x) for x in ins[: self._operands]]
        ranges += [jnp.zeros(2)] * (self._operands - len(ranges))
        made = State(
          kind, jnp.int32(number), jnp.int32(index), where, steps, numbers, jnp.stack(ranges),
          state.shard,
        )  # fmt: skip
        return jax.tree.map(_alike, made, state)

      first = (state.kind == NONE) & (kind != NONE)
      state = jax.lax.cond(first, found, lambda state=state: state)
    return outs, state

  def _padded(self, indices: Sequence[Any]) -> Any:
    numbers = [jnp.asarray(index, np.int32) for index in indices]
    return jnp.stack([*numbers, *[jnp.int32(-1)] * (self._depth - len(numbers))])

  def _number(self, eqn: Any, place: EqnPlace, axes: Mapping[Any, lanes.Axes]) -> int:
    path = (*place.path, id(eqn))
    if path not in self._numbers:
      self._numbers[path] = len(self.equations)
      self.equations.append(
        Equation(
          eqn.primitive.name,
          getattr(getattr(eqn.params.get("call"), "gate", None), "label", None),
          sources.source_of(eqn) or place.source,
          len(place.loops),
          place.lane_counts,
          tuple(axes.get(atom, ()) for atom in eqn.outvars),
          tuple(atom.aval for atom in eqn.invars),
          tuple(atom.aval for atom in eqn.outvars),
          place.around,
        )
      )
    return self._numbers[path]

  def _loop(self, eqn: Any, place: EqnPlace, step: Any) -> EqnPlace:
    """The place of what runs in a step of a loop."""
    inside = place.inside(eqn)
    number = self._loops.setdefault(inside.path, len(self.equations))
    loops, around = (*place.loops, step), (*place.around, number)
    return dataclasses.replace(inside, loops=loops, around=around)

  def _order(self, state: State) -> Any:
    """Numbers that order what devices found, the first ones first, as the program runs."""
    table = np.full((max(len(self.equations), 1), self._depth + 1), -1, np.int32)
    for number, equation in enumerate(self.equations):
      numbers = (*equation.around, number)
      table[number, : len(numbers)] = numbers
    steps = jnp.append(state.steps, -1)
    return jnp.stack([jnp.asarray(table)[state.number], steps], axis=1).reshape(-1)

  # -- equations that hold others ------------------------------------------------------------------
  def _call(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    return self._jaxpr(loops.called(eqn), ins, state, place.inside(eqn))

  def _cond(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    index, *operands = ins

    def branch(number: int) -> Callable[..., Any]:
      inside = place.inside(eqn)
      inside = dataclasses.replace(inside, path=(*inside.path, number))
      closed = eqn.params["branches"][number]
      return lambda state: self._jaxpr(closed, operands, state, inside)

    branches = [branch(number) for number in range(len(eqn.params["branches"]))]
    return jax.lax.switch(index, branches, state)

  def _scan(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    if lanes.has_step_for_each(eqn):
      return self._lanes(eqn, ins, state, place)
    params = eqn.params
    consts, carry, xs = loops.split_scan(params, ins)
    count = len(carry)

    def body(carried: Any, x: Any) -> Any:
      state, values = carried
      number, slices = x
      inside = self._loop(eqn, place, number)
      outs, state = self._jaxpr(params["jaxpr"], (*consts, *values, *slices), state, inside)
      return (state, outs[:count]), outs[count:]

    numbers = jnp.arange(params["length"], dtype=np.int32)
    if params["reverse"]:
      numbers = numbers[::-1]
    (state, carry), ys = jax.lax.scan(
      body, (state, carry), (numbers, xs), params["length"], params["reverse"]
    )
    return [*carry, *ys], state

  def _lanes(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    """Each lane is looked at by itself; of what they find the program's first counts."""
    params = eqn.params
    consts, carry, xs = loops.split_scan(params, ins)
    count = len(carry)
    inside = place.inside(eqn)
    counts = (*place.lane_counts, params["length"])

    def body(carry: Any, x: Any) -> Any:
      number, slices = x
      lane = dataclasses.replace(inside, lanes=(*place.lanes, number), lane_counts=counts)
      outs, found = self._jaxpr(params["jaxpr"], (*consts, *carry, *slices), state, lane)
      return outs[:count], (found, self._order(found), outs[count:])

    numbers = jnp.arange(params["length"], dtype=np.int32)
    carry, (states, orders, ys) = jax.lax.scan(
      body, carry, (numbers, xs), params["length"], params["reverse"]
    )
    return [*carry, *ys], _first(states, orders) if params["length"] else state

  def _while(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    params = eqn.params
    asked, held, values = loops.split_operands(params, ins)

    def ask(number: Any, state: State, values: Values) -> tuple[Any, State]:
      inside = self._loop(eqn, place, number)
      inside = dataclasses.replace(inside, path=(*inside.path, 0))
      (go,), state = self._jaxpr(params["cond_jaxpr"], (*asked, *values), state, inside)
      return go, state

    def body(carried: Any) -> Any:
      number, go, state, values = carried
      inside = self._loop(eqn, place, number)
      outs, state = self._jaxpr(params["body_jaxpr"], (*held, *values), state, inside)
      if go.ndim:  # under vmap: lanes that have ended keep what they have
        outs = loops.chosen(go, outs, values)
      return number + 1, *ask(number + 1, state, outs), outs

    carried = jnp.int32(0), *ask(jnp.int32(0), state, values), values
    _, _, state, values = jax.lax.while_loop(
      lambda carried: loops.any_lane(carried[1]), body, carried
    )
    return values, state

  def _shard_map(
    self, eqn: Any, ins: Values, state: State, place: EqnPlace
  ) -> tuple[Values, State]:
    """Each device looks by itself; of what they find the first in the program's order counts."""
    params = eqn.params
    names = tuple(name for name in params["mesh"].axis_names if name in params["newly_manual_axes"])

    def body(state: State, *args: Any) -> Any:
      before = state.kind
      state = jax.tree.map(lambda x: tracing.vary_over(tracing.manual_axes() & {*names}, x), state)
      outs, state = self._jaxpr(params["jaxpr"], args, state, place.inside(eqn))
      here = jnp.where((before == NONE) & (state.kind != NONE), jax.lax.axis_index(names), -1)
      state = state._replace(shard=jnp.maximum(state.shard, here.astype(np.int32)))
      return jax.tree.map(lambda x: x[None], (state, self._order(state))), outs

    mapped = jax.shard_map(
      body, mesh=params["mesh"], in_specs=(jax.P(), *params["in_specs"]),
      out_specs=(jax.P(names), list(params["out_specs"])), axis_names={*names},
      check_vma=params["check_vma"],
    )  # fmt: skip
    (states, orders), outs = mapped(state, *ins)
    return outs, _first(states, orders)


def _first(states: State, orders: Any) -> State:
  """The state that the program comes to first, of states with a leading axis."""
  alive = states.kind != NONE
  for level in range(orders.shape[1]):
    order = orders[:, level]
    alive &= order == jnp.where(alive, order, np.iinfo(np.int32).max).min()
  first = jnp.arange(alive.size) == jnp.argmax(alive)

  def of_first(x: Any) -> Any:  # which the type of a value that lies explicitly lets be summed
    chosen = first.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(chosen, x, 0).sum(0, dtype=x.dtype)

  return jax.tree.map(of_first, states)


def _extents(jaxpr: Any) -> tuple[int, int]:
  """The most loops within each other, and the most operands of an equation, at most 8."""
  paths = list(walk.paths(jaxpr))
  depths = [sum(eqn.primitive.name in ("scan", "while") for eqn in path) for path in paths]
  return max(depths, default=0), max([1, *(min(len(path[-1].invars), 8) for path in paths)])


def _alike(new: Any, old: Any) -> Any:
  """A value of a state, in a `jax.shard_map` over the axes that the one before it varies over."""
  return tracing.vary_over(tracing.varying_axes([old]), new)


def _is_real(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0


def _wide(x: Any) -> Any:
  """The array in a dtype that all of NumPy's functions take."""
  return x.astype(np.float32) if jnp.finfo(x.dtype).bits < 16 else x


def _any(flags: Any) -> Any:
  found = jnp.bool_(False)
  for flag in flags:
    found = found | flag.any()
  return found


def _range(x: Any) -> Any:
  if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_) or x.size == 0:
    return jnp.full(2, jnp.nan)
  x = jnp.abs(x) if jnp.issubdtype(x.dtype, np.complexfloating) else x
  return jnp.stack([x.min(), x.max()]).astype(jnp.result_type(float))
