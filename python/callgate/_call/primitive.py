# SPDX-License-Identifier: Apache-2.0
"""The primitive behind every gate, with its rules. Its one parameter, `call`, is a `BoundCall`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from callgate._call import batching as _batching
from callgate._call import derivatives
from callgate._call.jax_engine import lower_by_jax
from callgate._call.lowering import emit
from callgate._call.site import (
  RUNTIME_PLATFORMS,
  BoundCall,
  Call,
  Callee,
  CallSite,
  in_one_lane,
  shared_by_lanes,
)
from callgate._core import effects, names
from callgate._core.levels import Level, encode_levels, number_of_lane
from callgate._jax import compiling, cpp_path, dispatch, execution, lowering, sources, tracing
from callgate._jax.batching import always_batched
from callgate._jax.tracing import Primitive
from callgate._sharding import calls

gate_p = Primitive("gate")
# The same primitive for gates that need the program's mesh. JAX passes the mesh to few primitives,
# and then rejects programs with several meshes.
mesh_gate_p = Primitive("gate")
# The same primitive for gates with a call for each lane, even if no operand depends on the lane.
lanes_gate_p = Primitive("gate")
PRIMITIVES = (gate_p, mesh_gate_p, lanes_gate_p)


def bind(*operands: Any, call: BoundCall) -> Sequence[Any]:
  """Makes a call of a gate or kernel."""
  gate = call.gate
  of_mesh = gate.collective or callable(gate.sharding)
  primitive = lanes_gate_p if gate.lane_rule else mesh_gate_p if of_mesh else gate_p
  with sources.users_line_kept():
    return primitive.bind(*tracing.vary_alike(gate.label, operands), call=call)


def bind_in_lane(operands: Sequence[Any], call: BoundCall, lane: Any, size: int) -> Sequence[Any]:
  """Makes the call for lane number `lane` (int32) in a loop over `size` lanes."""
  if call.gate.lane_rule is not None:
    return call.gate.lane_rule(operands, call, lane, size)
  inner = in_one_lane(call, size)
  if inner.numbered == call.numbered:
    return bind(*operands, call=inner)
  own, number = _parted(call, operands)
  return bind(*own, number_of_lane(lane, call.numbered, number), call=inner)


def _parted(call: BoundCall, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Returns the function's operands (or values in their order), and the lane's number, if any."""
  count = len(values) - bool(call.numbered)
  return tuple(values[:count]), tuple(values[count:])


# -- abstract evaluation -------------------------------------------------------------------------
def _abstract_eval(*avals: Any, call: BoundCall) -> tuple[tuple[Any, ...], frozenset[Any]]:
  gate, site = call.gate, call.site
  avals = _parted(call, avals)[0]
  lead = tuple(size for size, _ in call.axes)
  results = tuple(
    tracing.shaped_array((*lead, *shape), dtype, avals) for shape, dtype in site.results
  )
  results = with_shardings(gate, site, avals, results, call.levels, call.whole)
  mark = (tracing.shaped_array((), np.dtype(np.int32), avals),) if call.marked else ()
  return (*results, *mark), _effects(call)


def with_shardings(
  gate: Any, site: CallSite, avals: Sequence[Any], results: Sequence[Any],
  levels: Sequence[Level] = (), whole: Level | None = None,
) -> Sequence[Any]:  # fmt: skip
  """Returns the types of a call's results, with shardings in an explicitly sharded program."""
  if not tracing.is_explicit(avals):
    return results
  specs = calls.result_specs(gate, site, avals, results, levels, whole)
  return [tracing.with_spec(aval, avals, spec) for aval, spec in zip(results, specs, strict=True)]


def _effects(call: BoundCall) -> frozenset[Any]:
  gate = call.gate
  found: set[Any] = set()
  if (gate.traits.handles or gate.traits.of_thread) and not call.scoped:
    found.add(effects.HANDLE_EFFECT)
    if gate.traits.handles == "takes":
      found.add(effects.WAIT_EFFECT)
  if gate.effect == "ordered":
    found.add(tracing.ordered_io_effect if call.site.by_jax else effects.ORDERED_GATE_EFFECT)
  elif gate.effect == "io":
    found.add(effects.GATE_EFFECT)
  return frozenset(found)


# -- jvp -----------------------------------------------------------------------------------------
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: BoundCall) -> tuple[Any, Any]:
  gate, site = call.gate, call.site
  linear = derivatives.linear_leaves(gate, site.in_tree)
  primals, number = _parted(call, primals)
  tangents = _parted(call, tangents)[0]
  moved = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
  if gate.has_rule:
    return _jvp_by_rule(primals, tangents, moved, call)
  if gate.traits.autograd and not (linear and linear.issuperset(moved)):
    return _jvp_by_call(primals, tangents, number, moved, call)
  refused = [index for index in moved if index not in linear]
  if refused or not linear:
    raise derivatives.no_derivative(gate, site, linear, refused)
  mixed = [
    ad.instantiate_zeros(tangent) if index in linear else primal
    for index, (primal, tangent) in enumerate(zip(primals, tangents, strict=True))
  ]
  return bind(*primals, *number, call=call), bind(*mixed, *number, call=call)


def _jvp_by_rule(
  primals: Sequence[Any], tangents: Sequence[Any], moved: Sequence[int], call: BoundCall
) -> tuple[Any, Any]:
  """Differentiates a call without its custom_jvp, which JAX drops when it linearizes a loop."""
  gate, site = call.gate, call.site
  flat = list(primals)

  def apply(*leaves: Any) -> list[Any]:
    args, kwargs = jax.tree.unflatten(site.in_tree, leaves)
    return jax.tree.leaves(derivatives.apply(gate, args, kwargs, site.static))

  for size, mask in reversed(call.axes):
    axes = [0 if batched else None for batched in mask]
    apply = jax.vmap(apply, in_axes=axes, axis_size=size)

  def of_moved(*values: Any) -> list[Any]:
    for index, value in zip(moved, values, strict=True):
      flat[index] = value
    return apply(*flat)

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
  number: Sequence[Any],
  moved: Sequence[int],
  call: BoundCall,
) -> tuple[Any, Any]:
  tangent_call = call.gate.tangent_call(call.site, moved)
  wanted, outputs = tangent_call.wanted, tangent_call.outputs
  results = bind(*primals, *number, call=call)
  out: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
  if not wanted or not outputs:
    return results, out

  def extended(level: Level) -> Level:  # a tangent is batched like its primal
    size, mask = level
    return size, (*mask, *(mask[i] for i in wanted))

  levels = tuple(map(extended, call.levels))
  whole = None if call.whole is None else extended(call.whole)
  linear = BoundCall(tangent_call.gate, tangent_call.site, levels, whole, numbered=call.numbered)
  moving = (ad.instantiate_zeros(tangents[i]) for i in wanted)
  found = bind(*primals, *moving, *number, call=linear)
  for index, tangent in zip(outputs, found, strict=True):
    out[index] = tangent
  return results, out


# -- transpose -----------------------------------------------------------------------------------
def _transpose(cotangents: Sequence[Any], *every: Any, call: BoundCall) -> list[Any]:
  operands = _parted(call, every)[0]
  linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
  residual = [i for i in range(len(operands)) if i not in linear]
  masks = [mask for _, mask in call.axes]

  def lane(index: int) -> Any:
    aval = operands[index].aval
    return jax.ShapeDtypeStruct(aval.shape[sum(mask[index] for mask in masks) :], aval.dtype)

  lanes = {i: lane(i) for i in linear}

  def rule(cotangent: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    given = {**lanes, **dict(zip(residual, values, strict=True))}
    flat = [given[i] for i in range(len(operands))]
    return tuple(derivatives.transpose_leaves(call.gate, call.site, cotangent, flat, linear))

  for mask in reversed(masks):
    # A lane's cotangent of an argument that the lanes share; they are added up below.
    rule = jax.vmap(rule, in_axes=(0, [0 if mask[i] else None for i in residual]))
  grads = rule([ad.instantiate_zeros(ct) for ct in cotangents], [operands[i] for i in residual])
  out: list[Any] = [None] * len(every)
  for index, grad in zip(linear, grads, strict=True):
    shared = tuple(axis for axis, mask in enumerate(masks) if not mask[index])
    summed = grad.sum(axis=shared) if shared else grad
    aval = operands[index].aval
    out[index] = tracing.reshard_as(aval, tracing.vary_over(tracing.varying_axes([aval]), summed))
  return out


# -- batching ------------------------------------------------------------------------------------
def _batch(
  operands: Sequence[Any], dims: Sequence[Any], *, call: BoundCall
) -> tuple[Sequence[Any], Sequence[Any]]:
  pairs = zip(operands, dims, strict=True)
  size: int = next(x.shape[dim] for x, dim in pairs if dim is not None)
  return _batch_of(operands, dims, size=size, call=call)


def _batch_of(
  operands: Sequence[Any], dims: Sequence[Any], *, size: int, call: BoundCall
) -> tuple[Sequence[Any], Sequence[Any]]:
  gate, site = call.gate, call.site
  operands, number = _parted(call, operands)
  dims = _parted(call, dims)[0]
  mask = tuple(dim is not None for dim in dims)
  # A loop's body has Python numbers if it was traced with them.
  operands = [x if hasattr(x, "shape") else jnp.asarray(x) for x in operands]
  pairs = list(zip(operands, dims, strict=True))
  moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
  if gate.vmap_rule is not None:
    results, flags = _batching.apply_vmap_rule(gate, site, size, mask, moved, call.levels)
    return results, [0 if flag else None for flag in flags]
  # An input that shares memory with a result needs memory for each lane.
  moved = [
    jnp.broadcast_to(x, (size, *x.shape)) if i in gate.aliases and not mask[i] else x
    for i, x in enumerate(moved)
  ]
  mask = tuple(flag or i in gate.aliases for i, flag in enumerate(mask))
  method = "each" if call.levels else _method(call, mask, moved)
  if method != "each":

    def with_axis(values: Sequence[Any], whole: Level) -> Sequence[Any]:
      of_lanes = BoundCall(gate, site, (), whole, numbered=call.numbered, skips=call.skips)
      run = lambda values: bind(*values, *number, call=of_lanes)  # noqa: E731
      if not call.skips:
        return run(values)
      handles = [i for i in gate.handles_in(site) if whole[1][i]]
      return _batching.of_lanes_with_objects(run, handles, whole[1], values)

    results = _batching.batch_whole(with_axis, method, (size, mask), moved, call.whole)
  elif _batching.cuts_bytes(moved, mask, site.results) or (gate.traits.by_lane and call.numbered):

    def of_lane(values: Sequence[Any], lane: Any) -> Sequence[Any]:
      return bind_in_lane([*values, *number], call, lane, size)

    results = _batching.one_by_one(of_lane, mask, moved)
  else:
    levels = ((size, mask), *call.levels)
    each = shared_by_lanes(dataclasses.replace(call, levels=levels))
    results = bind(*moved, *number, call=each)
  return results, (0,) * len(results)


def _method(call: BoundCall, mask: tuple[bool, ...], operands: Sequence[Any]) -> str:
  inner = call.whole[1] if call.whole is not None else (False,) * len(mask)
  lanes = [
    jax.ShapeDtypeStruct(x.shape[outer + shared :], x.dtype)
    for x, outer, shared in zip(operands, mask, inner, strict=True)
  ]
  either = tuple(a or b for a, b in zip(mask, inner, strict=True))
  return call.gate.batching(call.site, either, lanes)


# -- lowering ------------------------------------------------------------------------------------
def lower(context: Any, *operands: Any, call: BoundCall) -> Sequence[Any]:
  def rule(platform: str) -> Callable[..., Sequence[Any]]:
    if platform not in RUNTIME_PLATFORMS or call.site.by_jax:
      return functools.partial(lower_by_jax, call)
    return functools.partial(_lower_to_runtime, call, platform)

  platforms = lowering.platforms_of(context)
  alike = call.gate.traits.same_on_all_platforms and set(platforms) <= set(RUNTIME_PLATFORMS)
  if len(platforms) == 1 or alike or call.site.by_jax:
    return rule(platforms[0] if len(platforms) == 1 else "cpu")(context, *operands)
  rules = {platform: rule(platform) for platform in platforms}
  return lowering.lower_each_platform(context, rules, _effects(call), operands)


def _spec(context: Any, gate: Callee, site: CallSite) -> str:
  """Returns the spec that a program contains; the program keeps the values that the spec names."""
  if lowering.is_export(context):
    gate.check_export()
    return site.exported_spec
  dispatch.keep_with_program(context, site.kept)
  if site.has_objects:
    lowering.add_keepalive(context, names.NamedObjects(site.kept))
  if gate.traits.runs_programs:
    lowering.add_keepalive(context, cpp_path.RunsPrograms())
  return site.spec


def _lower_to_runtime(
  bound: BoundCall, platform: str, context: Any, *operands: Any
) -> Sequence[Any]:
  gate, site = bound.gate, bound.site
  avals_out = context.avals_out
  avals_in, avals_of_number = _parted(bound, context.avals_in)
  operands, number = _parted(bound, operands)
  devices = lowering.device_count(context)
  own = avals_out[: len(avals_out) - bound.marked]
  call = Call(**vars(bound), operands=avals_in, results=own, devices=devices)
  if "cuda" in lowering.platforms_of(context) and gate.traits.on_device and not gate.traits.by_lane:
    call = dataclasses.replace(call, numbered=())  # the host would wait for the number
  emission = gate.batched(bound.whole).backend(platform)(call)
  call, attributes = emission.call, emission.attributes
  if "spec" in attributes:
    attributes = {**attributes, "spec": _spec(context, gate, site)}
  batch = encode_levels(call.levels, call.numbered, len(avals_in))
  if call.numbered:
    operands, avals_in = (*operands, *number), [*avals_in, *avals_of_number]
    attributes = {**attributes, "numbered": np.bool_(True)}
  if call.marked:
    attributes = {**attributes, "marked": np.bool_(True)}
  sharded = calls.of_gate(context, avals_in, call)
  if located := calls.in_manual(context, gate):
    partition, more = located
    operands, avals_in = (*operands, partition), [*avals_in, calls.PARTITION]
    attributes = {**attributes, **more}
  compiling.keep_callee(context, emission.callee)
  execution.watch(context, emission.watcher)
  results = emit(
    context,
    operands,
    avals_in,
    avals_out,
    name=emission.callee.name,
    batch=batch,
    target=emission.target,
    attributes=attributes,
    has_side_effect=gate.has_side_effect,
    order=effects.ORDERED_GATE_EFFECT if gate.effect == "ordered" else None,
    aliases=gate.aliases,
    sharded=sharded,
  )
  return lowering.annotate(context, results, avals_out)


# -- registration --------------------------------------------------------------------------------
for primitive in PRIMITIVES:
  primitive.multiple_results = True
  tracing.define_impl(
    primitive, lambda call: call.gate.programs(call.site), lambda call: call.gate.label
  )
  primitive.def_effectful_abstract_eval(_abstract_eval)
  ad.primitive_jvps[primitive] = _jvp
  ad.primitive_transposes[primitive] = _transpose
  if primitive is not lanes_gate_p:
    batching.primitive_batchers[primitive] = _batch
  # Not cached, because a cached rule would have the source line of one call site only. One rule for
  # all platforms, because JAX would make a branch of the program for each of several rules.
  mlir.register_lowering(primitive, lower, cacheable=False)
always_batched(lanes_gate_p, _batch_of)
tracing.needs_devices(mesh_gate_p)
tracing.weakly_cached.add(BoundCall)
