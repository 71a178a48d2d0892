"""The primitive behind every gate, with its rules.

Parameters, all hashable:
  gate: the Gate, which holds the callee's name and the derivative and batching rules.
  site: `CallSite`, the static description of the call: trees, static arguments, result types.
  levels: batch levels that the runtime loops over, outermost first (vmap="each").
  whole: None, or (size, mask): the one leading batch axis that the callable gets on its batched
    arguments (vmap="whole" and "broadcast"); nested vmaps are folded into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from callgate._call import batching as _batching
from callgate._call import derivatives
from callgate._call.jax_engine import lower_by_jax
from callgate._call.lowering import emit
from callgate._call.site import RUNTIME_PLATFORMS, Call, Callee, CallSite, TangentCall
from callgate._core import registry
from callgate._core.effects import (
  GATE_EFFECT,
  ORDERED_GATE_EFFECT,
  GateEffect,
  OrderedGateEffect,
  TapEffect,
  WholeTapEffect,
)
from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError
from callgate._jax import dispatch, lowering, tracing
from callgate._jax.tracing import Primitive
from callgate._sharding import calls

gate_p = Primitive("gate")
gate_p.multiple_results = True
# The same, for gates that need to know the program's mesh: JAX tells it to few primitives, and
# refuses programs with several meshes then.
mesh_gate_p = Primitive("gate")
mesh_gate_p.multiple_results = True
_PRIMITIVES = (gate_p, mesh_gate_p)
tracing.needs_devices(mesh_gate_p)


def bind(*operands: Any, gate: Callee, **params: Any) -> Sequence[Any]:
  """Makes a call of a gate or kernel."""
  primitive = mesh_gate_p if gate.collective or callable(gate.sharding) else gate_p
  return primitive.bind(*tracing.vary_alike(gate.label, operands), gate=gate, **params)


# -- impl ----------------------------------------------------------------------------------------
for primitive in _PRIMITIVES:
  tracing.define_impl(primitive)


# -- abstract evaluation -------------------------------------------------------------------------
def _effects(gate: Callee) -> frozenset[Any]:
  if gate.effect == "pure":
    return frozenset()
  return frozenset({ORDERED_GATE_EFFECT if gate.effect == "ordered" else GATE_EFFECT})


def _abstract_eval(
  *avals: Any,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> tuple[tuple[Any, ...], frozenset[Any]]:
  lead = tuple(size for size, _ in levels) + (() if whole is None else (whole[0],))
  results = tuple(
    tracing.shaped_array((*lead, *shape), dtype, avals) for shape, dtype in site.results
  )
  if tracing.is_explicit(avals):
    specs = calls.result_specs(gate, site, avals, results, levels, whole)
    results = tuple(
      tracing.with_spec(aval, avals, spec) for aval, spec in zip(results, specs, strict=True)
    )
  return results, _effects(gate)


for primitive in _PRIMITIVES:
  primitive.def_effectful_abstract_eval(_abstract_eval)


# -- jvp -----------------------------------------------------------------------------------------
def _jvp(
  primals: Sequence[Any], tangents: Sequence[Any], *, gate: Callee, site: CallSite, **params: Any
) -> tuple[Any, Any]:
  linear = derivatives.linear_leaves(gate, site.in_tree)
  moved = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
  if gate.rules.defined or gate.like is not None:
    return _jvp_by_rule(primals, tangents, moved, gate, site, **params)
  if gate.autograd and not (linear and linear.issuperset(moved)):
    return _jvp_by_call(primals, tangents, gate.tangent_call(site, moved), gate, site, **params)
  if not linear:
    raise GateDefinitionError(derivatives.no_derivative_message(gate))
  for index, tangent in enumerate(tangents):
    if index not in linear and type(tangent) is not ad.Zero:
      raise GateDefinitionError(
        f"{gate.label}: differentiated with respect to argument "
        f"{registry.argument(gate.name, site.spec, index)}, in which it is not declared linear; "
        f"expected a derivative in argument(s) {derivatives.linear_names(gate, site)} alone. "
        + derivatives.no_derivative_message(gate)
      )
  results = bind(*primals, gate=gate, site=site, **params)
  mixed = [
    ad.instantiate_zeros(tangent) if index in linear else primal
    for index, (primal, tangent) in enumerate(zip(primals, tangents, strict=True))
  ]
  return results, bind(*mixed, gate=gate, site=site, **params)


def _jvp_by_rule(
  primals: Sequence[Any],
  tangents: Sequence[Any],
  moved: Sequence[int],
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> tuple[Any, Any]:
  """Of a call whose custom_jvp is gone: JAX drops it from a loop's body when it linearizes that."""
  flat = list(primals)

  def call(*leaves: Any) -> list[Any]:
    args, kwargs = jax.tree.unflatten(site.in_tree, leaves)
    return jax.tree.leaves(derivatives.apply(gate, gate.rules, args, kwargs, site.static))

  for size, mask in reversed((*levels, *(() if whole is None else (whole,)))):
    axes = [0 if batched else None for batched in mask]
    call = jax.vmap(call, in_axes=axes, axis_size=size)

  def of_moved(*values: Any) -> list[Any]:
    for index, value in zip(moved, values, strict=True):
      flat[index] = value
    return call(*flat)

  results, found = jax.jvp(
    of_moved, [primals[i] for i in moved], [ad.instantiate_zeros(tangents[i]) for i in moved]
  )
  return results, [
    ad.Zero(jax.typeof(result).to_tangent_aval()) if tangent.dtype == jax.dtypes.float0 else tangent
    for result, tangent in zip(results, found, strict=True)
  ]


def _jvp_by_call(
  primals: Sequence[Any],
  tangents: Sequence[Any],
  call: TangentCall,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> tuple[Any, Any]:
  results = bind(*primals, gate=gate, site=site, levels=levels, whole=whole)
  moved: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
  if not call.wanted or not call.outputs:
    return results, moved

  def extended(level: Level) -> Level:  # a tangent is batched as its primal is
    size, mask = level
    return size, (*mask, *(mask[i] for i in call.wanted))

  found = bind(
    *primals,
    *(ad.instantiate_zeros(tangents[i]) for i in call.wanted),
    gate=call.gate,
    site=call.site,
    levels=tuple(map(extended, levels)),
    whole=None if whole is None else extended(whole),
  )
  for index, tangent in zip(call.outputs, found, strict=True):
    moved[index] = tangent
  return results, moved


for primitive in _PRIMITIVES:
  ad.primitive_jvps[primitive] = _jvp


# -- transpose -----------------------------------------------------------------------------------
def _transpose(
  cotangents: Sequence[Any],
  *operands: Any,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> list[Any]:
  linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
  residual = [i for i in range(len(operands)) if i not in linear]
  masks = [*levels, *(() if whole is None else (whole,))]
  core_avals = [
    jax.ShapeDtypeStruct(
      x.aval.shape[sum(mask[i] for _, mask in masks) :] if i in linear else jnp.shape(x),
      x.aval.dtype,
    )
    if i in linear
    else None
    for i, x in enumerate(operands)
  ]

  def rule(cotangent: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    flat: list[Any] = list(core_avals)
    for index, value in zip(residual, values, strict=True):
      flat[index] = value
    return tuple(derivatives.transpose_leaves(gate, site, cotangent, flat, linear))

  batched = rule
  for _, mask in reversed(masks):
    axes = [0 if mask[i] else None for i in residual]
    # A lane's share of an argument that the lanes have in common: the cotangents add up below.
    batched = jax.vmap(batched, in_axes=(0, axes))
  values = [operands[i] for i in residual]
  grads = batched([ad.instantiate_zeros(ct) for ct in cotangents], values)
  out: list[Any] = [None] * len(operands)
  for index, grad in zip(linear, grads, strict=True):
    shared = tuple(axis for axis, (_, mask) in enumerate(masks) if not mask[index])
    summed = grad.sum(axis=shared) if shared else grad
    out[index] = tracing.vary_over(tracing.varying_axes([operands[index].aval]), summed)
  return out


for primitive in _PRIMITIVES:
  ad.primitive_transposes[primitive] = _transpose


# -- batching ------------------------------------------------------------------------------------
def _batch(
  operands: Sequence[Any],
  dims: Sequence[Any],
  *,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> tuple[Sequence[Any], Sequence[int]]:
  mask = tuple(dim is not None for dim in dims)
  size: int = next(x.shape[dim] for x, dim, flag in zip(operands, dims, mask, strict=True) if flag)
  moved = [
    jnp.moveaxis(x, dim, 0) if flag else x
    for x, dim, flag in zip(operands, dims, mask, strict=True)
  ]
  if gate.vmap_rule is not None:
    return _batch_by_rule(gate, site, size, mask, moved)
  # An input that shares its memory with a result needs memory for every lane.
  moved = [
    jnp.broadcast_to(x, (size, *x.shape)) if i in gate.aliases and not mask[i] else x
    for i, x in enumerate(moved)
  ]
  mask = tuple(flag or i in gate.aliases for i, flag in enumerate(mask))
  method = "each" if levels else _batching_of(gate, site, mask, moved, whole)
  if method == "each" and _batching.cuts_bytes(moved, mask, site.results):

    def call_lane(values: Sequence[Any]) -> Sequence[Any]:
      return bind(*values, gate=gate, site=site, levels=levels, whole=whole)

    results = _batching.one_by_one(call_lane, mask, moved)
    return results, (0,) * len(results)
  if method == "each":
    results = bind(*moved, gate=gate, site=site, levels=((size, mask), *levels), whole=whole)
    return results, (0,) * len(results)

  def call(values: Sequence[Any], level: Level) -> Sequence[Any]:
    return bind(*values, gate=gate, site=site, levels=(), whole=level)

  results = _batching.batch_whole(call, method, (size, mask), moved, whole)
  return results, (0,) * len(results)


def _batching_of(
  gate: Callee, site: CallSite, mask: tuple[bool, ...], operands: Sequence[Any], whole: Level | None
) -> str:
  inner = whole[1] if whole is not None else (False,) * len(mask)
  lanes = [
    jax.ShapeDtypeStruct(x.shape[outer + shared :], x.dtype)
    for x, outer, shared in zip(operands, mask, inner, strict=True)
  ]
  return gate.batching(site, tuple(a or b for a, b in zip(mask, inner, strict=True)), lanes)


def _batch_by_rule(
  gate: Callee, site: CallSite, size: int, mask: tuple[bool, ...], operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
  results, batched = _batching.apply_vmap_rule(gate, site, size, mask, operands)
  return results, [0 if flag else None for flag in batched]


for primitive in _PRIMITIVES:
  batching.primitive_batchers[primitive] = _batch


# -- lowering ------------------------------------------------------------------------------------
def lower(
  context: Any,
  *operands: Any,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> Sequence[Any]:
  params: dict[str, Any] = {"gate": gate, "site": site, "levels": levels, "whole": whole}
  if site.by_jax:
    return lower_by_jax(context, *operands, **params)
  platforms = lowering.platforms_of(context)
  on_runtime = all(platform in RUNTIME_PLATFORMS for platform in platforms)
  if len(platforms) == 1 or (on_runtime and gate.same_on_all_platforms):
    platform = platforms[0] if len(platforms) == 1 else "cpu"
    return _lower_for(platform)(context, *operands, **params)
  rules = {p: functools.partial(_lower_for(p), **params) for p in platforms}
  return lowering.lower_each_platform(context, rules, _effects(gate), operands)


def _lower_for(platform: str) -> Callable[..., Sequence[Any]]:
  if platform not in RUNTIME_PLATFORMS:
    return lower_by_jax
  return functools.partial(_lower_to_runtime, platform)


def _lower_to_runtime(
  platform: str,
  context: Any,
  *operands: Any,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> Sequence[Any]:
  ordered = gate.effect == "ordered"
  devices = lowering.device_count(context)
  call = Call(site, context.avals_in, context.avals_out, levels, whole, devices)
  emission = gate.batched(whole).backend(platform)(call)
  call, attributes = emission.call, emission.attributes
  avals_in = context.avals_in
  if gate.collective and (located := calls.in_manual(context, gate)):
    partition, more = located
    operands, avals_in = (*operands, partition), [*avals_in, calls.PARTITION]
    attributes = {**attributes, **more}
  dispatch.keep_with_program(context, emission.callee)
  token = lowering.token_before(context, ORDERED_GATE_EFFECT) if ordered else None
  results, after = emit(
    context,
    operands,
    avals_in,
    context.avals_out,
    name=emission.callee.name,
    levels=call.levels,
    target=emission.target,
    attributes=attributes,
    has_side_effect=gate.effect != "pure",
    token=token,
    aliases=gate.aliases,
    sharded=calls.of_gate(context, gate, site, call.levels, call.whole),
  )
  if ordered:
    lowering.set_token_after(context, ORDERED_GATE_EFFECT, after)
  return lowering.annotate(context, results, context.avals_out)


# Not cached: a cached rule would know the source line of no more than one of its call sites. One
# rule for all platforms: of several, JAX would make a branch of the program for each.
for primitive in _PRIMITIVES:
  mlir.register_lowering(primitive, lower, cacheable=False)
# -- registration --------------------------------------------------------------------------------
tracing.allow_effect(GateEffect, ordered=False)
tracing.allow_effect(TapEffect, ordered=False)
tracing.allow_effect(WholeTapEffect, ordered=True)
tracing.allow_effect(OrderedGateEffect, ordered=True)
for effect in (GateEffect, TapEffect, OrderedGateEffect):
  tracing.keep_through_partial_evaluation(effect)
