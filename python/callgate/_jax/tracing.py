# SPDX-License-Identifier: Apache-2.0
"""JAX's tracing: effects, options in jit's key, avals, jaxprs, control-flow rules.

Each entry in this folder names the JAX function that it replaces, the tested JAX versions, and the
public API that would replace it. If a new JAX version moves one, only this folder changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import array as _array
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import pmap as _pmap
from jax._src import util as _util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval

from callgate._jax import sources

# -- programs ------------------------------------------------------------------------------------
# Public in `jax.extend.core` (0.10 to 0.12), whose package imports Pallas: 12 ms for every user.
Primitive = _core.Primitive
Literal = _core.Literal
jaxpr_as_fun = _core.jaxpr_as_fun
eval_jaxpr: Callable[..., list[Any]] = _core.eval_jaxpr  # takes a jaxpr, its constants, arguments

# -- effects -------------------------------------------------------------------------------------
# A JAX effect keeps a call alive and ordered. JAX has no public way to define one (0.10 to 0.12);
# `jax.Ref`-based effects may replace it.
Effect = _effects.Effect


def allow_effect(effect: type[Any], *, ordered: bool, kept: bool = False) -> None:
  """Allows an effect class of callgate in all transformations of JAX.

  With `kept`, partial evaluation keeps a call without used results, as it keeps JAX's debug
  callbacks.
  """
  kinds = ["lowerable", "control_flow_allowed", "remat_allowed", "custom_derivatives_allowed"]
  kinds += ["partial_eval_kept"] * kept + ["ordered", "shardable_ordered"] * ordered
  for kind in kinds:
    getattr(_effects, f"{kind}_effects").add_type(effect)


# True if a JAX effect keeps program order (0.10 to 0.12).
is_ordered_effect: Callable[[Any], bool] = _effects.ordered_effects.contains
ordered_io_effect: Any = _callback._OrderedIOEffect  # pyright: ignore[reportPrivateUsage]
ordered_debug_effect: Any = _debugging.ordered_debug_effect

# -- configuration that is part of jit's cache key -------------------------------------------------
# JAX has no public way to add an option (0.10 to 0.12). Adding one makes it trace programs again.
_in_key = {"include_in_jit_key": True, "include_in_trace_context": True}
define_enum: Callable[..., Any] = functools.partial(_config.enum_state, **_in_key)
define_bool: Callable[..., Any] = functools.partial(_config.bool_state, **_in_key)
define_int: Callable[..., Any] = functools.partial(_config.int_state, **_in_key)
marked: Any = jax.make_user_context(default_value=False)  # True while vmap marks its results
update_option: Callable[[str, object], None] = _config.config.update
# JAX's own caches of traces depend on this besides the arguments.
trace_key: Callable[[], Any] = _config.trace_context
# True if this thread is outside of all transformations.
in_no_trace: Callable[[], bool] = _core.trace_state_clean


def is_plain_array(value: Any) -> bool:
  """Returns True for a concrete array of a NumPy dtype; `jax.Array` is also the type of tracers."""
  return type(value) is _array.ArrayImpl


def clearable_cache(max_size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Returns an LRU cache that `jax.clear_caches()` empties (0.10 to 0.12); no public API."""
  return _util.cache(max_size=max_size, trace_context_in_key=False)


# `jax.clear_caches()` then calls the `cache_clear()` of an object (0.10 to 0.12); not public.
clear_with_caches: Callable[[Any, str], None] = _util.register_cache


def behind(value: Any) -> Any:
  """Returns the value behind a tracer of derivatives or lanes, or the value (0.10 to 0.12)."""
  while True:
    if isinstance(value, (_ad.JVPTracer, _ad.LinearizeTracer)):
      value = value.primal
    elif isinstance(value, _batching.BatchTracer):
      value = value.val
    else:
      return value


# -- abstract values -------------------------------------------------------------------------------
def shaped_array(
  shape: tuple[int, ...], dtype: Any, operands: Sequence[Any], *, weak_type: bool = False
) -> Any:
  """Returns the abstract value of a result that depends on `operands` (0.10 to 0.12).

  It has the mesh of an explicitly sharded program, and in a `jax.shard_map` varies over each mesh
  axis that an operand varies over. `jax.core.ShapedArray` has no such arguments.
  """
  aval = _core.ShapedArray(shape, dtype, weak_type=weak_type)
  if aval.sharding.mesh.empty:
    aval = aval.update(sharding=_core.get_cur_mesh_sharding())
  return varying_aval(aval, varying_axes(operands))


# In a `jax.shard_map` with `check_vma=True`, the default, a value's type has the mesh axes that it
# varies over. Transposition adds up over the axes that a value is cast to vary over, so the type
# determines the gradient. `jax.lax.pcast` is the public cast, `jax.typeof(x)` shows the axes. JAX
# has no public way to set the axes of an abstract value (0.10 to 0.12).
def varying_axes(values: Sequence[Any]) -> frozenset[Any]:
  """Returns the manual mesh axes that one of the values, abstract or not, varies over."""
  return frozenset[Any]().union(*(_manual_type(value).varying for value in values))


def varying_aval(aval: Any, axes: frozenset[Any]) -> Any:
  """Returns an abstract value that varies over the axes, too."""
  own = aval.manual_axis_type
  if axes <= own.varying:
    return aval
  return aval.update(manual_axis_type=own.update(varying=own.varying | axes))


def vary_over(axes: frozenset[Any], value: Any) -> Any:
  """Casts the value to vary over the axes in addition to its own."""
  more = axes - _manual_type(value).varying
  return _core.pvary(value, tuple(sorted(more, key=str))) if more else value


def unvaried(value: Any) -> Any:
  """Returns the value with a type without axes; for lowering, where types no longer matter."""
  named = _manual_type(value).varying or are_explicit([value])
  return unvaried_p.bind(value) if named else value


unvaried_p = Primitive("callgate_unvaried")
unvaried_p.def_abstract_eval(
  lambda aval: with_spec(aval, [aval], [None] * aval.ndim).update(
    manual_axis_type=_manual_type(aval).update(varying=frozenset())
  )
)
_mlir.register_lowering(unvaried_p, lambda context, x: [x])


def region_axes() -> frozenset[Any]:
  """Returns the mesh axes of the `jax.shard_map` or `jax.pmap` being traced (0.10 to 0.12)."""
  return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def manual_axes() -> frozenset[Any]:
  """Returns the mesh axes of the checked `jax.shard_map` being traced, if any."""
  checked = _config._check_vma.value  # pyright: ignore[reportPrivateUsage]
  return region_axes() if checked else frozenset()


def in_manual_region() -> bool:
  """Returns True if the code being traced is inside a `jax.shard_map` or `jax.pmap`."""
  return bool(region_axes())


def in_pmap() -> bool:
  """Returns True if the code being traced is inside a `jax.pmap` (0.10 to 0.12).

  A `pmap` is a `jax.shard_map` with another caller. An inner jitted function has the answer of its
  first call, which traces it.
  """
  frame = inspect.currentframe() if in_manual_region() else None
  while frame is not None:
    if frame.f_code.co_filename == _pmap.__file__:
      return True
    frame = frame.f_back
  return False


def in_vmap() -> bool:
  """Returns True if the traced code is directly inside a `jax.vmap` (0.10 to 0.12; not public)."""
  return _is_inside(_batching.BatchTrace)


def current_trace() -> Any:
  """Returns the trace of the running code; None outside all transformations (0.10 to 0.12)."""
  return None if in_no_trace() else _core.trace_ctx.trace


def is_staged() -> bool:
  """Returns True if operations become part of a program now (0.10 to 0.12; not public)."""
  return _is_inside(_partial_eval.DynamicJaxprTrace)


def _is_inside(kind: type[Any]) -> bool:
  trace = _core.trace_ctx.trace
  while trace is not None:
    if isinstance(trace, kind):
      return True
    trace = getattr(trace, "parent_trace", None)
  return False


def vary_alike(what: str, values: Sequence[Any]) -> Sequence[Any]:
  """Casts the values to vary over the same axes, like operands of JAX's own operations.

  Raises ValueError if they differ and the user switched off casts (`jax_auto_pcast`).
  """
  alike: Sequence[Any] = _core.auto_insert_reshard(*values)
  _core.standard_vma_rule(what, *map(_core.typeof, alike))
  return alike


def _manual_type(value: Any) -> Any:
  aval = value if isinstance(value, _core.AbstractValue) else _core.typeof(value)
  return getattr(aval, "manual_axis_type", _core.empty_mat)


# The dtype of a JAX array made of a dtype: 64-bit types shrink unless x64 is enabled.
canonical_dtype: Callable[[Any], Any] = _dtypes.canonicalize_dtype
# A NumPy array in that dtype; raises TypeError for values that no JAX array can hold.
# `jax.numpy.asarray` would make a jax.Array (0.10 to 0.12).
canonicalize_value: Callable[[Any], Any] = _dtypes.canonicalize_value


def vary_as(aval: Any, value: Any) -> Any:
  """Returns the value, varying only over the axes of the type `aval`; for lowering, as above."""
  axes = varying_axes([aval])
  if varying_axes([value]) == axes:
    return value
  return vary_over(axes, unvaried(value))


# The abstract value of a PRNG key's data in a program; other values are unchanged (0.10 to 0.12).
physical_aval: Callable[[Any], Any] = _core.physical_aval


# -- running and lowering a primitive --------------------------------------------------------------
# Runs a primitive eagerly by compiling it alone. `jax.interpreters.xla.apply_primitive` was the
# public name; removed before 0.10.
def define_impl(
  primitive: Any,
  programs: Callable[..., Callable[..., Any] | None] = lambda **_: None,
  label: Callable[..., str] | None = None,
) -> None:
  """Compiles and runs a primitive that is bound outside programs (0.10 to 0.12).

  JAX keeps the program, and its parameters, until `jax.clear_caches()`. If `programs(**params)`
  returns a cache of `eager_programs`, the cache keeps it instead. `label(**params)` names the call
  in errors of `jax_debug_nans`.
  """

  @sources.shared
  def impl(*args: Any, **params: Any) -> Any:
    cache = programs(**params)
    try:
      if cache is None:
        return _dispatch.apply_primitive(primitive, *args, **params)
      with jax.disable_jit(False):
        return cache(primitive, **params)(*args)
    except FloatingPointError as error:
      if label is None:
        raise
      text = str(error).replace(f" in {primitive.name}", f" in the results of {label(**params)}")
      raise FloatingPointError(text) from None

  primitive.def_impl(impl)


def eager_programs(most: int) -> Callable[..., Any]:
  """Returns a cache of primitives' programs, by primitive and parameters (0.10 to 0.12).

  A program takes more than 1 MiB, so `most` limits their number.
  """
  made = functools.lru_cache(most)(_dispatch.xla_primitive_callable.__wrapped__)  # type: ignore[attr-defined]
  clear_with_caches(made, "callgate's programs of single calls")
  return made


# Types of primitives' parameters that JAX's caches hold weakly (0.10 to 0.12).
weakly_cached: set[type] = _util.weakref_cache_key_types


def refuse_forward_mode(refuse: Callable[[str], None]) -> None:
  """Calls `refuse(name)` before JAX raises its error for forward mode of a vjp.

  `name` is that of the rule's backward function. JAX raises if `refuse` does not (0.10 to 0.12; not
  public).
  """

  def rule(*args: Any, **params: Any) -> Any:
    info = getattr(params.get("bwd"), "debug_info", None)
    refuse(str(getattr(info, "func_name", "")))
    return _ad.raise_custom_vjp_error_on_jvp(*args, **params)

  linear = _ad.custom_lin_p
  linear.def_impl(rule)
  _batching.primitive_batchers[linear] = rule
  _mlir.register_lowering(linear, rule, cacheable=False)


# Makes JAX pass a program's mesh to the lowering of programs with a primitive (0.10 to 0.12).
needs_devices: Callable[[Any], None] = _dispatch.prim_requires_devices_during_lowering.add


# -- jaxprs --------------------------------------------------------------------------------------
def batched(
  jaxpr: Any, axis_data: Any, batched: Sequence[bool], instantiate: Any
) -> tuple[Any, list[bool]]:
  """Returns a jaxpr with these arguments batched, on axis 0, and a flag for each batched result.

  `instantiate` selects the results to batch in any case, or is a flag for all. JAX's batching rules
  of control flow use this (0.10 to 0.12); no public name.
  """
  result, flags = _batching.batch_jaxpr(jaxpr, axis_data, batched, instantiate)
  return result, list(flags)


def is_saveable(saveable: Any, eqn: Any) -> bool:
  """Returns True if a `jax.checkpoint` policy saves an equation's results (0.10 to 0.12)."""
  says = saveable(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params)
  saved = says is True or says is _partial_eval.Saveable
  return saved or isinstance(says, _partial_eval.Offloadable)


# -- explicit sharding -----------------------------------------------------------------------------
def is_explicit(avals: Sequence[Any]) -> bool:
  """Returns True if these abstract values are on a mesh with explicit axes (0.10 to 0.12)."""
  return any(aval.sharding.mesh._any_axis_explicit for aval in avals)


def are_explicit(values: Sequence[Any]) -> bool:
  """Returns True if the type of one of these arrays or tracers has its sharding."""
  return is_explicit([_core.typeof(value) for value in values])


def types_of_results(function: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
  """Returns the abstract values of a function's results, flat, with their shardings.

  `jax.eval_shape` returns no abstract mesh's shardings outside jit (0.10 to 0.12).
  """
  return jax.make_jaxpr(function)(*args).out_avals


def reshard_as(aval: Any, value: Any) -> Any:
  """Reshards the value if its type and the abstract value differ in their shardings."""
  if _core.typeof(value).sharding == aval.sharding or aval.sharding.mesh.empty:
    return value
  return jax.sharding.reshard(value, aval.sharding)


def result_avals(f: Callable[..., Any], *args: Any) -> Any:
  """Returns the abstract values of a function's results, in their structure."""
  traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
  return jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)


def zeros_of(aval: Any) -> Any:
  """Returns zeros of an abstract value's type; PRNG keys have zero data (0.10 to 0.12)."""
  if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
    kind = aval.dtype._impl
    data = jax.numpy.zeros((*aval.shape, *kind.key_shape), jax.numpy.uint32)
    value = jax.random.wrap_key_data(data, impl=kind.name)
  else:
    value = jax.numpy.zeros(aval.shape, aval.dtype)
  return vary_over(varying_axes([aval]), reshard_as(aval, value))


def replicate(values: Sequence[Any]) -> list[Any]:
  """Replicates the values over the mesh in their types."""
  avals = [_core.typeof(value) for value in values]
  return [
    reshard_as(with_spec(x, avals, [None] * x.ndim), v) for x, v in zip(avals, values, strict=True)
  ]


def spec_of(aval: Any) -> list[Any]:
  """Returns the spec of an abstract value, with an entry for each dimension."""
  spec = list(aval.sharding.spec)
  return spec + [None] * (aval.ndim - len(spec))


def with_spec(aval: Any, operands: Sequence[Any], spec: Sequence[Any]) -> Any:
  """Returns an abstract value with `spec` as its sharding, if explicitly sharded (0.10 to 0.12)."""
  mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
  if mesh is None or not mesh._any_axis_explicit:
    return aval
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  return aval.update(sharding=sharding)


def closes_over(function: Any, kind: type[Any]) -> bool:
  """Returns True if JAX's function around a debug callback holds a value of the type."""
  cells = getattr(function, "__closure__", None) or ()
  return any(isinstance(cell.cell_contents, kind) for cell in cells)
