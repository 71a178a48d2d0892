# SPDX-License-Identifier: Apache-2.0
"""The two primitives behind progress bars, with their rules, and the calls that a loop makes.

`progress_p` marks the body of a loop whose steps are counted. Its operands only tie it to the loop.
The lowering of the loop (`_loops/lowering.py`) removes the mark and instead calls the board of
bars, once for many steps, by `progress_call_p`, which is bound while lowering. A mark that isn't at
the top of a loop's body, or of a jitted function there, counts by itself, with one call a step.
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
from callgate._call import jax_engine
from callgate._call.lowering import emit
from callgate._core.effects import PROGRESS_EFFECT
from callgate._core.errors import GateDefinitionError
from callgate._jax import lowering, tracing
from callgate._jax.tracing import Primitive

_Values = Sequence[Any]
CALLEE = "callgate.progress"  # as src/cells/progress.h registers it
UNKNOWN = -1
NEVER = 1 << 30  # the number of steps until an update that need not come
MOST_LANES = 100  # the most lanes with bars; the board has room for about 250 bars


@dataclasses.dataclass(frozen=True)
class Bar:
  """A bar as a program describes it; or one bar for each lane of the mapped axes."""

  text: str  # JSON, for the drawer
  every: int = 0  # steps between updates; 0 chooses by time
  total: int = UNKNOWN
  has_total: bool = False  # the mark's first operand is the total
  by_value: bool = False  # the mark's first two operands are the end and the value
  by_lane: bool = False
  lanes: tuple[int, ...] = ()  # sizes of the mapped axes, for a bar by lane
  engine: str = "callgate"
  may_fail: bool = False  # a program that can't have a bar runs without one, and raises no error
  # Keeps the file that the text names. A program that holds the bar keeps the file, too.
  file: Any = dataclasses.field(default=None, compare=False, repr=False)

  @property
  def count(self) -> int:
    """The number of bars."""
    return math.prod(self.lanes)

  @property
  def numbers(self) -> int:
    """The number of a mark's first operands that the bar reads; lanes are leading axes."""
    return 2 if self.by_value else int(self.has_total)


progress_p = Primitive("progress")
progress_p.multiple_results = True
progress_call_p = Primitive("progress_call")
progress_call_p.multiple_results = True


def _nothing(*_: Any, **__: Any) -> list[Any]:
  """Outside of programs there is no loop to count, except Python's (`jax.disable_jit`)."""
  return []


def _batch(operands: _Values, dims: _Values, *, bar: Bar) -> tuple[_Values, _Values]:
  """Returns one bar for all lanes, or one for each."""
  (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
  if bar.by_lane:
    bar = dataclasses.replace(bar, lanes=(size, *bar.lanes))
    if bar.count > MOST_LANES:
      raise GateDefinitionError(
        f"progress: lanes='bars': expected at most {MOST_LANES} lanes, got {bar.count}; use "
        "lanes='one' for one bar in total"
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


def _lower(context: Any, *operands: Any, bar: Bar) -> _Values:
  """Lowers a mark that no loop has removed."""
  return _emit(context, operands, "step", bar) if _is_ours(context, bar) else []


def _call_lower(context: Any, *operands: Any, kind: str, bar: Bar) -> _Values:
  lower = _emit if _is_ours(context, bar) else _by_jax
  return lower(context, operands, kind, bar)


def _is_ours(context: Any, bar: Bar) -> bool:
  # XLA refuses partitioned custom calls with side effects, except JAX's callbacks.
  return bar.engine == "callgate" and not lowering.is_automatic(context)


def _emit(context: Any, operands: _Values, kind: str, bar: Bar) -> _Values:
  if bar.file is not None and not lowering.is_export(context):
    lowering.add_keepalive(context, bar.file)
  return emit(
    context, operands, context.avals_in, context.avals_out, name=CALLEE,
    attributes={"spec": bar.text, **_attributes(kind, bar)}, has_side_effect=True,
  )  # fmt: skip


def _attributes(kind: str, bar: Bar) -> dict[str, Any]:
  numbers = {"every": np.int64(bar.every), "total": np.int64(bar.total)}
  return {"progress": {"kind": kind, **numbers}}


def _by_jax(context: Any, operands: _Values, kind: str, bar: Bar) -> _Values:
  """Uses JAX's own callbacks, in programs where all devices run the whole program."""
  try:
    jax_engine.refuse_program(context, "a progress bar", bar.engine)
    alone = lowering.device_count(context) == 1 or lowering.is_automatic(context)
  except GateDefinitionError:
    if not bar.may_fail:
      raise
    alone = False
  function = _host_function(kind, bar)
  (aval,) = context.avals_out

  def call(*values: Any) -> list[Any]:
    if not alone:
      return [jnp.full(aval.shape, NEVER if kind == "update" else 0, np.int32)]
    result = jax.ShapeDtypeStruct(aval.shape, np.int32)
    return [io_callback(function, result, *map(tracing.unvaried, values))]

  return mlir.lower_fun(call, multiple_results=True)(context, *operands)


@tracing.clearable_cache(max_size=256)
def _host_function(kind: str, bar: Bar) -> Callable[..., Any]:
  """Returns the function that JAX calls; it keeps its bars, which a nested loop begins again."""
  function = _callgate.progress_call(bar.text, _attributes(kind, bar))

  def call(*values: Any) -> Any:
    shape = _shape_of(kind, bar)  # keeps the bar, which keeps its file
    arrays = [np.array(value, order="C") for value in values]
    return np.array(function(arrays, shape), np.int32).reshape(shape)

  return call


def _shape_of(kind: str, bar: Bar) -> tuple[int, ...]:
  """Returns the shape of a call's result: one number, or the handles of the lanes."""
  return (bar.count,) if bar.lanes and kind.startswith("begin") else ()


progress_p.def_impl(_nothing)
progress_p.def_effectful_abstract_eval(lambda *_, **__: ((), {PROGRESS_EFFECT}))
progress_call_p.def_effectful_abstract_eval(
  lambda *_, kind, bar: (
    (tracing.shaped_array(_shape_of(kind, bar), np.dtype(np.int32), ()),),
    {PROGRESS_EFFECT},
  )
)
ad.primitive_jvps[progress_p] = lambda x, _, *, bar: (progress_p.bind(*x, bar=bar), [])
ad.primitive_transposes[progress_p] = lambda _, *operands, **__: [None] * len(operands)
batching.primitive_batchers[progress_p] = _batch
mlir.register_lowering(progress_p, _nothing)
mlir.register_lowering(progress_call_p, lambda context, *x, **params: _by_jax(context, x, **params))
for platform in ("cpu", "cuda"):
  mlir.register_lowering(progress_p, _lower, platform=platform)
  mlir.register_lowering(progress_call_p, _call_lower, platform=platform)


# -- the board, from a loop that is being lowered --------------------------------------------------
def begin(bar: Bar, numbers: _Values, values: _Values) -> Begun:
  """Begins a bar, once `values` are computed; `numbers` are the numbers that its mark reads."""
  anchor = _anchor(values)
  if bar.by_value:
    last, first = (jnp.asarray(x, np.float32) for x in numbers)
    shown = [first, last]
    if not bar.lanes and first.ndim:
      shown = [_longest(first, last, x) for x in shown]
    shape = (bar.count,) if bar.lanes else ()
    shown = [x.reshape(shape) for x in shown]
    return Begun(bar, _call("begin_at", bar, *shown, *anchor), (first, last))
  if not numbers:
    return Begun(bar, _call("begin", bar, *anchor))
  total = jnp.asarray(numbers[0]).astype(np.int32)
  total = jnp.broadcast_to(total.ravel(), (bar.count,)) if bar.lanes else jnp.max(total)
  return Begun(bar, _call("begin_of", bar, total, *anchor))


@dataclasses.dataclass(frozen=True)
class Begun:
  """A bar that a loop has begun, or one for each lane.

  Attributes:
    bar: the bar as the loop knows it.
    handle: the board's number; a vector for lanes.
    limits: for a bar by value: its first and last value, with the lanes' axes.
  """

  bar: Bar
  handle: Any
  limits: tuple[Any, Any] | None = None

  def update(self, count: Any, lanes: Any, numbers: _Values, going: Any) -> Any:
    """Reports the loop's progress; returns the number of steps until the next update.

    Args:
      count: the number of steps.
      lanes: the lanes' numbers of steps, if they are known.
      numbers: the numbers that the bar's mark reads.
      going: True for lanes that continue, if that is known.
    """
    if self.bar.lanes and going is not None and going.shape == self.bar.lanes:
      going = going.ravel()
    else:
      going = jnp.ones(self.handle.shape, np.int32)
    return _call("update", self.bar, self.handle, *self._reached(count, lanes, numbers), going)

  def end(self, count: Any, lanes: Any, numbers: _Values, values: _Values) -> None:
    """Ends the bar, once `values` are computed."""
    _call("end", self.bar, self.handle, *self._reached(count, lanes, numbers), *_anchor(values))

  def _reached(self, count: Any, lanes: Any, numbers: _Values) -> tuple[Any, Any]:
    """Returns the board's operands for a count, and for a value: NaN for a bar without one."""
    if self.bar.lanes:
      is_own = getattr(lanes, "shape", None) == self.bar.lanes
      count = lanes.ravel() if is_own else jnp.broadcast_to(count, (self.bar.count,))
    if self.limits is None:
      return count, jnp.full(self.handle.shape, jnp.nan, np.float32)
    at = numbers[1]
    if self.bar.lanes or not at.ndim:
      return count, at.reshape(self.handle.shape)
    first, last = self.limits  # the lane with the longest way
    share = jnp.nanmin((at - first) / jnp.where(last == first, 1.0, last - first))
    begin, way = (_longest(first, last, x) for x in (first, last - first))
    return count, begin + share * way


def _longest(first: Any, last: Any, of: Any) -> Any:
  """Returns the entry of the lane whose value has the longest way."""
  return of.ravel()[jnp.argmax(jnp.abs(last - first).ravel())]


def _call(kind: str, bar: Bar, *operands: Any) -> Any:
  return progress_call_p.bind(*operands, kind=kind, bar=bar)[0]


def _anchor(values: _Values) -> _Values:
  """Returns an element of the smallest array, if any: a call with it waits for that array."""
  arrays = [x for x in values if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.number)]
  smallest = sorted((x for x in arrays if x.size), key=lambda x: x.size)[:1]
  return [tracing.unvaried(x)[(slice(1),) * x.ndim] for x in smallest]
