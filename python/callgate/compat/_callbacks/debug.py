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
from callgate._core import registry
from callgate._core.failures import JAX_CALLBACK, keep_consumer_error, take_consumer_error
from callgate._jax import callbacks, dispatch, lowering, tracing
from callgate._runtime import config, targets
from callgate._tap import site as _site
from callgate._tap.target import DEFAULT, Tap, start_channel
from callgate.compat._callbacks import engine

_NOTE = "callgate: raised in a jax.debug callback"


def _callback_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
  if not _is_ours(ctx, params["callback"]):
    return callbacks.debug_callback_lowering(ctx, *operands, **params)
  return _lower(ctx, operands, params["effect"], params["callback"])


def _print_lowering(ctx: Any, *operands: Any, ordered: bool, **params: Any) -> Any:
  if not _is_ours(ctx, params["fmt"]):
    return callbacks.debug_print_lowering(ctx, *operands, ordered=ordered, **params)
  effect = tracing.ordered_debug_effect if ordered else None
  return _lower(ctx, operands, effect, callbacks.debug_print_callback(params))


def _is_ours(ctx: Any, callback: Any) -> bool:
  if not engine.can_serve(ctx) or len(ctx.module_context.platforms) > 1:
    return False
  return config.installed() or tracing.closes_over(callback, engine.OnCallgate)


def _lower(ctx: Any, operands: Any, effect: Any, callback: Callable[..., Any]) -> Any:
  start_channel(DEFAULT)
  inputs = [engine.carrier(aval) for aval in ctx.avals_in]
  flat = (0,) * len(inputs)
  in_tree = jax.tree.structure((flat, {}))
  run = engine.host_function(callback, in_tree, inputs, [], api="debug.callback")

  def consume(_: Any, rows: list[Any]) -> None:
    for row in rows:
      try:
        run(*row[6])
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        keep_consumer_error(error, _NOTE)

  with registry.name_while_alive(callback, JAX_CALLBACK) as name:
    tap = Tap(name, DEFAULT, _callgate.python_consumer(consume))
  lowering.add_keepalive(ctx, tap)
  tree, dtypes = jax.tree.structure(flat), (None,) * len(inputs)
  site = _site.TapSite(tree=tree, name="jax.debug.callback", dtypes=dtypes)
  return engine.emit_carried(
    ctx, operands, inputs, [], effect if effect and tracing.is_ordered_effect(effect) else None,
    name=tap.name, attributes=_site.encode(site, (), (), "primal", repeated=False),
    has_side_effect=True, target=targets.TAP_TARGET,
  )  # fmt: skip


def after_barrier() -> None:
  """What `jax.effects_barrier()` does once its programs are done: as if they had waited."""
  _callgate.flush_channels(None)
  if (error := take_consumer_error(_NOTE)) is not None:
    text = "".join(traceback.format_exception(error)).rstrip()
    message = f"INTERNAL: CpuCallback error calling callback: {text}"
    raise jax.errors.JaxRuntimeError(message) from error


def register() -> None:
  """Puts the rules in place of JAX's; once."""
  engine.replace_lowering(callbacks.debug_callback_p, _callback_lowering)
  engine.replace_lowering(callbacks.debug_print_p, _print_lowering)
  dispatch.after_effects_barrier.append(after_barrier)
