"""`jax.debug.callback` and `jax.debug.print` on callgate's taps.

JAX's two primitives keep all their rules; replaced is what a CPU program holds for them: a tap to
the callback instead of a call of it. So the program no longer waits for Python. What the callback
sees is the same, in the same order, and `jax.effects_barrier()` still waits for it. An exception
can't stop the program any more: `jax.effects_barrier()` raises it, as JaxRuntimeError with its
traceback as text; `callgate.barrier()` raises itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax

from callgate import _callgate
from callgate._call.lowering import emit
from callgate._core import registry
from callgate._core.failures import JAX_CALLBACK, keep_consumer_error, take_consumer_error
from callgate._jax import callbacks, dispatch, lowering, tracing
from callgate._runtime import targets
from callgate._tap import site as _site
from callgate._tap.site import TapSite
from callgate._tap.target import DEFAULT, Tap, start_channel
from callgate.compat._callbacks.engine import (
  OnCallgate,
  can_serve,
  carrier,
  convert,
  host_function,
  replace_lowering,
)
from callgate.compat._callbacks.option import installed


def _is_ours(ctx: Any, callback: Any) -> bool:
  if not can_serve(ctx) or len(ctx.module_context.platforms) > 1:
    return False
  return installed() or tracing.closes_over(callback, OnCallgate)


def _callback_lowering(
  ctx: Any, *operands: Any, effect: Any, partitioned: bool, callback: Any, **params: Any
) -> Any:
  if not _is_ours(ctx, callback):
    return callbacks.debug_callback_lowering(
      ctx, *operands, effect=effect, partitioned=partitioned, callback=callback, **params
    )
  return _lower(ctx, operands, effect, callback)


def _print_lowering(ctx: Any, *operands: Any, ordered: bool, **params: Any) -> Any:
  if not _is_ours(ctx, params["fmt"]):
    return callbacks.debug_print_lowering(ctx, *operands, ordered=ordered, **params)
  effect = tracing.ordered_debug_effect() if ordered else None
  return _lower(ctx, operands, effect, callbacks.debug_print_callback(**params))


def _lower(ctx: Any, operands: Any, effect: Any, callback: Callable[..., Any]) -> Any:
  start_channel(DEFAULT)
  inputs = [carrier(aval) for aval in ctx.avals_in]
  flat = (0,) * len(inputs)
  in_tree = jax.tree.structure((flat, {}))
  run = host_function(callback, in_tree, inputs, [], api="debug.callback")
  consumer = _callgate.python_consumer(_consumer_of(run))
  with registry.name_while_alive(callback, JAX_CALLBACK) as name:
    tap = Tap(name, DEFAULT, consumer)
  lowering.add_keepalive(ctx, tap)
  site = TapSite(
    tree=jax.tree.structure(flat), name="jax.debug.callback", dtypes=(None,) * len(inputs)
  )
  ordered = effect is not None and tracing.is_ordered_effect(effect)
  _, token = emit(
    ctx,
    [convert(ctx, value, it.aval) for value, it in zip(operands, inputs, strict=True)],
    [it.aval for it in inputs],
    [],
    name=tap.name,
    attributes=_site.encode(site, (), (), "primal", repeated=False),
    has_side_effect=True,
    token=lowering.token_before(ctx, effect) if ordered else None,
    target=targets.TAP_TARGET,
  )
  if ordered:
    lowering.set_token_after(ctx, effect, token)
  return []


def _consumer_of(run: Callable[..., Any]) -> Callable[..., None]:
  def consume(_: Any, rows: list[Any]) -> None:
    for row in rows:
      try:
        run(*row[6])
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        keep_consumer_error(error, _NOTE)

  return consume


_NOTE = "callgate: raised in a jax.debug callback"


def after_barrier() -> None:
  """What `jax.effects_barrier()` does once its programs are done: as if they had waited."""
  _callgate.flush_channels(None)
  error = take_consumer_error(_NOTE)
  if error is not None:
    text = "".join(traceback.format_exception(error)).rstrip()
    raise jax.errors.JaxRuntimeError(
      f"INTERNAL: CpuCallback error calling callback: {text}"
    ) from error


def register() -> None:
  """Puts the rules in place of JAX's; once."""
  replace_lowering(callbacks.debug_callback_p, _callback_lowering)
  replace_lowering(callbacks.debug_print_p, _print_lowering)
  dispatch.after_effects_barrier(after_barrier)
