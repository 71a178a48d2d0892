# SPDX-License-Identifier: Apache-2.0
"""The primitives behind taps, with their rules.

`tap_p` sends its operands, which `TapSite` describes. With effect "io" or "ordered" it has no
results. With "dataflow" its results are its values and untapped operands, and it has no effect: it
lives as long as they are used. `cotangent_p` is the identity; its transpose taps the cotangent.

Parameters of both, all hashable:
  tap: the Tap, the target of the records.
  site: the TapSite.
  levels: batch levels, outermost first, as a gate's; consumers see lanes.
  transforms: the transformations met so far, in order of application.
  role: "primal", "tangent" or "cotangent".
  repeated: True in the second pass of `jax.checkpoint` and of a loop (`_loops/repeats.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir, partial_eval

from callgate._call import jax_engine
from callgate._call.lowering import emit
from callgate._core import dtypes, effects, encoding, errors, names
from callgate._core.levels import encode_levels, number_of_lane
from callgate._jax import dispatch, lowering, tracing, walk
from callgate._runtime import config, targets
from callgate._sharding import calls
from callgate._tap import delivery, target
from callgate._tap import site as _site
from callgate._tap.site import Arrays, TapSite
from callgate._tap.target import Tap

tap_p = tracing.Primitive("tap")
tap_p.multiple_results = True
cotangent_p = tracing.Primitive("tap_cotangent")
cotangent_p.multiple_results = True
# True if a tap in the flow of data was ever traced. Without one, no search is needed.
_dataflow_traced = False  # atomic: one assignment, which is never taken back


def bind_in_lane(
  primitive: Any, operands: Arrays, params: dict[str, Any], lane: Any, size: int
) -> list[Any]:
  """Binds a tap in a loop over `size` lanes, in lane number `lane` (int32)."""
  site: TapSite = params["site"]
  if site.whole or encoding.is_open(size):
    return primitive.bind(*operands, **params)
  place = site.sent - bool(site.numbered)
  before, number, after = operands[:place], operands[place : site.sent], operands[site.sent :]
  if not site.numbered:
    params = with_scalar(params, place)
  lane = number_of_lane(lane, site.numbered, number)
  numbered = ((size, len(params["levels"])), *site.numbered)
  params = {**params, "site": dataclasses.replace(site, numbered=numbered)}
  results = list(primitive.bind(*before, lane, *after, **params))
  if primitive is cotangent_p and not site.numbered:
    del results[place]
  return results


def with_scalar(params: dict[str, Any], place: int) -> dict[str, Any]:
  """Returns a tap's parameters with another operand at `place`, which all lanes share."""
  levels = [(size, (*mask[:place], False, *mask[place:])) for size, mask in params["levels"]]
  return {**params, "levels": tuple(levels)}


# -- impl ----------------------------------------------------------------------------------------
_programs = functools.cache(lambda: tracing.eager_programs(128))
tracing.define_impl(tap_p, lambda **_: _programs())
_compiled_impl: Any = tap_p.impl


@tap_p.def_impl
def _impl(*operands: Any, **params: Any) -> Arrays:
  tap, site = params["tap"], params["site"]
  if tap.eager is None:
    if _sent_at_once(operands, **params):
      return _returned(site, operands) if site.effect == "dataflow" else []
    return _compiled_impl(*operands, **params)
  sent = operands[: site.values + len(site.logical)]
  tap.eager(_site.describe(site, params["transforms"]), sent)
  return _returned(site, operands) if site.effect == "dataflow" else []


def _sent_at_once(
  operands: Arrays, *, tap: Tap, site: TapSite, levels: tuple[Any, ...], **how: Any
) -> bool:
  """Sends a record from this thread without a program, if possible, and returns True.

  Compiling a program takes a hundred times as long. It pays off for a consumer that gets further
  records, because then the caller need not wait for the arrays.
  """
  if (site.every, site.on_device, site.kept, site.whole) != (1, False, None, False):
    return False
  operands = list(map(jnp.asarray, operands))  # also of NumPy arrays
  devices = {device for x in operands for device in x.devices()}
  if len(devices) != 1 or (device := devices.pop()).platform != "cpu":
    return False
  ordered = site.effect == "ordered"
  if (ordered or not all(x.is_ready() for x in operands)) and not target.is_sent_to_once(tap):
    return False
  if ordered:
    dispatch.wait_for_own(_order_of(site))
  held, key = _attributes(site, _batch_of(site, levels, operands), how)
  try:
    arrays = [np.asarray(x, order="C") for x in operands[: site.sent]]
  except jax.errors.JaxRuntimeError:  # the program reports the failed computation
    return False
  tap.handle.send(key, held, device.id, arrays)
  return True


def _attributes(site: TapSite, batch: dict[str, Any], how: Any) -> tuple[dict[str, Any], str]:
  """Returns a tap's attributes for a program that can't call the runtime, and a key for them."""
  held = {**_site.encode(site, **how), "batch": batch}
  return held, repr((held["spec"], held["tap"], batch))


def _batch_of(site: TapSite, levels: tuple[Any, ...], operands: Arrays) -> dict[str, Any]:
  return encode_levels(levels, site.numbered, len(operands))


@cotangent_p.def_impl
@cotangent_p.def_abstract_eval
def _same(*operands: Any, **_: Any) -> Arrays:
  return operands


# -- abstract evaluation -------------------------------------------------------------------------
def _returned(site: TapSite, operands: Arrays) -> list[Any]:
  """Returns the operands that a tap returns, or other values in their order."""
  return [*operands[: site.values], *operands[len(operands) - site.untapped :]]


@tap_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, site: TapSite, **_: Any) -> tuple[Arrays, frozenset[Any]]:
  global _dataflow_traced
  if site.effect == "dataflow":
    _dataflow_traced = True
    return _returned(site, avals), frozenset()
  return [], frozenset({_order_of(site) if site.effect == "ordered" else effects.TAP_EFFECT})


def _order_of(site: TapSite) -> Any:
  """Returns the effect whose token an ordered tap takes and returns."""
  return effects.WHOLE_TAP_EFFECT if site.whole else effects.ORDERED_GATE_EFFECT


# -- jvp -----------------------------------------------------------------------------------------
def _met(params: Any, transform: str, *details: Any, **changed: Any) -> dict[str, Any]:
  """Returns the parameters of a tap after one more transformation."""
  return {**params, "transforms": (*params["transforms"], (transform, details)), **changed}


def _dense(tangent: Any, primal: Any) -> Any:
  """Returns a tangent as an array; for float0, zeros in the primal's dtype."""
  if type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0:
    return jnp.zeros_like(primal)
  return tangent if hasattr(tangent, "dtype") else jnp.asarray(tangent, jnp.result_type(primal))


def _where_inexact(primals: Arrays, new: Arrays, old: Arrays) -> list[Any]:
  """Returns the new tangents of inexact primals, and the old ones of all others."""
  triples = zip(primals, new, old, strict=True)
  return [n if dtypes.is_inexact(jnp.result_type(primal)) else o for primal, n, o in triples]


def _jvp(primals: Arrays, tangents: Arrays, **params: Any) -> tuple[Any, Any]:
  site: TapSite = params["site"]
  results = tap_p.bind(*primals, **params)
  tail = len(primals) - site.untapped
  dense = list(map(_dense, tangents, primals))
  # Untapped operands pass their tangents, too: the tap lives as long as one of them is used.
  operands = [*dense[: site.values], *primals[site.values : tail], *dense[tail:]]
  params = _met(params, "jvp", role="tangent")
  out = _returned(site, dense)
  if "tangent" in site.roles:
    out = tap_p.bind(*operands, **params)
  elif "cotangent" in site.roles and site.effect == "dataflow":
    out = _returned(site, cotangent_p.bind(*operands, **params))
  if site.effect != "dataflow":
    return results, []
  return results, _where_inexact(_returned(site, primals), out, _returned(site, tangents))


def _cotangent_jvp(primals: Arrays, tangents: Arrays, **params: Any) -> Any:
  results = cotangent_p.bind(*primals, **params)
  if "cotangent" not in params["site"].roles:
    return results, list(tangents)
  values = params["site"].values
  operands = [*map(_dense, tangents[:values], primals), *primals[values:]]  # logical sizes last
  out = cotangent_p.bind(*operands, **_met(params, "jvp"))
  return results, _where_inexact(primals, out, tangents)


ad.primitive_jvps[tap_p] = _jvp
ad.primitive_jvps[cotangent_p] = _cotangent_jvp


# -- transpose -----------------------------------------------------------------------------------
def _transpose(cotangents: Arrays, *operands: Any, **params: Any) -> list[Any]:
  """For the tap of a tangent: taps the cotangent, if asked to, and returns it."""
  if not cotangents:
    return [None] * len(operands)  # a tap with an effect has no results to transpose
  site: TapSite = params["site"]
  values = site.values
  middle = operands[values : len(operands) - site.untapped]
  passing = _returned(site, operands)
  dense = list(map(_sendable, cotangents, passing))
  if "cotangent" in site.roles:
    params = _met(params, "transpose", role="cotangent")
    dense = tap_p.bind(*dense[:values], *middle, *dense[values:], **params)
  out = list(map(_of_undefined, dense, passing))
  return [*out[:values], *([None] * len(middle)), *out[values:]]


def _sendable(cotangent: Any, operand: Any) -> Any:
  """Returns a cotangent as an array; for float0, zeros in the operand's dtype."""
  dense = ad.instantiate_zeros(cotangent)
  aval = operand.aval if ad.is_undefined_primal(operand) else operand
  return jnp.zeros(aval.shape, aval.dtype) if dense.dtype == jax.dtypes.float0 else dense


def _of_undefined(cotangent: Any, operand: Any) -> Any:
  return cotangent if ad.is_undefined_primal(operand) else None


def _cotangent_transpose(cotangents: Arrays, *operands: Any, **params: Any) -> list[Any]:
  site: TapSite = params["site"]
  sent = list(map(_sendable, cotangents, operands))
  sent[site.values :] = operands[site.values :]  # logical sizes
  results = tap_p.bind(*sent, **_met(params, "transpose", role="cotangent"))
  passed = results if site.effect == "dataflow" else map(ad.instantiate_zeros, cotangents)
  found = list(map(_of_undefined, passed, operands))
  return found + [None] * (len(operands) - len(found))


ad.primitive_transposes[tap_p] = _transpose
ad.primitive_transposes[cotangent_p] = _cotangent_transpose


# -- batching ------------------------------------------------------------------------------------
def _batch(primitive: Any, operands: Arrays, dims: Arrays, **params: Any) -> Any:
  site: TapSite = params["site"]
  moved = dims
  if not site.whole or site.logical:  # logical sizes belong to the last axes
    pairs = zip(operands, dims, strict=True)
    operands = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    moved = [None if dim is None else 0 for dim in dims]
  tapped = tuple(_returned(site, moved if site.whole else dims))
  params = _met(params, "batch", ("batch_dims", tapped))
  if not site.whole:
    mask = tuple(dim is not None for dim in dims)
    params["levels"] = ((operands[mask.index(True)].shape[0], mask), *params["levels"])
  results = primitive.bind(*operands, **params)
  out = moved if primitive is cotangent_p else _returned(site, moved)
  return results, list(out)[: len(results)]


batching.primitive_batchers[tap_p] = functools.partial(_batch, tap_p)
batching.primitive_batchers[cotangent_p] = functools.partial(_batch, cotangent_p)


# -- partial evaluation --------------------------------------------------------------------------
def _remat(
  saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
  """In `jax.checkpoint` a tap runs in both passes, unless the policy saves the tapped value."""
  no, yes = [False] * len(eqn.outvars), [True] * len(eqn.outvars)
  needed = [v for v, flag in zip(eqn.invars, instantiated, strict=True) if not flag]
  if any(unknown):
    return None, eqn, yes, yes, needed
  if tracing.is_saveable(saveable, eqn) and not all(instantiated):
    return eqn, None, no, no, []
  return eqn, eqn.replace(params={**eqn.params, "repeated": True}), no, yes, needed


partial_eval.partial_eval_jaxpr_custom_rules[tap_p] = _remat


# -- lowering ------------------------------------------------------------------------------------
def _lower(
  context: Any, *operands: Any, tap: Tap, site: TapSite, levels: tuple[Any, ...], **how: Any
) -> Arrays:
  if site.kept is not None:
    lowering.add_keepalive(context, site.kept)
  portable = _keep(context, tap, site)
  served = {"cpu", "cuda"} & set(context.module_context.platforms)
  dataflow, ordered = site.effect == "dataflow", site.effect == "ordered"
  batch = _batch_of(site, levels, operands)
  how["stacked"] = _stacked(context, site, levels)
  if not served or config.engine() == "jax" or (site.whole and lowering.is_automatic(context)):
    held, key = _attributes(site, batch, {**how, "portable": portable})
    return _lower_by_jax(context, operands, tap, site, held, key)
  held = _site.encode(site, returned=site.values if dataflow else 0, portable=portable, **how)
  dispatch.keep_with_program(context, tap)
  passed = enumerate(_returned(site, range(len(operands)))) if dataflow else ()
  return emit(
    context, operands, context.avals_in, context.avals_out,
    name=tap.name, label=site.name, attributes=held, batch=batch, has_side_effect=True,
    order=_order_of(site) if ordered else None,
    aliases={operand: result for result, operand in passed},
    # A CUDA graph can't allocate the memory of copies on the device.
    target=targets.GATE_TARGET if site.on_device else targets.tap_target(context.avals_in),
    sharded=calls.of_tap(context, site, levels),
  )  # fmt: skip


def _stacked(context: Any, site: TapSite, levels: tuple[Any, ...]) -> dict[str, Any] | None:
  """Returns the shards under a `jax.pmap`; None elsewhere, or without fixed devices."""
  devices = lowering.manual_devices(context) if site.pmapped and not site.whole else ()
  if not devices:
    return None
  lanes = [sum(mask[index] for _, mask in levels) for index in range(site.values)]
  shapes = [context.avals_in[index].shape[n:] for index, n in enumerate(lanes)]
  return _site.stacked_by_pmap(devices, shapes)


def _keep(context: Any, tap: Tap, site: TapSite) -> bool:
  """Keeps alive the objects that the tap names; True in a program for other processes.

  Raises:
    GateDefinitionError: the program is for other processes, which lack the tap's function.
  """
  if lowering.is_export(context):
    if tap.why_not:
      raise errors.GateDefinitionError(f"jax.export: tap '{site.name}': {tap.why_not}")
    return True
  kept = _site.kept(site)
  dispatch.keep_with_program(context, kept)
  if kept.has_objects or tap.why_not:
    lowering.add_keepalive(
      context, names.NamedObjects([kept], "" if kept.has_objects else tap.name)
    )
    delivery.pins.add(kept)
  return False


def _lower_by_jax(
  context: Any, operands: Arrays, tap: Tap, site: TapSite, held: dict[str, Any], key: str
) -> Arrays:
  """Sends by JAX's own callback: one record of the whole value, for any partitioning."""
  ordered = site.effect == "ordered"
  if ordered and not site.whole and lowering.is_partitioned(context):
    raise errors.GateDefinitionError(
      f"tap '{site.name}': ordered=True works in programs for one device, or inside "
      "jax.shard_map; this program is partitioned automatically. Sort the records by `seq` "
      "instead"
    )
  jax_engine.refuse_program(context, f"tap '{site.name}'", config.engine())

  devices = 1 if lowering.is_partitioned(context) else lowering.device_count(context)
  # Each device counts separately for `every`.
  own = [] if ordered or devices == 1 else [lowering.partition_id()]

  def send(*arrays: Any) -> None:
    counted = f"{key}\n{[int(number) for number in arrays[site.sent :]]}"
    # Copies, never views.
    values = [np.array(array, order="C") for array in arrays[: site.sent]]
    tap.handle.send(counted, held, -1, values)

  def call(*args: Any) -> Arrays:
    args, numbers = args[: len(operands)], args[len(operands) :]
    io_callback(send, None, *args[: site.sent], *numbers, ordered=ordered)
    return _returned(site, args) if site.effect == "dataflow" else []

  if ordered:
    return lowering.lower_in_order(context, call, operands, _order_of(site))
  context = context.replace(avals_in=[*context.avals_in, *[calls.PARTITION] * len(own)])
  return mlir.lower_fun(call, multiple_results=True)(context, *operands, *own)


# Not cached, because a cached rule knows the source line of only one of its call sites.
mlir.register_lowering(tap_p, _lower, cacheable=False)
mlir.register_lowering(cotangent_p, lambda context, *operands, **_: operands)
tracing.weakly_cached.add(Tap)


# -- taps in the flow of data --------------------------------------------------------------------
def dataflow_taps_in(jaxprs: Arrays, *, whole: bool = False) -> bool:
  """True if jaxprs contain taps in the flow of data, which have no effect to find them by.

  With `whole` it looks for taps of all lanes at once (`TapSite.whole`), else for all others.
  """
  return _dataflow_traced and any(
    (eqn.params["site"].effect, eqn.params["site"].whole) == ("dataflow", whole)
    for jaxpr in jaxprs
    for eqn in walk.equations(jaxpr)
    if eqn.primitive is tap_p
  )
