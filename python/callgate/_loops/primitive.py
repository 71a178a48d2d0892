# SPDX-License-Identifier: Apache-2.0
"""The two primitives behind progress bars, with their rules.

`progress_p` marks the body of a loop as one whose steps are counted. Its operands only tie it to
the loop. The lowering of the loop around (`_loops/lowering.py`) takes it out and calls the board of
bars instead, once for many steps: `progress_call_p`, which is bound while lowering. A mark that
isn't at the top of a loop's body counts by itself, one call a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

from callgate import _callgate
from callgate._call.lowering import emit
from callgate._core.effects import PROGRESS_EFFECT
from callgate._core.errors import GateDefinitionError
from callgate._jax import lowering, tracing
from callgate._jax.tracing import Primitive

CALLEE = "callgate.progress"  # as src/cells/progress.h registers it
UNKNOWN = -1
NEVER = 1 << 30  # steps until an update that need not come
MOST_LANES = 100  # with a bar each; the board has room for some 250 bars


@dataclasses.dataclass(frozen=True)
class Bar:
  """A bar, as a program describes it; or one for each lane of what it is mapped over."""

  text: str  # for whoever draws: JSON
  every: int = 0  # steps between updates; 0 to choose by time
  total: int = UNKNOWN
  has_total: bool = False  # the mark's first operand is the total
  by_value: bool = False  # its first two are where a value ends, and where it is
  by_lane: bool = False
  lanes: tuple[int, ...] = ()  # of such a bar: sizes of the axes that it is mapped over
  engine: str = "callgate"
  # Keeps the file that the text names. A program that holds the bar keeps it, too.
  file: Any = dataclasses.field(default=None, compare=False, repr=False)

  @property
  def count(self) -> int:
    """How many bars it is."""
    return math.prod(self.lanes)

  @property
  def numbers(self) -> int:
    """How many of a mark's operands, the first ones, the bar reads; lanes are leading axes."""
    return 2 if self.by_value else int(self.has_total)


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
  """One bar for all lanes, or one for each."""
  (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
  if bar.by_lane:
    bar = dataclasses.replace(bar, lanes=(size, *bar.lanes))
    if bar.count > MOST_LANES:
      raise GateDefinitionError(
        f"progress: lanes='bars': expected at most {MOST_LANES} lanes, got {bar.count}; "
        "lanes='one' is a bar for all"
      )
  read, rest = operands[: bar.numbers], operands[bar.numbers :]
  every = bar.by_lane or any(dim is not None for dim in dims[: bar.numbers])
  lead = [
    jnp.broadcast_to(x, (size, *jnp.shape(x))) if dim is None else jnp.moveaxis(x, dim, 0)
    for x, dim in zip(read, dims, strict=False)
    if every
  ]
  if bar.has_total and every and not bar.by_lane:
    lead = [lead[0].max(axis=0)]  # the loop runs for the longest lane
  return progress_p.bind(*(lead or read), *rest, bar=bar), []


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
  if bar.file is not None and not lowering.is_export(context):
    lowering.add_keepalive(context, bar.file)
  call = {"kind": kind, "every": np.int64(bar.every), "total": np.int64(bar.total)}
  return emit(
    context, operands, context.avals_in, context.avals_out, name=CALLEE,
    attributes={"spec": bar.text, "progress": call}, has_side_effect=True,
  )  # fmt: skip


def _by_jax(context: Any, operands: Sequence[Any], kind: str, bar: Bar) -> Sequence[Any]:
  """Through JAX's own callbacks, where all devices run one program in one piece."""
  alone = lowering.device_count(context) == 1 or lowering.is_automatic(context)
  numbers = {"begin": 0, "begin_of": 1, "begin_at": 2, "update": 4, "end": 3}[kind]
  function = _host_function(kind, numbers, bar)
  (aval,) = context.avals_out

  def call(*values: Any) -> list[Any]:
    if not alone:
      return [jnp.full(aval.shape, NEVER if kind == "update" else 0, np.int32)]
    result = jax.ShapeDtypeStruct(aval.shape, np.int32)
    # A number of each anchor is enough for XLA to wait for it; the rest is not to be gathered.
    anchors = [tracing.unvaried(x)[(slice(1),) * x.ndim] for x in values[numbers:]]
    return [io_callback(function, result, *values[:numbers], *anchors)]

  return mlir.lower_fun(call, multiple_results=True)(context, *operands)


@tracing.clearable_cache(max_size=256)
def _host_function(kind: str, numbers: int, bar: Bar) -> Callable[..., Any]:
  """The function that JAX calls with the numbers, and then with anchors."""

  def begin(lane: int, *given: Any) -> int:
    total = int(given[0]) if kind == "begin_of" else bar.total
    first, last = map(float, given) if kind == "begin_at" else (np.nan, np.nan)
    own = lane if bar.lanes else -1
    return _callgate.progress_begin(bar.text, bar.every, total, own, first, last)

  def update(handle: Any, count: Any, at: Any, going: Any) -> int:
    if going:
      return _callgate.progress_update(int(handle), int(count), float(at))
    _callgate.progress_end(int(handle), int(count), float(at))
    return NEVER

  def call(*values: Any) -> Any:
    each = list(zip(*(np.ravel(value) for value in values[:numbers]), strict=True))
    match kind:
      case "update":
        return np.int32(min(update(*one) for one in each))
      case "end":
        for handle, count, at in each:
          _callgate.progress_end(int(handle), int(count), float(at))
        return np.int32(0)
      case _:
        each = each or [()] * bar.count
        handles = [begin(lane, *one) for lane, one in enumerate(each)]
        return np.array(handles, np.int32).reshape(_handles_of(bar))

  return call


def _handles_of(bar: Bar) -> tuple[int, ...]:
  """The shape of the handles: one, or those of the lanes."""
  return (bar.count,) if bar.lanes else ()


def _call_result(kind: str, bar: Bar) -> Any:
  shape = _handles_of(bar) if kind.startswith("begin") else ()
  return tracing.shaped_array(shape, np.dtype(np.int32), ())


progress_p.def_impl(_nothing)
progress_p.def_effectful_abstract_eval(lambda *_, **__: ((), {PROGRESS_EFFECT}))
progress_call_p.def_effectful_abstract_eval(
  lambda *_, kind, bar: ((_call_result(kind, bar),), {PROGRESS_EFFECT})
)
ad.primitive_jvps[progress_p] = lambda x, _, *, bar: (progress_p.bind(*x, bar=bar), [])
ad.primitive_transposes[progress_p] = lambda _, *operands, **__: [None] * len(operands)
batching.primitive_batchers[progress_p] = _batch
mlir.register_lowering(progress_p, _nothing)
mlir.register_lowering(progress_call_p, lambda context, *x, **params: _by_jax(context, x, **params))
for platform in ("cpu", "cuda"):
  mlir.register_lowering(progress_p, _lower, platform=platform)
  mlir.register_lowering(progress_call_p, _call_lower, platform=platform)
