# SPDX-License-Identifier: Apache-2.0
"""JAX's lowering: FFI calls, tokens, platforms and meshes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import ffi as _ffi
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir.dialects import hlo as _hlo

from callgate._jax.partitioner import set_sharding_rule
from callgate._jax.tracing import is_explicit, ordered_io_effect


# -- lowering --------------------------------------------------------------------------------------
# `jax.ffi.ffi_lowering` is public but takes no token and gives no operation to annotate.
def emit_ffi_call(
  context: Any,
  target: str,
  operands: Sequence[Any],
  operand_avals: Sequence[Any],
  result_avals: Sequence[Any],
  attributes: Mapping[str, Any],
  *,
  has_side_effect: bool,
  aliases: Mapping[int, int],
  order: Any = None,
  gives_token: bool = True,
  sharding: Any = None,
  rule: Any = None,
  named: str = "",
) -> Sequence[Any]:
  """Emits a typed FFI custom call, in the order of an effect if one is given; returns its results.

  `named` is the operation's name in profiles, after "callgate/".

  Without `gives_token` later operations in that order must depend on a result.

  Tokens of effects are not public (0.10 to 0.12).
  """
  gives_token = gives_token and order is not None
  token = [] if order is None else [context.tokens_in.get(order)]
  abstract = [_core.abstract_token for _ in token]
  offset, skipped = len(token), int(gives_token)
  emit = _ffi.build_ffi_lowering_function(
    target,
    has_side_effect=has_side_effect,
    operand_output_aliases={i + offset: o + skipped for i, o in aliases.items()} or None,
  )
  avals = {
    "avals_in": [*abstract, *operand_avals],
    "avals_out": [*abstract[:skipped], *result_avals],
  }
  with _location(context, named):
    operation = emit(context.replace(**avals), *token, *operands, **attributes)
  if sharding is not None:
    _mlir.set_sharding(context.module_context, operation, sharding)
  if rule is not None:
    set_sharding_rule(operation, rule)
  results = list(operation.results)
  if gives_token:
    _set_token_after(context, order, results.pop(0))
  return results


@dataclasses.dataclass
class _Named:
  name: str


def _location(context: Any, named: str) -> Any:
  """Returns the source location of the operation being lowered, with a name (0.10 to 0.12)."""
  traceback = getattr(context, "traceback", None)
  if not named or traceback is None:
    return contextlib.nullcontext()
  primitive: Any = _Named(f"callgate/{named}")
  return _mlir.source_info_to_location(
    context.module_context, primitive, context.name_stack, traceback
  )


def has_open_shapes(avals: Sequence[Any]) -> bool:
  """Returns True if an array's shape is symbolic, in a program for `jax.export` (0.10 to 0.12)."""
  return not all(_core.is_constant_shape(aval.shape) for aval in avals)


def _set_token_after(context: Any, effect: Any, token: Any) -> None:
  """Orders later calls with this effect after the one being lowered."""
  context.set_tokens_out(context.tokens_in.update_tokens(_mlir.TokenSet({effect: token})))


def platforms_of(context: Any) -> tuple[str, ...]:
  """Returns the platforms that the running rule lowers for (0.10 to 0.12)."""
  return tuple(context.platforms or context.module_context.platforms)


def lower_each_platform(
  context: Any,
  rules: Mapping[str, Callable[..., Sequence[Any]]],
  effects: Any,
  operands: Sequence[Any],
) -> Sequence[Any]:
  """Lowers by `rules` for each platform; a program for several chooses when it runs.

  JAX does so for rules registered by platform, but not for uncached ones, because it mistakes the
  context's results for a list (0.10 to 0.12).
  """
  context_of_lists = context.replace(avals_out=list(context.avals_out))
  results = _mlir.lower_per_platform(
    context_of_lists, "callgate", dict(rules), None, effects, *operands
  )
  if context_of_lists.tokens_out is not None:
    context.set_tokens_out(context_of_lists.tokens_out)
  return results


def lower_in_order(
  context: Any, function: Callable[..., Any], operands: Sequence[Any], effect: Any
) -> Sequence[Any]:
  """Lowers `function`, which contains one ordered JAX callback, in the order of our `effect`.

  `jax.interpreters.mlir.lower_fun` is public, tokens are not (0.10 to 0.12).
  """
  inner = context.replace(
    tokens_in=_mlir.TokenSet({ordered_io_effect: context.tokens_in.get(effect)})
  )
  results = _mlir.lower_fun(function, multiple_results=True)(inner, *operands)
  _set_token_after(context, effect, inner.tokens_out.get(ordered_io_effect))
  return results


def device_count(context: Any) -> int:
  """Returns the number of the program's devices (0.10 to 0.12: private axis contexts)."""
  axes = context.module_context.axis_context
  if hasattr(axes, "num_devices"):
    return axes.num_devices
  mesh = getattr(axes, "mesh", None)
  return mesh.size if mesh is not None else 1


def program_devices(context: Any) -> tuple[Any, ...] | None:
  """Returns the devices of the program being lowered; None in a manual region (0.10 to 0.12)."""
  axes = context.module_context.axis_context
  if not isinstance(axes, _sharding_impls.ShardingContext):
    return None
  devices = axes.device_assignment
  return tuple(devices) if devices is not None else (None,) * axes.num_devices


def is_automatic(context: Any) -> bool:
  """Returns True if XLA splits the arrays of the call being lowered, along any mesh axes."""
  return is_partitioned(context) or is_partly_manual(context)


# XLA's partitioner supports a token beside another value in a partly manual program (0.11 to 0.12).
# In 0.10 it ends the process: "Check failed: buffer != nullptr" in shape.h.
TOKENS_IN_PARTLY_MANUAL = jax.__version_info__ >= (0, 11)


def is_partly_manual(context: Any) -> bool:
  """Returns True if the call being lowered is in a `jax.shard_map` with automatic mesh axes."""
  axes = context.module_context.axis_context
  manual, mesh = getattr(axes, "manual_axes", ()), getattr(axes, "mesh", None)
  return mesh is not None and 0 < len(manual) < len(mesh.axis_names)


def manual_devices(context: Any) -> tuple[int, ...]:
  """Returns the ids of the mesh's devices in a fully manual region; () elsewhere (0.10 to 0.12)."""
  axes = context.module_context.axis_context
  devices = getattr(getattr(axes, "mesh", None), "devices", None)
  if devices is None or is_automatic(context):
    return ()
  return tuple(device.id for device in devices.flat)


def mesh_axes(context: Any) -> tuple[tuple[str, int], ...]:
  """Returns names and sizes of the mesh of the program being lowered; () if unknown."""
  axes = context.module_context.axis_context
  meshes = [getattr(axes, "mesh", None), getattr(axes, "abstract_mesh", None)]
  for aval in (*context.avals_in, *context.avals_out):
    meshes.append(getattr(getattr(aval, "sharding", None), "mesh", None))
  for mesh in (*meshes, _mesh.thread_resources.env.physical_mesh):
    if mesh is not None and not mesh.empty:
      return tuple((str(name), int(size)) for name, size in mesh.shape.items())
  return ()


def annotate(context: Any, results: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
  """Gives values the shardings of their types in an explicitly sharded program."""
  if not is_explicit(avals):
    return list(results)
  return [
    _mlir.lower_with_sharding_in_types(context, value, aval)
    for value, aval in zip(results, avals, strict=True)
  ]


# The device's position in the program, as a value of a fully manual program.
partition_id: Callable[[], Any] = _hlo.partition_id


def is_partitioned(context: Any) -> bool:
  """Returns True if XLA partitions the program being lowered over several devices (0.10 to 0.12).

  False inside a fully manual `jax.shard_map`. Replaces the type of `axis_context`; no public name.
  """
  axes = context.module_context.axis_context
  return isinstance(axes, _sharding_impls.ShardingContext) and axes.num_devices > 1


def add_keepalive(context: Any, value: object) -> None:
  """Keeps `value` alive as long as the program being lowered (0.10 to 0.12).

  `jax.export` refuses such a program, as it refuses JAX's own callbacks. No public replacement.
  """
  context.module_context.add_keepalive(value)


def is_export(context: Any) -> bool:
  """Returns True if the program being lowered is for `jax.export` (0.10 to 0.12); not public."""
  return bool(context.module_context.lowering_parameters.for_export)
