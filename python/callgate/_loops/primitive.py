# SPDX-License-Identifier: Apache-2.0
"""The two primitives behind progress bars, with their rules.

`progress_p` marks the body of a loop as one whose steps are counted. Its operands only tie it to
the loop. The lowering of the loop around (`_loops/lowering.py`) takes it out and calls the board of
bars instead, once for many steps: `progress_call_p`, which is bound while lowering. A mark that
isn't at the top of a loop's body counts by itself, one call a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

from callgate import _callgate
from callgate._call.lowering import emit
from callgate._core.effects import PROGRESS_EFFECT, ProgressEffect
from callgate._jax import lowering, tracing
from callgate._jax.tracing import Primitive

CALLEE = "callgate.progress"  # as src/core/progress.h registers it
UNKNOWN = -1
NEVER = 1 << 30  # steps until an update that need not come


@dataclasses.dataclass(frozen=True)
class Bar:
  """A bar, as a program describes it."""

  text: str  # for whoever draws: JSON
  every: int = 0  # steps between updates; 0 to choose by time
  total: int = UNKNOWN
  has_total: bool = False  # the mark's first operand is the total
  engine: str = "callgate"


progress_p = Primitive("progress")
progress_p.multiple_results = True
progress_call_p = Primitive("progress_call")
progress_call_p.multiple_results = True


def _nothing(*_: Any, **__: Any) -> list[Any]:
  """Outside of programs there is no loop to count, but Python's own (`jax.disable_jit`)."""
  return []


def _batch(
  operands: Sequence[Any], dims: Sequence[Any], *, bar: Bar
) -> tuple[Sequence[Any], Sequence[Any]]:
  """One bar for all lanes."""
  if bar.has_total and dims[0] is not None:
    operands = [operands[0].max(axis=dims[0]), *operands[1:]]  # the loop runs for the longest lane
  return progress_p.bind(*operands, bar=bar), []


def _lower(context: Any, *operands: Any, bar: Bar) -> Sequence[Any]:
  """A mark that no loop took out."""
  return _emit(context, operands, "step", bar) if _is_ours(context, bar) else []


def _call_lower(context: Any, *operands: Any, kind: str, bar: Bar) -> Sequence[Any]:
  lower = _emit if _is_ours(context, bar) else _by_jax
  return lower(context, operands, kind, bar)


def _is_ours(context: Any, bar: Bar) -> bool:
  # XLA refuses a partitioned custom call with side effects, but for those of JAX's callbacks.
  return bar.engine == "callgate" and not lowering.is_automatic(context)


def _emit(context: Any, operands: Sequence[Any], kind: str, bar: Bar) -> Sequence[Any]:
  call = {"kind": kind, "every": np.int64(bar.every), "total": np.int64(bar.total)}
  return emit(
    context, operands, context.avals_in, context.avals_out, name=CALLEE,
    attributes={"spec": bar.text, "progress": call}, has_side_effect=True,
  )  # fmt: skip


def _by_jax(context: Any, operands: Sequence[Any], kind: str, bar: Bar) -> Sequence[Any]:
  """Through JAX's own callbacks, where all devices run one program in one piece."""
  alone = lowering.device_count(context) == 1 or lowering.is_automatic(context)
  scalars = {"begin": 0, "begin_of": 1, "update": 2, "end": 2}[kind]  # the rest are anchors
  function = _host_function(kind, bar)

  def call(*values: Any) -> list[Any]:
    if not alone:
      return [jax.numpy.int32(NEVER if kind == "update" else 0)]
    result = jax.ShapeDtypeStruct((), np.int32)
    return [io_callback(function, result, *values[:scalars])]

  return mlir.lower_fun(call, multiple_results=True)(context, *operands)


@functools.lru_cache(maxsize=256)
def _host_function(kind: str, bar: Bar) -> Callable[..., Any]:
  def call(*values: Any) -> Any:
    numbers = [int(value) for value in values]
    match kind:
      case "update":
        result = _callgate.progress_update(*numbers)
      case "end":
        result = _callgate.progress_end(*numbers)
      case _:
        result = _callgate.progress_begin(bar.text, bar.every, *(numbers or [bar.total]))
    return np.int32(result or 0)

  return call


_INT = tracing.shaped_array((), np.dtype(np.int32), ())
progress_p.def_impl(_nothing)
progress_p.def_effectful_abstract_eval(lambda *_, **__: ((), {PROGRESS_EFFECT}))
progress_call_p.def_effectful_abstract_eval(lambda *_, **__: ((_INT,), {PROGRESS_EFFECT}))
ad.primitive_jvps[progress_p] = lambda x, _, *, bar: (progress_p.bind(*x, bar=bar), [])
ad.primitive_transposes[progress_p] = lambda _, *operands, **__: [None] * len(operands)
batching.primitive_batchers[progress_p] = _batch
mlir.register_lowering(progress_p, _nothing)
mlir.register_lowering(progress_call_p, lambda context, *x, **params: _by_jax(context, x, **params))
for platform in ("cpu", "cuda"):
  mlir.register_lowering(progress_p, _lower, platform=platform)
  mlir.register_lowering(progress_call_p, _call_lower, platform=platform)
tracing.allow_effect(ProgressEffect, ordered=False, kept=True)
