# SPDX-License-Identifier: Apache-2.0
"""JAX's own callbacks on callgate's engine: pure, io and debug callbacks.

JAX's primitives keep all their rules. Only their call in a program for the CPU or a CUDA GPU
changes: it becomes a call of callgate's gate or, for debug callbacks, a tap, so that the program
doesn't wait. `callgate.install()` does that for all callbacks of the process, the functions of this
module for their own calls. JAX's own lowering remains on other platforms, and in programs that XLA
partitions over several devices (except inside `jax.shard_map`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import io_callback as _jax_io_callback
from jax.interpreters import mlir

from callgate import _callgate, _part
from callgate._core import foreign, registry, shown
from callgate._core.failures import JAX_CALLBACK, keep_consumer_error, take_consumer_error
from callgate._jax import callbacks, dispatch, lowering, tracing
from callgate._runtime import config, targets
from callgate._tap import site as _site
from callgate._tap.print import print as debug_print
from callgate._tap.target import DEFAULT, Tap, start_channel
from callgate.compat._callbacks import engine
from callgate.compat._callbacks.engine import OnCallgate

__all__ = ["debug_callback", "debug_print", "io_callback", "pure_callback"]
_NOTE = "callgate: raised in a jax.debug callback"


def pure_callback(
  callback: Callable[..., Any], result_shape_dtypes: Any, *args: Any,
  sharding: jax.sharding.Sharding | None = None, vmap_method: str | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
  """Calls a host function like `jax.pure_callback`, on callgate's engine.

  Args:
    callback: a hashable function of pytrees of jax.Arrays (committed to the first local CPU device)
      without side effects. It returns a pytree of arrays like `result_shape_dtypes`.
    result_shape_dtypes: a pytree of anything with `.shape` and `.dtype`.
    *args: pytrees of arrays for the callback.
    sharding: a SingleDeviceSharding with the device that calls.
    vmap_method: as in JAX; with None `jax.vmap` raises an error.
    **kwargs: pytrees of arrays for the callback, by keyword.

  Returns:
    A pytree of jax.Arrays like `result_shape_dtypes`.

  Raises:
    ValueError: for an unknown `vmap_method`, a 64-bit result without `jax_enable_x64`, or a
      derivative.
    jax.errors.JaxRuntimeError: the callback raised, or its results have another shape or dtype.

  Example:
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from callgate.compat.callbacks import pure_callback
    >>> x = jnp.arange(3.0)
    >>> jax.jit(lambda x: pure_callback(np.square, x, x))(x)
    Array([0., 1., 4.], dtype=float32)
  """
  kwargs |= {"sharding": sharding, "vmap_method": vmap_method}
  return jax.pure_callback(OnCallgate(callback), result_shape_dtypes, *args, **kwargs)


def io_callback(
  callback: Callable[..., Any], result_shape_dtypes: Any, *args: Any,
  sharding: jax.sharding.Sharding | None = None, ordered: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
  """Calls a host function like `jax.experimental.io_callback`, on callgate's engine.

  Other arguments, results and errors are as for `pure_callback`.

  Args:
    callback: a function as for `pure_callback`, which may have side effects.
    result_shape_dtypes: as for `pure_callback`; None for no result.
    ordered: True keeps calls in program order, also from one program to the next. `jax.vmap` then
      raises a ValueError.

  Example:
    >>> import jax
    >>> from callgate.compat.callbacks import io_callback
    >>> seen = []
    >>> jax.jit(lambda x: io_callback(lambda x: seen.append(float(x)), None, x))(2.0)
    >>> jax.effects_barrier()
    >>> seen
    [2.0]
  """
  kwargs |= {"sharding": sharding, "ordered": ordered}
  return _jax_io_callback(OnCallgate(callback), result_shape_dtypes, *args, **kwargs)


def debug_callback(
  callback: Callable[..., None] | None = None, *args: Any, ordered: bool = False,
  partitioned: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
  """Calls a host function like `jax.debug.callback`; the program does not wait for it.

  If the callback raises, `jax.effects_barrier()` raises a JaxRuntimeError, and `callgate.barrier()`
  raises the original exception.

  Args:
    callback: a function of pytrees of jax.Arrays (committed to the first local CPU device), which
      runs on callgate's thread. Leave it out to get a function that takes the callback and its
      arguments.
    *args: pytrees for the callback. Leaves that are not arrays are passed unchanged.
    ordered: True keeps calls in program order, also from one program to the next.
    partitioned: True calls with each device's part in a program over several devices.
    **kwargs: pytrees for the callback, by keyword.

  Raises:
    TypeError: the callback is not callable.

  Example:
    >>> import jax
    >>> from callgate.compat.callbacks import debug_callback
    >>> seen = []
    >>> jax.jit(lambda x: debug_callback(lambda x: seen.append(float(x)), x))(2.0)
    >>> jax.effects_barrier()
    >>> seen
    [2.0]
  """
  two_calls = jax.debug.callback(ordered=ordered, partitioned=partitioned)

  def call(callback: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    two_calls(OnCallgate(callback) if callable(callback) else callback, *args, **kwargs)

  return call if callback is None else call(callback, *args, **kwargs)


def _lowering(api: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
  """Emits the call of a new callee around the callback, if callgate's engine runs it."""
  callback, is_io, ordered = params["callback"], api == "io_callback", params.get("ordered")
  function = callback.callback_func
  is_marked = isinstance(function, OnCallgate)
  if not (engine.can_serve(ctx) and (is_marked or config.installed())):
    rule = callbacks.io_callback_lowering if is_io else callbacks.pure_callback_lowering
    return rule(ctx, *operands, **params)
  if len(ctx.module_context.platforms) > 1:
    raise NotImplementedError("multi-platform lowering for python_callback")
  function = function.function if is_marked else function
  if is_io:
    engine.end_before_dispatch_returns(ctx)
  elif "cpu" not in ctx.module_context.platforms:
    # On a GPU the call runs after its dispatch, so only the barrier can raise for a dropped result.
    dispatch.mark_host_callbacks(ctx)
  run = engine.host_function(ctx, function, callback.in_tree, api)
  with registry.name_while_alive(JAX_CALLBACK + registry.name_of(function)) as name:
    callee = _callgate.Callee(name, run, owned_inputs=True, flat_results=True)
  lowering.add_keepalive(ctx, callee)
  where = callbacks.callback_sharding(ctx, params["sharding"], ctx.avals_out, token=bool(ordered))
  effect = tracing.ordered_io_effect if ordered else None
  options = {"has_side_effect": is_io, "sharding": where, "on_error": "return"}
  return engine.emit_carried(ctx, operands, effect, name=callee.name, **options)


def _debug_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
  """Emits a tap to the callback, or to the printing function, if callgate's engine runs it."""
  printed = "fmt" in params
  given = params["fmt" if printed else "callback"]
  served = engine.can_serve(ctx) and len(ctx.module_context.platforms) == 1
  if not (served and (config.installed() or tracing.closes_over(given, OnCallgate))):
    rule = callbacks.debug_print_lowering if printed else callbacks.debug_callback_lowering
    return rule(ctx, *operands, **params)
  effect = tracing.ordered_debug_effect if params.get("ordered") else params.get("effect")
  callback = callbacks.debug_print_callback(params) if printed else given
  start_channel(DEFAULT)
  flat = (0,) * len(operands)
  run = engine.host_function(ctx, callback, jax.tree.structure((flat, {})), "debug.callback")

  def consume(_: Any, rows: list[Any]) -> None:
    for row in rows:
      try:
        run(*row[6])
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        keep_consumer_error(error, _NOTE)

  with registry.name_while_alive(JAX_CALLBACK + registry.name_of(callback)) as name:
    tap = Tap(name, DEFAULT, _callgate.python_consumer(consume))
  lowering.add_keepalive(ctx, tap)
  tree, dtypes = jax.tree.structure(flat), (None,) * len(operands)
  site = _site.TapSite(tree=tree, name="jax.debug.callback", dtypes=dtypes)
  return engine.emit_carried(
    ctx, operands, effect if effect and tracing.is_ordered_effect(effect) else None,
    name=tap.name, attributes=_site.encode(site, (), "primal", repeated=False),
    has_side_effect=True, target=targets.tap_target(ctx.avals_in),
  )  # fmt: skip


def _after_barrier() -> None:
  """Ends `jax.effects_barrier()`: waits for debug callbacks and raises their errors."""
  _callgate.flush_channels(None)
  if (error := take_consumer_error(_NOTE)) is not None:
    message = f"INTERNAL: CpuCallback error calling callback: {foreign.traceback_of(error)}"
    raise jax.errors.JaxRuntimeError(message) from error


@_part.once
def register() -> None:
  """Registers callgate's lowerings in place of JAX's, once."""
  for primitive, rule in (
    (callbacks.pure_callback_p, functools.partial(_lowering, "pure_callback")),
    (callbacks.io_callback_p, functools.partial(_lowering, "io_callback")),
    (callbacks.debug_callback_p, _debug_lowering),
    (callbacks.debug_print_p, _debug_lowering),
  ):
    # Not cached, as in JAX, because each call site has its own callback.
    for platform in ("cpu", "cuda"):
      mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
  _part.on("effects barrier", _after_barrier)


register()

shown.show(*map(globals().get, __all__))
