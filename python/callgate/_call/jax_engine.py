"""Gates through JAX's own callbacks: `callgate.config(engine="jax")`, and platforms without FFI.

The same calls, slower: arrays are copied, exceptions lose their type, sharded programs gather. It
is what the tests compare callgate's runtime with.
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

from callgate._arrays import gpu
from callgate._arrays.torch import to_numpy
from callgate._call.batching import apply_vmap_rule, batch_whole
from callgate._call.site import Callee, CallSite
from callgate._core import encoding
from callgate._core.encoding import Level, lanes
from callgate._core.errors import GateDefinitionError, ResultError
from callgate._core.failures import describe_failure
from callgate._core.masked import ADVICE, is_masked
from callgate._jax import tracing


def bind(
  gate: Callee, site: CallSite, leaves: Sequence[Any], whole: Level | None = None
) -> Sequence[Any]:
  """Binds the call to JAX's own callbacks, batched as this gate is batched."""
  lead = () if whole is None else (whole[0],)
  types = [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape, dtype in site.results]
  function = host_function(gate, site, (), types)

  def call(*args: Any) -> Sequence[Any]:
    if gate.effect == "pure":
      return jax.pure_callback(function, types, *args, vmap_method="sequential")
    return io_callback(function, types, *args, ordered=gate.effect == "ordered")

  axes = tracing.varying_axes(leaves)

  def vary(results: Sequence[Any]) -> list[Any]:
    """JAX's callbacks don't know that their results vary."""
    return [tracing.vary_over(axes, result) for result in results]

  if gate.vmap_rule is None and gate.vmap in ("each", "grid"):
    return vary(call(*leaves))
  with_rule = jax.custom_batching.custom_vmap(call)

  @with_rule.def_vmap
  def _(size: int, batched: Sequence[bool], *args: Any) -> Any:
    if gate.vmap_rule is not None:
      results, flags = apply_vmap_rule(gate, site, size, tuple(batched), args)
      return list(results), list(flags)
    inner = functools.partial(bind, gate, site)
    results = batch_whole(inner, gate.vmap, (size, tuple(batched)), args, whole)
    return list(results), [True] * len(results)

  return vary(with_rule(*leaves))


def host_function(
  gate: Callee, site: CallSite, levels: tuple[Level, ...], results: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
  """What JAX's own callbacks call for this gate: flat arrays in, a tuple of arrays out."""
  types = [(tuple(r.shape), r.dtype) for r in results]

  def call(*inputs: Any) -> tuple[Any, ...]:
    return _run_on_host(gate, site, types, inputs)

  if not levels:
    return _told(gate, call)

  def loop(*inputs: Any) -> tuple[Any, ...]:
    core = [(shape[len(levels) :], dtype) for shape, dtype in types]
    arrays_in = [np.asarray(x) for x in inputs]
    rows = [
      _run_on_host(gate, site, core, [x[i] for x, i in zip(arrays_in, index, strict=True)])
      for index in lanes(levels, len(inputs))
    ]
    return tuple(
      np.stack([row[k] for row in rows]).reshape(shape) if rows else np.empty(shape, dtype)
      for k, (shape, dtype) in enumerate(types)
    )

  return _told(gate, loop)


class HostError(RuntimeError):
  """What JAX's own callbacks are told of a gate's exception, which they would make text of.

  It carries the id of the exception, so that `callgate.errors()` has that as it was raised.
  """


def _told(gate: Callee, call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
  """The function, with the exceptions that it raises kept for the caller."""

  def told(*inputs: Any) -> tuple[Any, ...]:
    try:
      return call(*inputs)
    except BaseException as error:  # noqa: BLE001 - as the runtime does: the caller gets it
      text = describe_failure(error, gate.name, site="")
    raise HostError(text)

  return told


def _run_on_host(
  gate: Callee,
  site: CallSite,
  results: Sequence[tuple[tuple[int, ...], Any]],
  inputs: Sequence[Any],
) -> tuple[Any, ...]:
  """One call of the gate's function without the runtime, for JAX's own callbacks.

  Args:
    gate: the Gate. Only "numpy", "jax" and "torch" arrays exist outside the runtime: "buffer"
      callables get NumPy arrays.
    site: the CallSite.
    results: (shape, dtype) of each result.
    inputs: arrays, copied.

  Returns:
    The results, checked as the runtime checks them.
  """
  convert = _host_converter(gate.arrays)
  copies = [np.array(x) for x in inputs]
  for copy in copies:
    copy.setflags(write=False)
  args, kwargs = jax.tree.unflatten(site.in_tree, [convert(x) for x in copies])
  static = dict(site.static)
  if gate.style == "return":
    value = gate.on_host(*args, **kwargs, **static)
    leaves = [to_numpy(leaf) for leaf in encoding.check_structure(site.out_tree, value, gate.name)]
    return tuple(
      _checked(gate, leaf, shape, dtype, index)
      for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, results, strict=True))
    )
  outs = [np.zeros(shape, dtype) for shape, dtype in results]
  for i, o in gate.aliases.items():
    outs[o][...] = copies[i]
  out = jax.tree.unflatten(site.out_tree, [convert(x) for x in outs])
  lead = (HostContext(),) if gate.style == "context" else ()
  gate.on_host(*lead, out, *args, **kwargs, **static)
  return tuple(outs)


class HostContext:
  """`Context` for callables that JAX's own callbacks run."""

  stage = "EXECUTE"
  stream = 0
  device = 0
  ordinal = -1

  def stream_as(self, library: str) -> Any:
    """An error: there is no stream."""
    return gpu.stream_as(library, 0, -1)


def _host_converter(arrays: str) -> Callable[[Any], Any]:
  if arrays == "jax":
    return jax.numpy.asarray
  if arrays == "torch":
    return _to_torch
  if arrays in ("cupy", "numba"):
    raise GateDefinitionError(
      f"arrays={arrays!r} needs callgate's runtime on a CUDA device; this call goes through JAX's "
      "own callbacks, where 'numpy', 'buffer', 'jax' and 'torch' are arrays of the host"
    )
  return lambda array: array


def _to_torch(array: Any) -> Any:
  import torch  # pyright: ignore[reportMissingImports]

  writable = array if array.flags.writeable else array.copy()  # torch warns about any other
  if not hasattr(ml_dtypes, array.dtype.name):
    return torch.from_numpy(writable)
  words = np.dtype(f"u{array.dtype.itemsize}" if array.dtype.itemsize == 1 else "i2")
  return torch.from_numpy(writable.view(words)).view(getattr(torch, array.dtype.name))


def _checked(gate: Callee, value: Any, shape: tuple[int, ...], dtype: Any, index: int) -> Any:
  array = np.asarray(value)
  masked = is_masked(value)
  same_kind = array.dtype == dtype or (gate.cast and np.can_cast(array.dtype, dtype, "same_kind"))
  if array.shape != shape or not same_kind or masked:
    got = f"{array.dtype.name}{list(array.shape)}"
    raise ResultError(
      f"gate '{gate.name}': result {index}: expected {np.dtype(dtype).name}{list(shape)}, got "
      + (f"a masked array ({got}), {ADVICE}" if masked else got)
    )
  return array.astype(dtype, copy=False)


# Platforms without callgate's runtime go through JAX's own callbacks. Ordered gates can't: their
# effect was decided when the call was traced.
def lower_by_jax(
  context: Any,
  *operands: Any,
  gate: Callee,
  site: CallSite,
  levels: tuple[Level, ...],
  whole: Level | None,
) -> Sequence[Any]:
  if gate.effect == "ordered":
    raise GateDefinitionError(
      f"{gate.label}: effect='ordered' works in programs for one CPU or CUDA device, or inside "
      "jax.shard_map; this program is partitioned automatically, or for platform "
      f"{'/'.join(context.module_context.platforms)}. callgate.config(engine='jax') may serve there"
    )
  function = host_function(gate.batched(whole), site, levels, context.avals_out)
  types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_out]

  def call(*args: Any) -> Any:
    if gate.effect == "pure":
      return jax.pure_callback(function, types, *args, vmap_method="sequential")
    return io_callback(function, types, *args)

  return mlir.lower_fun(call, multiple_results=True)(context, *operands)
