"""Control flow around gates with effects, where JAX would call them more than once, or refuses.

vmap: JAX turns a `cond` with a batched predicate into a select, which runs every branch for every
lane, and a `while_loop` with one into a loop that runs its body for finished lanes too. Both would
call an io gate for lanes that never reach it. Programs whose branches or body hold such a gate run
lane after lane instead; all others are left to JAX. But for loops with taps of all lanes at once
(`TapSite.whole`), which are to see each round once.

checkpoint: JAX runs a `while_loop` again in the backward pass. One that calls an io gate runs in
the forward pass alone, and its results are kept.

scan under grad: JAX computes what its backward pass needs of the constants alone once, before the
loop. A call with an effect whose arguments don't change would run once instead of in every step, so
nothing is moved out of a loop that holds one.

linearize: JAX runs all of a `while_loop` that carries a tangent again for each tangent, since it
can't save a value of every round. With an io gate in it, that is refused; `jax.jvp` is not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching, partial_eval

from callgate._core.effects import GateEffect, TapEffect, WholeTapEffect
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing
from callgate._jax.tracing import jaxpr_as_fun
from callgate._tap import primitive as _primitive

_Rule = Callable[..., Any]


def start() -> None:
  """Puts the rules around JAX's own; called once by `import callgate`."""
  batch_rules: dict[Any, Any] = batching.fancy_primitive_batchers
  linearize_rules: dict[Any, Any] = partial_eval.custom_partial_eval_rules
  remat_rules: dict[Any, Any] = partial_eval.partial_eval_jaxpr_custom_rules
  for rules, primitive, rule in (
    (batch_rules, jax.lax.cond_p, _cond_rule),
    (batch_rules, jax.lax.while_p, _while_rule),
    (linearize_rules, jax.lax.while_p, _linearize_rule),
    (remat_rules, jax.lax.while_p, _remat_rule),
    (remat_rules, jax.lax.scan_p, _scan_remat_rule),
  ):
    rules[primitive] = functools.partial(rule, rules[primitive])
  tracing.wrap_rules(_hoisting, _split)


def _cond_rule(
  original: _Rule, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> Any:
  # A platform's index is the same for all lanes: JAX unbatches it.
  apart = dims[0] is not None and "branches_platforms" not in params
  if apart and _has_gate_effect(params["branches"]):
    return _lane_after_lane(jax.lax.cond_p, axis_data, args, dims, params)
  return original(axis_data, args, dims, **params)


def _while_rule(
  original: _Rule, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> Any:
  jaxprs = _jaxprs(params)
  if _has_gate_effect(jaxprs) and _predicate_batched(axis_data, dims, **params):
    return _lane_after_lane(jax.lax.while_p, axis_data, args, dims, params)
  if _holds_whole_taps(jaxprs) and _predicate_batched(axis_data, dims, **params):
    return _all_lanes(axis_data, args, dims, **params)
  return original(axis_data, args, dims, **params)


def _linearize_rule(original: _Rule, trace: Any, *tracers: Any, **params: Any) -> Any:
  unknown = [not tracer.pval.is_known() for tracer in tracers]
  if any(unknown) and not all(unknown) and _has_gate_effect(_jaxprs(params), taps=False):
    raise GateDefinitionError(_RUNS_TWICE)
  return original(trace, *tracers, **params)


def _remat_rule(
  original: _Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  jaxprs = _jaxprs(eqn.params)
  if any(unknown) and _has_gate_effect(jaxprs, taps=False):  # a tap may repeat
    raise GateDefinitionError(_RUNS_TWICE)
  if any(unknown) or not _has_gate_effect(jaxprs):
    return original(saveable, unknown, instantiated, eqn)
  later = [False] * len(eqn.outvars)
  return eqn, None, later, later, []


def _scan_remat_rule(
  original: _Rule, saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> Any:
  before, _thread.in_scan = _thread.in_scan, _has_gate_effect([eqn.params["jaxpr"]])
  try:
    return original(saveable, unknown, instantiated, eqn)
  finally:
    _thread.in_scan = before


def _jaxprs(params: dict[str, Any]) -> tuple[Any, Any]:
  return params["cond_jaxpr"], params["body_jaxpr"]


def _hoisting(original: Callable[..., Any]) -> Callable[..., Any]:
  def hoist(jaxpr: Any, consts: Any, residuals: int, *rest: Any) -> Any:
    if _has_gate_effect([jaxpr]):
      return jaxpr, consts, [False] * residuals, []
    return original(jaxpr, consts, residuals, *rest)

  return hoist


class _Thread(threading.local):
  """Whether this thread is in JAX's rule for `scan` under `checkpoint`, with a gate in the loop."""

  in_scan = False


_thread = _Thread()


def _split(original: Callable[..., Any]) -> Callable[..., Any]:
  def split(jaxpr: Any, unknown: Sequence[bool], instantiate: Any) -> Any:
    """What of a jaxpr is known: nothing, where the rule above asks what it may hoist."""
    if not (_thread.in_scan and _has_gate_effect([jaxpr])):
      return original(jaxpr, unknown, instantiate)
    known = [not flag for flag in unknown]
    avals = [aval for aval, flag in zip(jaxpr.in_avals, known, strict=True) if flag]
    same = original(jax.make_jaxpr(lambda *values: values)(*avals), [False] * len(avals), False)[0]
    rest = tracing.move_binders_to_front(jaxpr, known)
    return same, rest, [True] * len(jaxpr.out_avals), avals

  return split


_RUNS_TWICE = (
  "a while_loop with a gate of effect 'io' or 'ordered' was linearized, and carries a tangent: the "
  "gate would run again for each tangent. Expected: jax.jvp, jax.lax.scan instead of the loop, the "
  "gate outside of it, or effect='pure'"
)


def _has_gate_effect(jaxprs: Sequence[Any], *, taps: bool = True) -> bool:
  """Whether calls of callgate's with effects are in there; with `taps` False, others than taps.

  Taps of all lanes at once don't count: they send what JAX's own control flow computes.
  """
  ignored = WholeTapEffect if taps else TapEffect
  return any(
    isinstance(effect, GateEffect) and not isinstance(effect, ignored)
    for jaxpr in jaxprs
    for effect in jaxpr.effects
  ) or (taps and _primitive.dataflow_taps_in(jaxprs))


def _holds_whole_taps(jaxprs: Sequence[Any]) -> bool:
  """Whether taps of all lanes at once are in there."""
  return any(
    isinstance(effect, WholeTapEffect) for jaxpr in jaxprs for effect in jaxpr.effects
  ) or _primitive.dataflow_taps_in(jaxprs, whole=True)


def _predicate_batched(
  axis_data: Any,
  dims: Sequence[Any],
  *,
  cond_nconsts: int,
  cond_jaxpr: Any,
  body_nconsts: int,
  body_jaxpr: Any,
) -> bool:
  """Whether lanes may end a `while_loop` at different times."""
  batched = [dim is not None for dim in dims]
  cond_consts, rest = batched[:cond_nconsts], batched[cond_nconsts:]
  body_consts, carry = rest[:body_nconsts], rest[body_nconsts:]
  while True:  # each round makes at least one more carry batched, or is the last
    after = tracing.batched(body_jaxpr, axis_data, [*body_consts, *carry], carry)[1]
    if after == carry:
      break
    carry = [a or b for a, b in zip(after, carry, strict=True)]
  return tracing.batched(cond_jaxpr, axis_data, [*cond_consts, *carry], False)[1][0]


def _all_lanes(
  axis_data: Any,
  args: Sequence[Any],
  dims: Sequence[Any],
  *,
  cond_nconsts: int,
  cond_jaxpr: Any,
  body_nconsts: int,
  body_jaxpr: Any,
) -> tuple[Sequence[Any], Sequence[int]]:
  """A loop over all lanes at once until the last has finished; finished lanes keep their values.

  JAX's own runs the condition twice a round, and with ordered effects in it doesn't keep the values
  of finished lanes (0.10 to 0.12).
  """
  flags = [dim is not None for dim in dims]
  moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
  consts = cond_nconsts + body_nconsts
  carry = [
    x if flag else jnp.broadcast_to(x, (axis_data.size, *jnp.shape(x)))
    for x, flag in zip(moved[consts:], flags[consts:], strict=True)
  ]
  every = [True] * len(carry)
  cond, _ = tracing.batched(cond_jaxpr, axis_data, [*flags[:cond_nconsts], *every], True)
  body, _ = tracing.batched(body_jaxpr, axis_data, [*flags[cond_nconsts:consts], *every], True)

  def going_on(carry: Sequence[Any]) -> Any:
    return jaxpr_as_fun(cond)(*moved[:cond_nconsts], *carry)[0]

  def step(state: tuple[Any, Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
    going, carry = state
    new = jaxpr_as_fun(body)(*moved[cond_nconsts:consts], *carry)
    shapes = [(-1,) + (1,) * (x.ndim - 1) for x in carry]
    carry = [
      jnp.where(going.reshape(shape), x, old)
      for x, old, shape in zip(new, carry, shapes, strict=True)
    ]
    return going_on(carry), carry

  _, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), step, (going_on(carry), carry))
  return carry, [0] * len(carry)


def _lane_after_lane(
  primitive: Any, axis_data: Any, args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[Any], Sequence[int]]:
  """A scan over the lanes, each with control flow of its own."""
  batched = [dim is not None for dim in dims]
  rows = [jnp.moveaxis(x, d, 0) for x, d, b in zip(args, dims, batched, strict=True) if b]

  def lane(carry: None, row: Sequence[Any]) -> tuple[None, Sequence[Any]]:
    values = iter(row)
    operands = [next(values) if b else x for x, b in zip(args, batched, strict=True)]
    return carry, primitive.bind(*operands, **params)

  _, results = jax.lax.scan(lane, None, rows, length=axis_data.size)
  return results, [0] * len(results)
