# SPDX-License-Identifier: Apache-2.0
"""The primitives and the rules of JAX's own callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import debugging as _debugging
from jax._src import ffi as _ffi
from jax._src import mesh as _mesh
from jax._src import named_sharding as _named_sharding
from jax._src import sharding_impls as _sharding_impls

# -- JAX's callbacks: callgate.compat and callgate.install -----------------------------------------
# The primitives of `pure_callback` and `io_callback` and their own lowering rules (0.10 to 0.12);
# no public name, and none in sight: `jax.extend` has no callbacks.
pure_callback_p: Any = _callback.pure_callback_p
io_callback_p: Any = _callback.io_callback_p
pure_callback_lowering: Callable[..., Any] = _callback.pure_callback_lowering
io_callback_lowering: Callable[..., Any] = _callback.io_callback_lowering
# The primitives of `jax.debug.callback` and `jax.debug.print` and their own lowering rules (0.10 to
# 0.12); no public name.
debug_callback_p: Any = _debugging.debug_callback_p
debug_print_p: Any = _debugging.debug_print_p
debug_callback_lowering: Callable[..., Any] = _debugging.debug_callback_lowering
debug_print_lowering: Callable[..., Any] = _debugging.debug_print_lowering_rule


def debug_print_callback(params: Mapping[str, Any]) -> Callable[..., Any]:
  """Returns the function of flat arrays that JAX calls for a `jax.debug.print` (0.10 to 0.12)."""
  form = functools.partial(
    _debugging._format_print_callback,  # pyright: ignore[reportPrivateUsage]
    params["fmt"],
    dict(params["np_printoptions"]),
    params["has_placeholders"],
    params["logging_record"],
  )
  make = _debugging._make_flat_callback  # pyright: ignore[reportPrivateUsage]
  return make(params["in_tree"], form, params["static_args"])


# The batching rule of all of JAX's foreign calls, by `vmap_method` (0.10 to 0.12). No public name;
# `jax.ffi.ffi_call` includes it.
ffi_batching_rule: Callable[..., Any] = _ffi.ffi_batching_rule


def callback_sharding(
  context: Any, sharding: Any, result_avals: Sequence[Any], *, token: bool
) -> Any:
  """Returns JAX's annotation of a callback's operation; None if nothing is partitioned.

  With `token` the operation's first result is a token, which gets the first entry. Raises JAX's
  errors for partly automatic meshes and for a `sharding` that JAX doesn't support. Replaces
  `_callback_op_sharding` and the additions of `emit_python_callback` (0.10 to 0.12).
  """
  axes = context.module_context.axis_context
  annotation: Any = _callback._callback_op_sharding(  # pyright: ignore[reportPrivateUsage]
    axes, sharding, result_avals
  )
  if not (token and result_avals and isinstance(annotation, _sharding_impls.SdyArrayList)):
    return annotation
  shardings: Any = annotation.shardings
  of_token = _named_sharding.SdyArray(
    mesh_shape=(), dim_shardings=(), logical_device_ids=shardings[0].logical_device_ids
  )
  return _sharding_impls.SdyArrayList((of_token, *shardings))


def callback_scope(device: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
  """Returns (enter, leave) for the thread's settings during a JAX callback (0.10 to 0.12).

  `leave` takes the result of `enter`. The default device is `device`; the public
  `jax.default_device` is five times as slow. From 0.12 on the thread's mesh is set aside, too, for
  which there is no public name.
  """
  set_device = _config.default_device.swap_local
  restore_device = _config.default_device.set_local
  if jax.__version_info__ < (0, 12):
    return lambda: set_device(device), restore_device
  mesh: Any = _mesh  # these names are 0.12's
  concrete, abstract = mesh.device_context, mesh.abstract_mesh_context_manager
  no_mesh, no_abstract_mesh = mesh.empty_concrete_mesh, mesh.empty_abstract_mesh

  def enter() -> Any:
    return set_device(device), concrete.swap_local(no_mesh), abstract.swap_local(no_abstract_mesh)

  def leave(before: Any) -> None:
    restore_device(before[0])
    concrete.set_local(before[1])
    abstract.set_local(before[2])

  return enter, leave


def buffer_callback_lowering() -> Callable[..., Any] | None:
  """Returns JAX's own rule for `jax.experimental.buffer_callback` (0.10 to 0.12), if JAX has it.

  Used on platforms other than the CPU and CUDA. No public replacement.
  """
  try:
    from jax._src import buffer_callback
  except ImportError:
    return None
  return buffer_callback._buffer_callback_lowering  # pyright: ignore[reportPrivateUsage]
