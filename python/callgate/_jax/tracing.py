"""Of JAX's tracing: effects, options in jit's key, avals, jaxprs, control-flow rules.

Each entry in this folder says what it stands for, in which JAX versions it was seen, and what
public API would replace it. A new JAX version that moves one of these is served there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import util as _util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.control_flow import loops as _loops

# -- programs ------------------------------------------------------------------------------------
# Public in `jax.extend.core` (0.10 to 0.12), whose package imports Pallas: 12 ms for every user.
Primitive = _core.Primitive
Literal = _core.Literal
jaxpr_as_fun = _core.jaxpr_as_fun

# -- effects -------------------------------------------------------------------------------------
# A JAX effect keeps a call alive and ordered. JAX has no public way to define one (0.10 to 0.12);
# `jax.Ref`-based effects may replace it.
Effect = _effects.Effect


def allow_effect(effect: type[Any], *, ordered: bool, kept: bool = False) -> None:
  """Lets an effect class of ours through every transformation of JAX.

  With `kept` linearization keeps a call of which nothing is used, as it does JAX's own debug
  callbacks.
  """
  allowed = [
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.remat_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
  ]
  if kept:
    allowed.append(_effects.partial_eval_kept_effects)
  if ordered:
    allowed += [_effects.ordered_effects, _effects.shardable_ordered_effects]
  for types in allowed:
    types.add_type(effect)


def keep_through_partial_evaluation(effect: type[Any]) -> None:
  """Keeps calls with the effect in what is evaluated later, although nothing uses them."""
  _effects.partial_eval_kept_effects.add_type(effect)


# -- configuration that is part of jit's cache key -------------------------------------------------
# `jax.config` has no public way to add an option (0.10 to 0.12).
def define_enum(name: str, values: Sequence[str], default: str, help: str) -> Any:
  """A process-wide and thread-local option; jit retraces when it changes."""
  return _config.enum_state(
    name=name,
    enum_values=list(values),
    default=default,
    help=help,
    include_in_jit_key=True,
    include_in_trace_context=True,
  )


def define_bool(name: str, default: bool, help: str) -> Any:
  """As `define_enum`, for a flag."""
  return _config.bool_state(
    name=name,
    default=default,
    help=help,
    include_in_jit_key=True,
    include_in_trace_context=True,
  )


def update_option(name: str, value: object) -> None:
  """Sets an option for the whole process."""
  _config.config.update(name, value)


# -- abstract values -------------------------------------------------------------------------------
def shaped_array(
  shape: tuple[int, ...], dtype: Any, operands: Sequence[Any], *, weak_type: bool = False
) -> Any:
  """The abstract value of a result that depends on `operands` (0.10 to 0.12).

  Carries the mesh of an explicitly sharded program, and in a `jax.shard_map` varies over each mesh
  axis that an operand varies over; `jax.core.ShapedArray` alone has no such arguments.
  """
  aval = _core.ShapedArray(shape, dtype, weak_type=weak_type)
  if aval.sharding.mesh.empty:
    aval = aval.update(sharding=_core.get_cur_mesh_sharding())
  return varying_aval(aval, varying_axes(operands))


# In a `jax.shard_map` with `check_vma=True`, its default, JAX types each value by the mesh axes
# that it varies over. Transposition adds up over the axes that a value is cast to vary over, so
# what a type says decides what a gradient is. `jax.lax.pcast` is the public cast, `jax.typeof(x)`
# shows the axes; JAX has no public way to give an abstract value its axes (0.10 to 0.12).
def varying_axes(values: Sequence[Any]) -> frozenset[Any]:
  """The manual mesh axes that one of the values, abstract or not, varies over."""
  axes: frozenset[Any] = frozenset()
  for value in values:
    axes |= _manual_type(value).varying
  return axes


def varying_aval(aval: Any, axes: frozenset[Any]) -> Any:
  """An abstract value that varies over the axes as well as over its own."""
  more = axes - aval.manual_axis_type.varying
  if not more:
    return aval
  return aval.update(
    manual_axis_type=aval.manual_axis_type.update(varying=aval.manual_axis_type.varying | more)
  )


def vary_over(axes: frozenset[Any], value: Any) -> Any:
  """The value, cast to vary over the axes as well as over its own."""
  more = axes - _manual_type(value).varying
  return _core.pvary(value, tuple(sorted(more, key=str))) if more else value


def manual_axes() -> frozenset[Any]:
  """The mesh axes of the `jax.shard_map` being traced whose check is on; none outside of one."""
  if not _config._check_vma.value:  # pyright: ignore[reportPrivateUsage]
    return frozenset()
  return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def vary_alike(what: str, values: Sequence[Any]) -> Sequence[Any]:
  """The values, cast to vary over the same axes, as operands of JAX's own operations are.

  Raises ValueError where the user has switched such casts off (`jax_auto_pcast`) and they differ.
  """
  alike: Sequence[Any] = _core.auto_insert_reshard(*values)
  _core.standard_vma_rule(what, *map(_core.typeof, alike))
  return alike


def _manual_type(value: Any) -> Any:
  aval = value if isinstance(value, _core.AbstractValue) else _core.typeof(value)
  return getattr(aval, "manual_axis_type", _core.empty_mat)


def canonical_dtype(dtype: Any) -> Any:
  """The dtype that JAX gives an array of `dtype`: 64-bit types shrink unless x64 is enabled."""
  return _dtypes.canonicalize_dtype(dtype)


# -- running a primitive outside jit ---------------------------------------------------------------
# `jax.interpreters.xla.apply_primitive` was the public name; removed before 0.10.
def define_impl(primitive: Any) -> None:
  """Runs the primitive eagerly by compiling it alone."""
  _dispatch.simple_impl(primitive)


# -- batching --------------------------------------------------------------------------------------
def batched(
  jaxpr: Any, axis_data: Any, batched: Sequence[bool], instantiate: Any
) -> tuple[Any, list[bool]]:
  """A jaxpr with these arguments batched, on axis 0, and which results are (0.10 to 0.12).

  `instantiate`: those that are to be batched in any case, or a flag for all. What JAX's own
  batching rules of control flow use; no public name.
  """
  result, flags = _batching.batch_jaxpr(jaxpr, axis_data, batched, instantiate)
  return result, list(flags)


# -- jaxprs --------------------------------------------------------------------------------------
def subjaxprs(eqn: Any) -> list[Any]:
  """The jaxprs in an equation's parameters (0.10 to 0.12); `jax.extend` has no public walker."""
  return list(_core.jaxprs_in_params(eqn.params))


def is_saveable(saveable: Any, eqn: Any) -> bool:
  """Whether a `jax.checkpoint` policy saves what the equation gives (0.10 to 0.12)."""
  from jax._src.interpreters import partial_eval

  says = saveable(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params)
  return says is True or says is partial_eval.Saveable or isinstance(says, partial_eval.Offloadable)


def keep_results(holds: Callable[[Any], bool]) -> None:
  """Of loops, branches and inner jits for which `holds` all results are kept if one is used.

  Wraps their rules of dead code elimination, which would drop a loop's unused carry with all that
  only it needs, whether it has an effect or not (0.10 to 0.12; `while_loop` has a rule since 0.12).
  JAX has no public way to say that an equation counts where it stands.
  """
  from jax._src.interpreters import partial_eval
  from jax._src.pjit import jit_p

  rules: dict[Any, Callable[..., Any]] = partial_eval.dce_rules
  for primitive in (jax.lax.scan_p, jax.lax.while_p, jax.lax.cond_p, jit_p):
    if primitive in rules:
      rules[primitive] = _keeping_results(rules[primitive], holds)


def _keeping_results(rule: Callable[..., Any], holds: Callable[[Any], bool]) -> Callable[..., Any]:
  # 0.12 says which inputs live, too: rule(used, live, eqn).
  def keeping(used: Sequence[bool], *live_and_eqn: Any) -> Any:
    whole = any(used) and not all(used) and holds(live_and_eqn[-1])
    return rule([True] * len(used) if whole else used, *live_and_eqn)

  return keeping


# -- loops -----------------------------------------------------------------------------------------
def wrap_scan_hoisting(wrapped: Callable[[Any], Any]) -> None:
  """Puts `wrapped(original)` in the place of what hoists out of a scan (0.10 to 0.12).

  `jax._src.lax.control_flow.loops._scan_known_hoisting`; it has no public name.
  """
  from jax._src.lax.control_flow import loops

  loops._scan_known_hoisting = wrapped(loops._scan_known_hoisting)  # pyright: ignore[reportPrivateUsage]


def wrap_partial_evaluation(wrapped: Callable[[Any], Any]) -> None:
  """Puts `wrapped(original)` in the place of `partial_eval_jaxpr_nounits` (0.10 to 0.12).

  `jax._src.interpreters.partial_eval`, where JAX's own rules look it up; it has no public name.
  """
  from jax._src.interpreters import partial_eval

  partial_eval.partial_eval_jaxpr_nounits = wrapped(partial_eval.partial_eval_jaxpr_nounits)


def move_binders_to_front(jaxpr: Any, moved: Sequence[bool]) -> Any:
  """The jaxpr with some of its arguments before the others (0.10 to 0.12)."""
  from jax._src.interpreters import partial_eval

  return partial_eval.move_binders_to_front(jaxpr, moved)


def in_manual_region() -> bool:
  """Whether the code being traced is inside a `jax.shard_map` or `jax.pmap` (0.10 to 0.12)."""
  return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def in_no_trace() -> bool:
  """Whether this thread is outside of all transformations (0.10 to 0.12); no public name."""
  return _core.trace_state_clean()


def trace_key() -> Any:
  """What JAX's own caches of traces depend on besides the arguments (0.10 to 0.12)."""
  return _config.trace_context()


# -- loops -----------------------------------------------------------------------------------------
# What `jax.lax.scan` is once it is lowered: a `while_loop` on whole arrays (0.10 to 0.12). Takes
# the parameters of the primitive, whatever they are called. No public name.
scan_impl: Callable[..., Any] = _loops._scan_impl  # pyright: ignore[reportPrivateUsage]


def lowering_rule(primitive: Any) -> Callable[..., Any]:
  """A primitive's lowering rule for all platforms (0.10 to 0.12); none of them is public."""
  return _mlir._lowerings[primitive].rule  # pyright: ignore[reportPrivateUsage]


# -- caches --------------------------------------------------------------------------------------
def clearable_cache(max_size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """An LRU cache that `jax.clear_caches()` empties (0.10 to 0.12); no public API."""
  return _util.cache(max_size=max_size, trace_context_in_key=False)


def needs_devices(primitive: Any) -> None:
  """Has JAX tell a program's mesh to the lowering of programs with this primitive."""
  _dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_explicit(avals: Sequence[Any]) -> bool:
  """Whether these abstract values lie on a mesh with explicit axes (0.10 to 0.12)."""
  return any(aval.sharding.mesh._any_axis_explicit for aval in avals)


def spec_of(aval: Any) -> list[Any]:
  """The spec of an abstract value, with an entry for each dimension."""
  spec = list(aval.sharding.spec)
  return spec + [None] * (aval.ndim - len(spec))


def with_spec(aval: Any, operands: Sequence[Any], spec: Sequence[Any]) -> Any:
  """An abstract value that in an explicitly sharded program lies as `spec` says (0.10 to 0.12)."""
  mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
  if mesh is None or not mesh._any_axis_explicit:
    return aval
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  return aval.update(sharding=sharding)


ordered_io_effect: Any = _callback._OrderedIOEffect  # pyright: ignore[reportPrivateUsage]


def is_ordered_effect(effect: Any) -> bool:
  """Whether a JAX effect keeps program order (0.10 to 0.12)."""
  return _effects.ordered_effects.contains(effect)


def ordered_debug_effect() -> Any:
  """The effect of ordered debug prints (0.10 to 0.12)."""
  return _debugging.ordered_debug_effect


def closes_over(function: Any, kind: type[Any]) -> bool:
  """Whether a function that JAX made around a debug callback holds a value of the type."""
  cells = getattr(function, "__closure__", None) or ()
  return any(isinstance(cell.cell_contents, kind) for cell in cells)


def physical_aval(aval: Any) -> Any:
  """The abstract value that stands for a PRNG key's in a program (0.10 to 0.12); else `aval`."""
  return _core.physical_aval(aval)


def canonicalize_value(value: Any) -> Any:
  """A NumPy array in the dtype that JAX gives it under its `jax_enable_x64` (0.10 to 0.12).

  TypeError for what no JAX array can hold. `jax.numpy.asarray` would make a jax.Array of it.
  """
  return _dtypes.canonicalize_value(value)
