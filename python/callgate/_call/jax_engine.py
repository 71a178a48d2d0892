# SPDX-License-Identifier: Apache-2.0
"""Gates through JAX's own callbacks: `callgate.config(engine="jax")`, and platforms without FFI.

The calls are slower: arrays are copied, exceptions lose their type, sharded programs gather. The
tests use this engine as the reference for callgate's runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir

from callgate import _callgate
from callgate._arrays import gpu
from callgate._arrays.torch import to_numpy
from callgate._call.batching import apply_vmap_rule, batch_whole
from callgate._call.site import RUNTIME_PLATFORMS, BoundCall, Callee, CallSite
from callgate._core import encoding, registry, split, tape
from callgate._core.dtypes import dtype_code, type_text
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._core.failures import describe_failure
from callgate._core.levels import Level, Numbered, index_in_levels
from callgate._core.masked import is_masked
from callgate._jax import execution, lowering, tracing
from callgate._sharding import calls


def bind(
  gate: Callee, site: CallSite, leaves: Sequence[Any], whole: Level | None = None
) -> Sequence[Any]:
  """Binds the call to JAX's own callbacks, batched as this gate is batched."""
  lead = () if whole is None else (whole[0],)
  types = [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape, dtype in site.results]
  call = _callback(gate, site, (), types)
  if gate.vmap_rule is not None or gate.vmap not in ("each", "grid"):
    call = jax.custom_batching.custom_vmap(call)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *args: Any) -> Any:
      if gate.vmap_rule is not None:
        results, flags = apply_vmap_rule(gate, site, size, tuple(batched), args)
        return list(results), list(flags)
      inner = functools.partial(bind, gate, site)
      results = batch_whole(inner, gate.vmap, (size, tuple(batched)), args, whole)
      return list(results), [True] * len(results)

  axes = tracing.varying_axes(leaves)  # results of JAX's callbacks don't vary by themselves
  return [tracing.vary_over(axes, result) for result in call(*leaves)]


def refuse_program(context: Any, label: str, engine: str) -> None:
  """Raises GateDefinitionError in a program that can't contain JAX's own callbacks."""
  calls.check_whole_mesh(context, f"{label} goes through a callback of JAX's own here, which")
  if not lowering.is_export(context):
    return
  if engine == "jax":
    reason, expected = "engine='jax'", "callgate.config(engine='callgate')"
  elif others := set(context.module_context.platforms) - set(RUNTIME_PLATFORMS):
    reason, expected = f"for platform {'/'.join(sorted(others))}", " or ".join(RUNTIME_PLATFORMS)
  else:
    reason = "because XLA splits this program over its devices"
    expected = "jax.shard_map around it, or a program for one device"
  raise GateDefinitionError(
    f"jax.export: {label} goes through a callback of JAX's own ({reason}), which JAX can't "
    f"export; use {expected}"
  )


# Platforms without callgate's runtime use JAX's own callbacks. Ordered gates need the option there,
# because tracing has already chosen their effect.
def lower_by_jax(call: BoundCall, context: Any, *operands: Any) -> Sequence[Any]:
  gate = call.gate
  if gate.effect == "ordered" and not call.site.by_jax:
    raise GateDefinitionError(
      f"{gate.label}: effect='ordered' works in programs for one CPU or CUDA device, or inside "
      "jax.shard_map; this program is partitioned automatically, or for platform "
      f"{'/'.join(context.module_context.platforms)}. Try callgate.config(engine='jax')"
    )
  refuse_program(context, gate.label, "jax" if call.site.by_jax else "callgate")
  execution.watch(context, gate.watcher_of_jax)
  types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_out]
  function = _callback(
    gate.batched(call.whole), call.site, call.levels, types, numbered=call.numbered
  )
  return mlir.lower_fun(function, multiple_results=True)(context, *operands)


def _callback(
  gate: Callee,
  site: CallSite,
  levels: Sequence[Level],
  types: Sequence[Any],
  numbered: Sequence[Numbered] = (),
) -> Callable[..., Any]:
  """Returns the call as a JAX function of flat arrays, through JAX's own callbacks."""
  lane = [(r.shape[len(levels) :], r.dtype) for r in types]

  def on_host(*inputs: Any) -> tuple[Any, ...]:
    which = ""
    try:
      arrays = [np.asarray(x) for x in inputs]
      number = int(arrays.pop()) if numbered else 0
      sizes = [size for size, _ in levels]
      rows: list[Any] = []
      for index in np.ndindex(*sizes):
        places = [(i, mask) for i, (_, mask) in zip(index, levels, strict=True)]
        own = [x[tuple(i for i, mask in places if mask[k])] for k, x in enumerate(arrays)]
        every, lane_number = index_in_levels(index, sizes, numbered, number)
        which = f"lane {every[0] if len(every) == 1 else every}" if every else ""
        one = functools.partial(_run_on_host, gate, site, lane, own, lane_number)
        rows.append(gate.on_lane(lane_number, one))
      return tuple(
        np.stack([row[k] for row in rows]).reshape(r.shape) if rows else np.empty(r.shape, r.dtype)
        for k, r in enumerate(types)
      )
    except BaseException as error:  # noqa: BLE001 - as the runtime does: the caller gets it
      text = describe_failure(error, gate.name, site="", lane=which)
    raise HostError(text)

  def call(*args: Any) -> Any:
    if gate.effect == "pure" and gate.traits.handles in ("", "uses"):
      return jax.pure_callback(on_host, types, *args, vmap_method="sequential")
    return io_callback(on_host, types, *args, ordered=gate.effect == "ordered")

  return call


class HostError(RuntimeError):
  """Raised to JAX's own callbacks, which keep only its text: the id of the gate's own error."""


def _run_on_host(
  gate: Callee, site: CallSite, results: Sequence[tuple[Any, Any]], inputs: Sequence[Any], lane: int
) -> Sequence[Any]:
  """Calls the function once, unless a recording has the answer."""
  run = functools.partial(_call_on_host, gate, site, results, inputs)
  if not gate.traits.taped or _callgate.tape() is None:
    return run()
  types = [(dtype_code(np.dtype(dtype)), tuple(shape)) for shape, dtype in results]
  return tape.call(gate.name, inputs, types, run, spec=site.spec, lane=lane)


def _call_on_host(
  gate: Callee, site: CallSite, results: Sequence[tuple[Any, Any]], inputs: Sequence[Any]
) -> tuple[Any, ...]:
  """Calls the function once, and checks its results (shape and dtype each) as the runtime does."""
  convert = host_converter(gate.arrays)
  copies = [np.array(x) for x in inputs]
  for copy in copies:
    copy.setflags(write=False)
  unflatten = split.unflattener(site.in_tree, keys=gate.arrays == "jax")
  args, kwargs = unflatten([convert(x) for x in copies])
  static = dict(site.static)
  if gate.style == "return":
    value = gate.on_host(*args, **kwargs, **static)
    leaves = [to_numpy(leaf) for leaf in encoding.check_structure(site.out_tree, value, gate.name)]
    return tuple(
      _checked(gate, site, leaf, shape, dtype, index)
      for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, results, strict=True))
    )
  outs = [np.zeros(shape, dtype) for shape, dtype in results]
  for i, o in gate.aliases.items():
    outs[o][...] = copies[i]
  out = split.unflattener(site.out_tree, keys=False)([convert(x) for x in outs])
  lead = (HostContext(),) if gate.style == "context" else ()
  gate.on_host(*lead, out, *args, **kwargs, **static)
  return tuple(outs)


class HostContext:
  """The `Context` of callables that JAX's own callbacks run."""

  stage, stream, device, ordinal = "EXECUTE", 0, 0, -1

  def stream_as(self, library: str) -> Any:
    """Raises, because there is no stream."""
    return gpu.stream_as(library, 0, -1)


def host_converter(arrays: str) -> Callable[[Any], Any]:
  """Returns a function that makes a library's array of a private NumPy array."""
  if arrays in ("cupy", "numba"):
    raise GateDefinitionError(
      f"arrays={arrays!r} needs callgate's runtime on a CUDA device; this call goes through "
      "JAX's own callbacks. Use 'numpy', 'buffer', 'jax' or 'torch', which are arrays in host "
      "memory there"
    )
  return {"jax": jax.numpy.asarray, "torch": _to_torch}.get(arrays, lambda array: array)


def _to_torch(array: Any) -> Any:
  import torch  # pyright: ignore[reportMissingImports]

  writable = array if array.flags.writeable else array.copy()  # torch warns about read-only arrays
  if not hasattr(ml_dtypes, array.dtype.name):
    return torch.from_numpy(writable)
  words = np.dtype("u1" if array.dtype.itemsize == 1 else "i2")
  return torch.from_numpy(writable.view(words)).view(getattr(torch, array.dtype.name))


def _checked(
  gate: Callee, site: CallSite, value: Any, shape: tuple[int, ...], dtype: Any, index: int
) -> Any:
  array = np.asarray(value)
  if array.dtype == dtype and array.shape == shape and not is_masked(value):
    return array
  made = np.empty(shape, dtype)
  if (got := _callgate.store(made, value, site.cast)) is not None:
    where = registry.of(gate.name, site.spec, "result", index)
    raise ResultError(f"gate '{gate.name}': {where}: expected {type_text(dtype, shape)}, got {got}")
  return made
