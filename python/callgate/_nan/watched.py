# SPDX-License-Identifier: Apache-2.0
"""Runs a program that checks the results of each of its equations for the first NaN or infinity.

The program's equations are evaluated one by one, also in loops, branches and inner jits. A `State`
beside the values holds each equation's first finding. It leaves the program only at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, refs, sources, tracing, walk
from callgate._nan import constants, findings, lanes, reach
from callgate._nan.findings import INF, NAN, NONE, EqnPlace, Equation, Rows, State
from callgate._nan.reach import Followed

Values = Sequence[Any]
_OPERANDS, _RESULTS = -1, -2  # in the numbers of constants; other numbers there are not negative


class Watch:
  """Evaluates a closed jaxpr and checks the results of its equations."""

  def __init__(self, closed: Any, reaching: bool, source: str = "") -> None:
    self.closed, self._source = closed, source
    self.equations: list[Equation] = []
    self._reaching = reaching
    self._numbers: dict[tuple[int, ...], int] = {}  # by path: bodies may be traced again
    self._loops: dict[tuple[int, ...], int] = {}  # the same for loops' first equations
    self._axes: dict[int, dict[Any, lanes.Axes]] = {}  # axes of variables, by the jaxpr's id
    self._rows, depth, self._operands = findings.extents(closed)
    self._rows += constants.most(closed) if reaching else 0
    self._depth = max(depth, 1)  # XLA of JAX 0.11 crashes where arrays without elements are split

  def run(self, *args: Any) -> tuple[Rows, Any]:
    """Runs the program; for `jax.jit`.

    Returns:
      The findings. If values are followed, also a flag for each equation and argument: True if its
      NaN or infinity reaches a result.
    """
    rows = findings.no_rows(self._rows, self._depth, self._operands)
    if not self._reaching:
      return self._block(self.closed, args, State(rows, None, {}), EqnPlace())[1].rows, None
    every = jnp.arange(self._rows + len(args))
    values = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in args]  # numbers: disable_jit
    given = [Followed(x, reach.of_nan(every == self._rows + i, x)) for i, x in enumerate(values)]
    no_origins = jnp.zeros_like(every, bool)
    outs, state = self._block(self.closed, given, State(rows, no_origins, {}), EqnPlace())
    return state.rows, reach.union([no_origins, *reach.origins_of(outs)])

  def _block(
    self, jaxpr: Any, args: Values, state: State, place: EqnPlace
  ) -> tuple[list[Any], State]:
    """Evaluates a program, a branch or a loop's body."""
    outs, state = self._jaxpr(jaxpr, args, state, place)
    outs, state = self._constants(outs, state, place, _RESULTS)
    return outs, state.settled()

  def _jaxpr(
    self, jaxpr: Any, args: Values, state: State, place: EqnPlace
  ) -> tuple[list[Any], State]:
    if id(jaxpr) not in self._axes:
      self._axes[id(jaxpr)] = lanes.axes_of(jaxpr)
    axes = self._axes[id(jaxpr)]

    def evaluate(eqn: Any, ins: Values) -> Values:
      nonlocal state
      if eqn.primitive in lanes.MARKS:
        return ins
      rule = self._rule(eqn)
      if rule is None:
        outs, state = self._leaf(eqn, ins, state, place, axes)
      else:
        if (first := constants.first_followed(eqn)) is not None:
          carried, state = self._constants(ins[first:], state, place.inside(eqn), _OPERANDS)
          ins = [*ins[:first], *carried]
        new = {} if rule == self._call else state.new
        outs, state = rule(eqn, ins, state._replace(new={}) if new else state, place)
        state = state._replace(new={**new, **state.new})
      return outs

    return walk.interpret(jaxpr, args, evaluate), state

  def _rule(self, eqn: Any) -> Callable[..., tuple[Values, State]] | None:
    control = {
      "cond": self._cond, "scan": self._scan, "while": self._while, "shard_map": self._shard_map,
    }  # fmt: skip
    return control.get(eqn.primitive.name, None if loops.runs(eqn) is None else self._call)

  # -- constants -----------------------------------------------------------------------------------
  def _constants(
    self, values: Values, state: State, place: EqnPlace, kind: int
  ) -> tuple[list[Any], State]:
    """Follows constants with a NaN that no operation takes, and gives each a row.

    Such constants are operands of loops that steps change, values of Refs, and results. All other
    constants go unchanged to the operations that take them, also into loops and branches.
    """
    found = list(values)
    for index, x in enumerate(values if self._reaching else ()):
      if not constants.has_nan(x):
        continue
      out = jnp.asarray(x)
      key = *place.path, kind, index
      number = self._numbers.setdefault(key, len(self.equations))
      if number == len(self.equations):
        source = place.source or self._source
        self.equations.append(constants.described(number, jax.typeof(out), source, place))
      row = self._row(state.rows, number, place, [], [out], {0: jnp.int32(NAN)})
      state = state._replace(new={**state.new, number: row})
      found[index] = Followed(x, jnp.arange(state.in_refs.size) == number)
    return found, state

  # -- equations -----------------------------------------------------------------------------------
  def _leaf(
    self, eqn: Any, followed: Values, state: State, place: EqnPlace,
    axes: Mapping[Any, lanes.Axes],
  ) -> tuple[Sequence[Any], State]:  # fmt: skip
    ins, origins = _split(followed, state)
    outs = walk.bind_equation(eqn, ins)
    if any(
      refs.is_ref(jax.typeof(x)) for x in (*ins, *outs)
    ):  # a Ref holds other equations' values
      followed, state = self._constants(followed, state, place.inside(eqn), _OPERANDS)
      origins = _split(followed, state)[1]
      state = state._replace(in_refs=reach.union([state.in_refs, *origins]))
      return reach.follow(outs, [state.in_refs] * len(outs)), state
    watched = [i for i, out in enumerate(outs) if reach.is_real(out)]
    if not watched:
      return reach.follow(outs, [None] * len(outs)), state
    number = self._number(eqn, place, axes)
    ins = [x if hasattr(x, "size") else jnp.asarray(x) for x in ins]  # JAX's literals
    # Where values are followed, the first operation on a constant with a NaN makes it.
    constant = [self._reaching and not isinstance(x, Followed) for x in followed]
    kinds = self._kinds(eqn, ins, constant, [outs[i] for i in watched])
    row = self._row(state.rows, number, place, ins, outs, dict(zip(watched, kinds, strict=True)))
    state = state._replace(new={**state.new, number: row})
    if not self._reaching:
      return outs, state
    passed = reach.operands_origins(eqn, ins, origins)
    passed = reach.union([jnp.zeros_like(state.in_refs), reach.on_any_device(eqn, passed)])
    own = jnp.arange(passed.size) == number
    found = [passed] * len(outs)
    for index, kind in zip(watched, kinds, strict=True):
      found[index] = passed | (own & (kind != NONE))
    return reach.follow(outs, found), state

  def _kinds(self, eqn: Any, ins: Values, constant: Sequence[bool], outs: Values) -> list[Any]:
    """Returns the kind of finding in each result of an equation: NONE, NAN or INF."""
    reals = [
      (reach.wide(x), is_own) for x, is_own in zip(ins, constant, strict=True) if reach.is_real(x)
    ]
    had_nan = reach.on_any_device(eqn, _any(jnp.isnan(x) for x, is_own in reals if not is_own))
    had_any = had_nan | reach.on_any_device(eqn, _any(~jnp.isfinite(x) for x, _ in reals))
    kinds: list[Any] = []
    for out in map(reach.wide, outs):
      made_nan = jnp.isnan(out).any() & ~had_nan
      made_inf = jnp.isinf(out).any() & ~had_any
      kinds.append(jnp.where(made_nan, NAN, jnp.where(made_inf, INF, NONE)).astype(np.int32))
    return kinds

  def _row(
    self, rows: Rows, number: int, place: EqnPlace, ins: Values, outs: Values,
    kinds: Mapping[int, Any],
  ) -> Rows:  # fmt: skip
    """Returns the row of an equation: a new row for a finding that the old one lacks."""
    steps, lane = self._padded(place.loops), self._padded(place.lanes)
    old = Rows(*(table[number] for table in rows))
    keeps: Any = False
    if place.loops or place.lanes:  # else the equation runs once
      keeps = old.kind != NONE
      if self._reaching:
        keeps &= place.used[number]
      if place.lanes:  # lanes run one after another, whatever their steps
        keeps &= ~_is_before(steps, old.steps)
    row = old
    for index, kind in kinds.items():

      def found(kind: Any = kind, index: int = index) -> Rows:
        out = reach.wide(outs[index])
        flags = jnp.where(kind == NAN, jnp.isnan(out), jnp.isinf(out))
        if tracing.are_explicit([flags]):  # JAX can't flatten a value with an explicit sharding
          mesh: Any = jax.typeof(flags).sharding.mesh
          flags = jax.sharding.reshard(flags, jax.sharding.NamedSharding(mesh, jax.P()))
        where = jnp.argmax(flags.reshape(-1)).astype(np.int32)
        ranges = [_range(x) for x in ins[: self._operands]]
        ranges += [jnp.zeros(2)] * (self._operands - len(ranges))
        shard = jnp.int32(place.shard)
        numbers = jnp.stack([kind, jnp.int32(index), where, shard, *steps, *lane])
        return jax.tree.map(_alike, Rows(numbers, jnp.stack(ranges)), old)

      first = (kind != NONE) & ~jnp.bool_(keeps)
      row = jax.lax.cond(first, found, lambda row=row: row)
      keeps |= first
    return row

  def _padded(self, indices: Sequence[Any]) -> list[Any]:
    numbers = [jnp.asarray(index, np.int32) for index in indices]
    return [*numbers, *[jnp.int32(-1)] * (self._depth - len(numbers))]

  def _number(self, eqn: Any, place: EqnPlace, axes: Mapping[Any, lanes.Axes]) -> int:
    path = (*place.path, id(eqn))
    if path not in self._numbers:
      self._numbers[path] = len(self.equations)
      self.equations.append(
        Equation(
          len(self.equations),
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

  def _lane(self, eqn: Any, place: EqnPlace, number: Any) -> EqnPlace:
    """Returns the place of a lane's equations."""
    counts = (*place.lane_counts, eqn.params["length"])
    return dataclasses.replace(place.inside(eqn), lanes=(*place.lanes, number), lane_counts=counts)

  def _loop(self, eqn: Any, place: EqnPlace, step: Any) -> EqnPlace:
    """Returns the place of the equations in a step of a loop."""
    inside = place.inside(eqn)
    number = self._loops.setdefault(inside.path, len(self.equations))
    loops, around = (*place.loops, step), (*place.around, number)
    return dataclasses.replace(inside, loops=loops, around=around)

  # -- equations that hold others ------------------------------------------------------------------
  def _call(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    jaxpr, operands = cast("tuple[Any, list[int]]", loops.runs(eqn))
    return self._jaxpr(jaxpr, [ins[i] for i in operands], state, place.inside(eqn))

  def _cond(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:

    def branch(number: int) -> Callable[..., Any]:
      inside = place.inside(eqn)
      inside = dataclasses.replace(inside, path=(*inside.path, number))
      closed = eqn.params["branches"][number]

      def run(state: State) -> Any:
        outs, state = self._block(closed, ins[1:], state, inside)
        return *_split(outs, state), state

      return run

    branches = [branch(number) for number in range(len(eqn.params["branches"]))]
    outs, found, state = jax.lax.switch(reach.values_of(ins)[0], branches, state)
    return reach.follow(outs, found), state

  def _scan(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    """Evaluates a loop, also a loop over lanes."""
    params = eqn.params
    of_lanes = lanes.has_step_for_each(eqn)
    values, origins = _split(ins, state)
    consts = loops.split_scan(params, ins)[0]
    _, carry, xs = loops.split_scan(params, values)
    _, of_carry, of_xs = loops.split_scan(params, origins)
    count = len(carry)

    def body(carried: Any, x: Any) -> Any:
      state, values, of_values, of_ys = carried
      number, slices = x
      inside = (self._lane if of_lanes else self._loop)(eqn, place, number)
      inside = inside.after(state, (*of_values, *of_ys))
      args = *consts, *reach.follow((*values, *slices), (*of_values, *of_xs))
      outs, state = self._block(params["jaxpr"], args, state, inside)
      outs, found = _split(outs, state)
      of_ys = [reach.union(pair) for pair in zip(of_ys, found[count:], strict=True)]
      return (state, outs[:count], found[:count], of_ys), outs[count:]

    numbers = jnp.arange(params["length"], dtype=np.int32)
    if params["reverse"] and not of_lanes:
      numbers = numbers[::-1]
    none = state.in_refs if state.in_refs is None else jnp.zeros_like(state.in_refs)
    carried = state, carry, of_carry, [none] * (len(eqn.outvars) - count)
    (state, carry, of_carry, of_ys), ys = jax.lax.scan(
      body, carried, (numbers, xs), params["length"], params["reverse"]
    )
    return reach.follow([*carry, *ys], [*of_carry, *of_ys]), state

  def _while(self, eqn: Any, ins: Values, state: State, place: EqnPlace) -> tuple[Values, State]:
    params = eqn.params
    values, origins = _split(ins, state)
    asked, held, _ = loops.split_operands(params, ins)
    carry = loops.split_operands(params, values)[2]
    of_carry = loops.split_operands(params, origins)[2]

    def ask(number: Any, state: State, values: Values, of_values: Values) -> tuple[Any, State]:
      inside = self._loop(eqn, place, number).after(state, of_values)
      inside = dataclasses.replace(inside, path=(*inside.path, 0))
      args = *asked, *reach.follow(values, of_values)
      outs, state = self._block(params["cond_jaxpr"], args, state, inside)
      return reach.values_of(outs)[0], state

    def body(carried: Any) -> Any:
      number, go, state, values, of_values = carried
      inside = self._loop(eqn, place, number).after(state, of_values)
      args = *held, *reach.follow(values, of_values)
      outs, state = self._block(params["body_jaxpr"], args, state, inside)
      outs, found = _split(outs, state)
      if go.ndim:  # under vmap: lanes that have ended keep their values
        found = [reach.union(pair) for pair in zip(found, of_values, strict=True)]
        outs = loops.chosen(go, outs, values)
        _, found = _split(reach.follow(outs, found), state)
      return number + 1, *ask(number + 1, state, outs, found), outs, found

    carried = jnp.int32(0), *ask(jnp.int32(0), state, carry, of_carry), carry, of_carry
    _, _, state, carry, of_carry = jax.lax.while_loop(
      lambda carried: loops.any_lane(carried[1]), body, carried
    )
    return reach.follow(carry, of_carry), state

  def _shard_map(
    self, eqn: Any, ins: Values, state: State, place: EqnPlace
  ) -> tuple[Values, State]:
    """Checks values on each device; the first finding in program order counts."""
    params = eqn.params
    names = tuple(name for name in params["mesh"].axis_names if name in params["newly_manual_axes"])
    values, origins = _split(ins, state)

    def body(state: State, origins: Any, *args: Any) -> Any:
      axes = tracing.manual_axes() & {*names}
      state, origins = jax.tree.map(lambda x: tracing.vary_over(axes, x), (state, origins))
      shard = jnp.maximum(place.shard, jax.lax.axis_index(names).astype(np.int32))
      inside = dataclasses.replace(place.inside(eqn), shard=shard)
      outs, state = self._block(params["jaxpr"], reach.follow(args, origins), state, inside)
      outs, found = _split(outs, state)
      return jax.tree.map(lambda x: x[None], (state, found)), outs

    mapped = jax.shard_map(
      body, mesh=params["mesh"], in_specs=(jax.P(), jax.P(), *params["in_specs"]),
      out_specs=(jax.P(names), list(params["out_specs"])), axis_names={*names},
      check_vma=params["check_vma"],
    )  # fmt: skip
    (state, found), outs = mapped(state, origins, *values)
    rows = findings.first_of(state.rows, reach.union([state.in_refs, *found]))
    in_refs, found = jax.tree.map(lambda x: x.sum(0, dtype=np.int32) > 0, (state.in_refs, found))
    return [Followed(*pair) for pair in zip(outs, found, strict=True)], State(rows, in_refs, {})


def _split(followed: Values, state: State) -> tuple[list[Any], list[Any]]:
  """Returns the values, and the origins of each, or None if values are not followed."""
  none = None if state.in_refs is None else jnp.zeros_like(state.in_refs)
  origins = [none if has is None else has for has in reach.origins_of(followed)]
  return reach.values_of(followed), origins


def _is_before(steps: Any, others: Any) -> Any:
  """Returns True if one step of nested loops comes before another."""
  before, equal = jnp.bool_(False), jnp.bool_(True)
  for step, other in zip(steps, others, strict=True):
    before |= equal & (step < other)
    equal &= step == other
  return before


def _alike(new: Any, old: Any) -> Any:
  """Casts a state's new value to the varying axes of the old one, in a `jax.shard_map`."""
  return tracing.vary_over(tracing.varying_axes([old]), new)


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
