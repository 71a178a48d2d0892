# SPDX-License-Identifier: Apache-2.0
"""Makes the steps of loops free the objects that they have made and no longer refer to.

A loop `while cond: body` whose body makes objects is lowered to

    scope = enter(the scope of the loop around it)
    while cond:
      body, whose makers of objects get the scope
      scope = sweep(scope, the carry, the step's results)
    done = leave(scope)

A handle leaves a step only in its carry and its results. So nothing refers to an object of the step
that the sweep finds in no such array. The outer loop, or the program, frees objects that the loop
returns. The sweep takes the results of uses as operands, so that the uses are complete, and the
results of inner loops' `leave`, so that it runs after them. A use without results, or whose results
have no elements, returns an additional mark. The next step makes objects in the scope that the
sweep returns, so a device that is ahead waits for the sweep.

If no step changes a solver's matrix, its factorization is made before the loop, in a scope of its
own, and freed after the loop, unless the loop returns its handle (`_objects/shared.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from callgate import _part
from callgate._call.function import ArrayFunction
from callgate._call.site import RUNTIME_PLATFORMS, BoundCall
from callgate._core.effects import HANDLE_EFFECT
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import loops, lowering, tracing, walk
from callgate._jax.tracing import jaxpr_as_fun
from callgate._objects import shared, table
from callgate._objects.handle import TYPE
from callgate._part import Part, joins

Rule = Callable[..., Any]
_DONE = jax.ShapeDtypeStruct((), np.int32)


def lower(original: Rule, context: Any, *operands: Any, **params: Any) -> Any:
  """Wraps JAX's lowering of `scan` and `while_loop`."""
  body, run = ("jaxpr", _scan) if "jaxpr" in params else ("body_jaxpr", _while)
  split = lowering.is_automatic(context)
  marks = not split and set(lowering.platforms_of(context)) <= set(RUNTIME_PLATFORMS)
  none = _InScope(np.zeros(TYPE.shape, TYPE.dtype), marks)
  if (planned := _planned(params, none)) is not None:
    loop = functools.partial(_with_shared, *planned, none, _run_plan)
  elif _makes(params[body].jaxpr) and not _uses_untold(params[body].jaxpr, marks):
    loop = functools.partial(run, params, none)
  else:
    return original(context, *operands, **params)

  def scoped(*inputs: Any) -> list[Any]:
    return loop(*inputs)[0]

  return mlir.lower_fun(scoped, multiple_results=True)(context, *operands)


@dataclasses.dataclass(frozen=True)
class _InScope:
  """The scope in which a jaxpr makes its objects.

  Attributes:
    words: its number, a value of the program.
    marks: True if the program may contain marks, and objects that steps share.
  """

  words: Any
  marks: bool

  def of(self, words: Any) -> _InScope:
    return _InScope(words, self.marks)


def _makes(jaxpr: Any) -> bool:
  """True if it contains a call that makes an object, which `_run` can put into a scope."""
  return HANDLE_EFFECT in jaxpr.effects and any(map(_is_maker, walk.equations(jaxpr, _within)))


def _uses_untold(jaxpr: Any, marks: bool) -> bool:
  """True if a use has no result for which the sweep could wait, and can't return a mark.

  The objects of such a loop live like objects outside loops.
  """
  return any(
    HANDLE_EFFECT in eqn.effects
    and isinstance(call := eqn.params.get("call"), BoundCall)
    and _is_untold(eqn)
    and (call.site.by_jax or not marks)
    for eqn in walk.equations(jaxpr, _within)
  )


def _is_untold(eqn: Any) -> bool:
  """True if a call returns nothing, or no elements: XLA drops empty operands."""
  return not eqn.outvars or 0 in eqn.outvars[0].aval.shape


def _is_maker(eqn: Any) -> bool:
  call = eqn.params.get("call")
  return isinstance(call, BoundCall) and call.gate.traits.handles == "makes" and not call.scoped


def _within(eqn: Any) -> Sequence[Any]:
  """Returns the jaxprs of an equation that `_run_equation` runs; others stay as they are."""
  if eqn.primitive is jax.lax.scan_p:
    return [eqn.params["jaxpr"]]
  if eqn.primitive is jax.lax.while_p:
    return [eqn.params["body_jaxpr"]]
  if eqn.primitive is jax.lax.cond_p:
    return eqn.params["branches"]
  found = loops.runs(eqn)
  return [] if found is None else [found[0]]


# -- loops -----------------------------------------------------------------------------------------
# Both return the loop's results, and a value that is ready once the loop has been left.
def _scan(params: dict[str, Any], parent: _InScope, *operands: Any) -> tuple[list[Any], Any]:
  consts, first, xs = loops.split_scan(params, operands)

  def step(state: Any, x: Any) -> Any:
    words, carry = state
    outs, used = _run(params["jaxpr"], (*consts, *carry, *x), parent.of(words))
    kept, given = outs[: len(first)], outs[len(first) :]
    return (_swept(words, kept, given, used), kept), given

  (words, last), ys = jax.lax.scan(
    step, (_entered(parent), first), xs, length=params["length"], reverse=params["reverse"],
    unroll=params["unroll"] or 1,
  )  # fmt: skip
  return [*last, *ys], _gates()["leave"](words, [*last, *ys])


def _while(params: dict[str, Any], parent: _InScope, *operands: Any) -> tuple[list[Any], Any]:
  cond, body = params["cond_jaxpr"], params["body_jaxpr"]
  cond_consts, consts, carry = loops.split_operands(params, operands)
  predicate = functools.partial(jaxpr_as_fun(cond), *cond_consts)
  batched = bool(cond.out_avals[0].shape)  # lanes that have ended keep their values

  def step(state: Any) -> Any:
    words, before = state
    outs, used = _run(body, (*consts, *before), parent.of(words))
    if batched:
      outs = loops.chosen(predicate(*before)[0], outs, before)
    return _swept(words, outs, [], used), outs

  def goes_on(state: Any) -> Any:
    return loops.any_lane(predicate(*state[1])[0])

  words, last = jax.lax.while_loop(goes_on, step, (_entered(parent), list(carry)))
  return last, _gates()["leave"](words, last)


def _entered(parent: _InScope) -> Any:
  entered = _gates()["enter"](parent.words)
  return tracing.vary_over(tracing.manual_axes(), entered)  # with the type of the sweeps' results


def _swept(words: Any, carried: Sequence[Any], given: Sequence[Any], used: Sequence[Any]) -> Any:
  """Returns the scope's words for the next step."""
  swept = _gates()["sweep"](words, _words(carried), _words(given), used)
  return tracing.vary_over(tracing.manual_axes(), swept)


def _words(values: Sequence[Any]) -> list[Any]:
  """Returns the values that may contain handles."""
  return [x for x in values if jnp.shape(x)[-1:] == TYPE.shape and jnp.result_type(x) == TYPE.dtype]


# -- a step ----------------------------------------------------------------------------------------
def _run(jaxpr: Any, args: Sequence[Any], scope: _InScope) -> tuple[list[Any], list[Any]]:
  """Runs a jaxpr with objects in the scope; returns its results and the uses'."""
  used: list[Any] = []

  def rule(eqn: Any, inputs: list[Any]) -> list[Any]:
    if HANDLE_EFFECT not in eqn.effects:
      return walk.bind_equation(eqn, inputs)
    with eqn.ctx.manager:
      results, uses = _run_equation(eqn, inputs, scope)
    used.extend(uses)
    return results

  return walk.interpret(jaxpr, args, rule), used


def _run_equation(eqn: Any, inputs: list[Any], scope: _InScope) -> tuple[list[Any], list[Any]]:
  """Does as `_run`, for an equation with calls that make or use objects."""
  if isinstance(call := eqn.params.get("call"), BoundCall):
    if call.gate.traits.handles == "makes":
      place = len(inputs) - 1 - bool(call.numbered)  # the number of the lane follows it
      own = jnp.broadcast_to(tracing.unvaried(scope.words), jnp.shape(inputs[place]))
      # With the varying axes as before.
      inputs[place] = tracing.vary_over(tracing.varying_axes([inputs[place]]), own)
    call = dataclasses.replace(call, scoped=True, marked=_is_untold(eqn))
    outs = list(eqn.primitive.bind(*inputs, call=call))
    if call.marked:
      return outs[:-1], outs[-1:]
  elif eqn.primitive in (jax.lax.scan_p, jax.lax.while_p):
    if (planned := _planned(eqn.params, scope)) is not None:
      outs, done = _with_shared(*planned, scope, _run_plan_in, *inputs)
    else:
      run = _scan if eqn.primitive is jax.lax.scan_p else _while
      outs, done = run(eqn.params, scope, *inputs)
    return outs, [done]
  elif eqn.primitive is jax.lax.cond_p:
    branches = [functools.partial(_branch, closed, scope) for closed in eqn.params["branches"]]
    *outs, done = jax.lax.switch(inputs[0], branches, *inputs[1:])
    return outs, [done]
  elif (found := loops.runs(eqn)) is not None:
    inner, operands = found
    return _run(inner, [inputs[i] for i in operands], scope)
  else:
    outs = walk.bind_equation(eqn, inputs)
  return outs, outs[:1]


def _branch(closed: Any, scope: _InScope, *inputs: Any) -> list[Any]:
  """Runs a branch; it also returns a value that is ready once its objects have been used."""
  outs, used = _run(closed, inputs, scope)
  # Not a constant behind a barrier: XLA hoists a result that is equal in all branches.
  done = _gates()["done"](used) if used else jnp.int32(0)
  return [*outs, tracing.vary_over(tracing.manual_axes(), done)]


# -- objects shared by steps ----------------------------------------------------------------------
def _planned(params: dict[str, Any], scope: _InScope) -> tuple[shared.Plan, dict[str, Any]] | None:
  """Returns the plan of a loop, and its parameters with another body; None without a plan."""
  body = "jaxpr" if "jaxpr" in params else "body_jaxpr"
  if not (scope.marks and shared.may_share(params[body])):
    return None
  inlined = {**params, body: shared.inlined(params[body])}
  plan = shared.plan_of(inlined)
  return None if plan is None else (plan, inlined)


def _with_shared(
  plan: shared.Plan, params: dict[str, Any], parent: _InScope, run: Rule, *operands: Any
) -> tuple[list[Any], Any]:
  """Runs the loop with such objects made before it, and freed after it unless it returns them.

  Derivatives make a loop return them: its step's handle is a residual of the backward loop.
  """
  words = _gates()["enter"](parent.words)

  def make(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    making, shape = jax.make_jaxpr(function, return_shape=True)(*values)
    return jax.tree.unflatten(jax.tree.structure(shape), _run(making, values, parent.of(words))[0])

  outs, used = run(parent, plan, _made(plan, params, operands, make), params, operands)
  swept = _gates()["sweep"](words, [], _words(outs), [*outs, *used])
  return outs, _gates()["leave"](swept, outs)


def _run_plan(_: _InScope, *plan: Any) -> tuple[list[Any], list[Any]]:
  return shared.run(*plan), []  # the loop's other objects get scopes when it is lowered


def _run_plan_in(
  scope: _InScope, plan: shared.Plan, found: shared.Made, *of_loop: Any
) -> tuple[list[Any], list[Any]]:
  params, operands = of_loop
  closed = jax.make_jaxpr(lambda *args: shared.run(plan, args[0], params, args[1]))(found, operands)
  return _run(closed, jax.tree.leaves((found, operands)), scope)


def _made(plan: shared.Plan, params: dict[str, Any], operands: Sequence[Any], make: Any) -> Any:
  """Runs the part before the loop, if the loop has a step."""
  if "jaxpr" in params:
    consts = loops.split_scan(params, operands)[0]
    return shared.make_shared(plan, params["jaxpr"], consts, make)
  asked, consts, first = loops.split_operands(params, operands)
  (begins,) = jaxpr_as_fun(params["cond_jaxpr"])(*asked, *first)

  def before() -> Any:
    return shared.make_shared(plan, params["body_jaxpr"], consts, make)

  def nothing() -> Any:
    return jax.tree.map(tracing.zeros_of, tracing.result_avals(before))

  return jax.lax.cond(loops.any_lane(begins), before, nothing)


# -- the runtime's part ----------------------------------------------------------------------------
_PREFIX = "callgate.scope."


class _ScopeGate(GateCallee):
  traits = GateCallee.traits.but(taped=False, knows_lanes=False)


@_part.once
def _gates() -> dict[str, ArrayFunction[..., Any]]:
  """Returns the gates that a scoped loop calls, in the order of their operands."""

  def enter(parent: Any) -> Any:
    return table.enter(parent)

  def sweep(scope: Any, carried: Any, given: Any, used: Any) -> Any:
    del used
    table.sweep(scope, carried, given)
    return scope.copy()

  def done(used: Any) -> Any:
    del used
    return np.int32(0)

  def leave(scope: Any, last: Any) -> Any:
    del last
    table.leave(scope)
    return np.int32(0)

  defined = ((enter, TYPE), (sweep, TYPE), (done, _DONE), (leave, _DONE))
  return {
    function.__name__: ArrayFunction(
      _ScopeGate(function, GateOptions(out=out, name=f"{_PREFIX}{function.__name__}", effect="io"))
    )
    for function, out in defined
  }


@joins("scopes")
class Scopes(Part):
  """Defines the gates of scoped loops in programs of other processes."""

  def define(self, name: str) -> Any:
    return _gates().get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
