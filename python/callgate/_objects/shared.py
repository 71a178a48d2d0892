# SPDX-License-Identifier: Apache-2.0
"""Finds the objects that all steps of a loop share, and runs the loop with them.

A call that makes an object (`Traits.shares_object`) can run before the loop if no step changes its
arguments. The arguments are the loop's constants, or the body computes them from these without
effects. The same holds for a call in an inner `scan`, as long as no step of the outer loop changes
the arguments. Calls in branches, and in inner loops that may not run, stay as they are. So do calls
on which no result of the loop depends: the object's end waits for the loop's results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate._call.site import BoundCall
from callgate._core.encoding import is_open
from callgate._jax import loops, tracing, walk


@dataclasses.dataclass
class Plan:
  """The part of a body that runs before the loop, by the indices of its equations.

  Attributes:
    calls: the calls whose objects are made there.
    values: the equations that compute the calls' arguments.
    inner: the loops with such calls.
  """

  calls: set[int] = dataclasses.field(default_factory=set[int])
  values: set[int] = dataclasses.field(default_factory=set[int])
  inner: dict[int, Plan] = dataclasses.field(default_factory=dict[int, "Plan"])


# The results before the loop, by index: a call's object, an equation's results, or, for an inner
# loop, such results again.
Made = dict[int, Any]


def may_share(jaxpr: Any) -> bool:
  """True if a call in it may share an object."""
  return any(map(_shares, walk.equations(jaxpr, _run_always)))


def _shares(eqn: Any) -> bool:
  call = _call_of(eqn)
  return call is not None and call.gate.traits.shares_object


def _call_of(eqn: Any) -> Any:
  """Returns the `BoundCall` that an equation consists of, with or without its rule of derivatives.

  None for another equation.
  """
  if eqn.primitive.name == "custom_jvp_call":
    inner = eqn.params["call_jaxpr"].jaxpr
    only = inner.eqns[0] if len(inner.eqns) == 1 else None
    if only is None or (only.invars, only.outvars) != (inner.invars, inner.outvars):
      return None
    eqn = only
  call = eqn.params.get("call")
  return call if isinstance(call, BoundCall) else None


def _run_always(eqn: Any) -> list[Any]:
  return [eqn.params["jaxpr"]] if _is_loop(eqn) else _called(eqn)


def _is_loop(eqn: Any) -> bool:
  """True for a `scan` that has a step."""
  return eqn.primitive is jax.lax.scan_p and not is_open(n := eqn.params["length"]) and n > 0


def _called(eqn: Any) -> list[Any]:
  return [] if (inner := loops.called(eqn)) is None else [inner]


def jitted(eqn: Any) -> list[Any]:
  """Returns the jaxpr of a jitted function, which has no rule of derivatives."""
  return _called(eqn) if eqn.primitive.name in ("jit", "pjit") else []


def inlined(body: Any, called: Callable[[Any], list[Any]] = _called) -> Any:
  """Returns a loop's body, with the functions inlined that contain the calls of `may_share`.

  `called(eqn)` returns the jaxpr of such a function.
  """

  def rule(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    for inner in filter(may_share, called(eqn)):
      return walk.interpret(inner, inputs, rule)
    if _is_loop(eqn) and may_share(eqn.params["jaxpr"]):
      inner = inlined(eqn.params["jaxpr"], called)
      if not inner.consts:  # which a loop's body has as operands
        eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
    return walk.bind_equation(eqn, inputs)

  return jax.make_jaxpr(lambda *operands: walk.interpret(body, operands, rule))(*body.in_avals)


# -- before the loop -------------------------------------------------------------------------------
def plan_of(params: dict[str, Any]) -> Plan | None:
  """Returns the plan of a loop with these parameters; None if no object can be made before it."""
  if "body_jaxpr" in params:
    body, consts = params["body_jaxpr"], params["body_nconsts"]
    # The first condition, which decides if there is a step, is then evaluated twice.
    if params["cond_jaxpr"].effects:
      return None
    return plan_of_body(body, consts, len(body.in_avals) - consts)
  length, body = params["length"], params["jaxpr"]
  if is_open(length) or length < 2:
    return None
  return plan_of_body(body, *loops.scan_counts(params)[:2])


def plan_of_body(body: Any, consts: int, carry: int, *, outlives: bool = False) -> Plan | None:
  """Returns the plan of a loop's body; `outlives`: the objects don't end with the loop."""
  constant = [i < consts for i in range(len(body.in_avals))]
  return _plan(body, constant, consts, carry, outlives)


def _plan(
  body: Any, constant: Sequence[bool], consts: int, carry: int, outlives: bool
) -> Plan | None:
  known = {var for var, flag in zip(body.jaxpr.invars, constant, strict=True) if flag}
  known.update(body.jaxpr.constvars)
  plan, needed, computed = Plan(), set[Any](), list[tuple[int, Any]]()

  def is_known(atom: Any) -> bool:
    return isinstance(atom, tracing.Literal) or atom in known

  def need(atoms: Sequence[Any]) -> None:
    needed.update(atom for atom in atoms if not isinstance(atom, tracing.Literal))

  def lasts(eqn: Any) -> bool:
    return outlives or _is_in_results(eqn, body, consts, carry)

  for place, eqn in enumerate(body.eqns):
    if _shares(eqn):
      known_leaves = all(map(is_known, leaves := _leaves(eqn, eqn.invars)[0]))
      if known_leaves and _can_share(eqn) and lasts(eqn):
        plan.calls.add(place)
        need(leaves)
    elif (
      _is_loop(eqn) and (inner := _inner_plan(eqn, is_known, outlives)) is not None and lasts(eqn)
    ):
      plan.inner[place] = inner
      need(list(filter(is_known, loops.split_scan(eqn.params, eqn.invars)[0])))
    elif not eqn.effects and all(map(is_known, eqn.invars)):
      known.update(eqn.outvars)
      computed.append((place, eqn))
  for place, eqn in reversed(computed):
    if not needed.isdisjoint(eqn.outvars):
      plan.values.add(place)
      need(eqn.invars)
  return plan if plan.calls or plan.inner else None


def _inner_plan(eqn: Any, is_known: Callable[[Any], bool], outlives: bool) -> Plan | None:
  consts, *rest = loops.split_scan(eqn.params, eqn.invars)
  others = [False] * sum(map(len, rest))
  constant = [*map(is_known, consts), *others]
  return _plan(eqn.params["jaxpr"], constant, len(consts), len(rest[0]), outlives)


def _is_in_results(eqn: Any, body: Any, consts: int, carry: int) -> bool:
  """True if a result of the loop that has elements depends on the equation, in any step."""
  depend = set(eqn.outvars)
  while True:
    for later in body.eqns:
      if any(not isinstance(atom, tracing.Literal) and atom in depend for atom in later.invars):
        depend.update(later.outvars)
    results = [
      not isinstance(atom, tracing.Literal) and atom in depend for atom in body.jaxpr.outvars
    ]
    carried = {body.jaxpr.invars[consts + i] for i in range(carry) if results[i]}
    if carried <= depend:
      break
    depend |= carried
  sizes = [aval.shape for aval in body.out_avals]
  return any(found and 0 not in shape for found, shape in zip(results, sizes, strict=True))


def _leaves(eqn: Any, of: Sequence[Any]) -> tuple[list[Any], Any]:
  """Returns the items of `of` for the call's first argument, which makes its object; their tree."""
  tree = _call_of(eqn).site.in_tree
  (first, *_), _ = jax.tree.unflatten(tree, of[: tree.num_leaves])  # the number of the lane follows
  return jax.tree.flatten(first)


def _can_share(eqn: Any) -> bool:
  """True for calls that `made` can repeat: with lanes, calls that only make an object."""
  call = _call_of(eqn)
  if call.site.by_jax or call.numbered or call.whole is not None:
    return False
  sizes = [size for size, _ in call.levels]
  return not sizes or (bool(call.gate.traits.handles) and not any(map(is_open, sizes)))


def make_shared(
  plan: Plan, body: Any, consts: Sequence[Any], make: Callable[[Any, Sequence[Any]], Any]
) -> Made:
  """Runs a plan with the loop's constants; `make(function, values)` makes one object."""
  found: Made = {}
  places = itertools.count()

  def rule(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    place = next(places)
    if place in plan.calls:
      found[place] = make(*_making(eqn, inputs))
    elif (inner := plan.inner.get(place)) is not None:
      found[place] = make_shared(
        inner, eqn.params["jaxpr"], loops.split_scan(eqn.params, inputs)[0], make
      )
    elif place in plan.values:
      found[place] = walk.bind_equation(eqn, inputs)
      return found[place]
    return [None] * len(eqn.outvars)  # of a step

  rest = [None] * (len(body.in_avals) - len(consts))
  walk.interpret(body, [*consts, *rest], rule)
  return found


def _making(eqn: Any, inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
  """Returns a function that makes the call's objects, one for each lane, and its arguments."""
  call = _call_of(eqn)
  values, tree = _leaves(eqn, inputs)
  make = call.gate if call.gate.traits.handles else call.gate.make

  def one(*values: Any) -> Any:
    return make(jax.tree.unflatten(tree, values))

  for size, mask in reversed(call.levels):
    axes = [0 if flag else None for flag in mask[: len(values)]]
    one = jax.vmap(one, axes, axis_size=size)
  return one, values


# -- the loop --------------------------------------------------------------------------------------
def run(plan: Plan, found: Made, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
  """Runs a loop with the results of the part before it."""
  if "body_jaxpr" in params:
    return _run_while(plan, found, params, operands)
  consts, first, xs = loops.split_scan(params, operands)

  def step(carry: Any, x: Any) -> Any:
    results = run_body(plan, found, params["jaxpr"], (*consts, *carry, *x))
    return results[: len(first)], results[len(first) :]

  options = {name: params[name] for name in ("length", "reverse")}
  last, ys = jax.lax.scan(step, first, xs, **options, unroll=params["unroll"] or 1)
  return [*last, *ys]


def _run_while(
  plan: Plan, found: Made, params: dict[str, Any], operands: Sequence[Any]
) -> list[Any]:
  asked, consts, first = loops.split_operands(params, operands)
  values, tree = jax.tree.flatten(found)
  count = len(values)

  def step(*inputs: Any) -> list[Any]:
    found = jax.tree.unflatten(tree, inputs[:count])
    return run_body(plan, found, params["body_jaxpr"], inputs[count:])

  body = jax.make_jaxpr(step)(*values, *params["body_jaxpr"].in_avals)
  # Not `jax.lax.while_loop`: lanes may end at different times.
  changed = {**params, "body_nconsts": count + len(consts), "body_jaxpr": body}
  return list(jax.lax.while_p.bind(*asked, *values, *consts, *first, **changed))


def run_body(plan: Plan, found: Made, body: Any, inputs: Sequence[Any]) -> list[Any]:
  """Runs a step."""
  places = itertools.count()

  def rule(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    if (place := next(places)) not in found:
      return walk.bind_equation(eqn, inputs)
    if place in plan.values:
      return found[place]
    with eqn.ctx.manager:
      if (inner := plan.inner.get(place)) is not None:
        return run(inner, found[place], eqn.params, inputs)
      return _with_object(eqn, inputs, found[place])

  return walk.interpret(body, inputs, rule)


def _with_object(eqn: Any, inputs: Sequence[Any], handle: Any) -> Sequence[Any]:
  """Returns the call's results with the shared object."""
  call = _call_of(eqn)
  if call.gate.traits.handles:
    return jax.tree.leaves(handle)
  args, kwargs = jax.tree.unflatten(call.site.in_tree, inputs)
  use = functools.partial(call.gate.with_object, handle)
  return jax.tree.leaves(call.gate.call_rule(use, (), args, kwargs, call.site.static))
