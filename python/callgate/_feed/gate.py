# SPDX-License-Identifier: Apache-2.0
"""The gate of a feed, by which a program takes items, and the primitive of `Feed.next`.

`next()` has no arguments that batching could see. So its own primitive knows the mapped axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.interpreters import batching, mlir

from callgate import _callgate
from callgate._call import jax_engine, primitive
from callgate._call.site import BoundCall, CallSite
from callgate._core import effects, errors
from callgate._feed import producer as _producer
from callgate._feed import shares as _shares
from callgate._gate.callee import GateCallee
from callgate._jax import tracing

CLOSE_SECONDS = 5.0  # the default time to wait for a busy iterator


class FeedGate(GateCallee):
  """The gate of a feed.

  Attributes:
    shares: the placement of its items on devices.
    resumable: True if loops save how many items it has given.
    of_loops: gates that such loops need (`resuming`).
  """

  kind = "feed"
  # Its arrays are NumPy arrays on the host; in a program for CUDA they are on the GPU.
  traits = GateCallee.traits.but(native=True, knows_lanes=False)
  shares: _shares.Shares | None = None
  resumable = True

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self.of_loops: dict[str, GateCallee] = {}

  @property
  def producer(self) -> _producer.Producer:
    take: Any = self.function
    return take.args[0]

  def rename(self, name: str) -> None:
    super().rename(name)
    self.producer.close(CLOSE_SECONDS)


def take(producer: _producer.Producer, rank: int, outs: Sequence[Any], taker: int = 0) -> None:
  """Writes the next item, or one for each lane, into the results: a feed's gate.

  `rank` is the rank of an item's first leaf; further axes are batch axes.
  """
  batch = outs[0].ndim - rank
  lanes = math.prod(outs[0].shape[:batch])
  # The results are Buffers, and the items are being copied to them.
  if place := _callgate.device_call():
    for lane in range(lanes):
      producer.take_uploaded(place[1], taker).give(outs, lane, lanes)
    return
  if not batch:
    for out, array in zip(outs, producer.take(taker), strict=True):
      out[...] = array
    return
  rows = [out.reshape(lanes, *out.shape[batch:]) for out in outs]
  for lane in range(lanes):
    for row, array in zip(rows, producer.take(taker), strict=True):
      row[lane, ...] = array


def take_share(
  producer: _producer.Producer,
  rank: int,
  takers: Mapping[int, int],
  context: Any,
  outs: Sequence[Any],
) -> None:
  """Writes the device's share of the next item: the gate of a feed with shares."""
  if (taker := takers.get(context.device)) is None:
    expected = "expected a program over the mesh of its sharding="
    raise errors.GateError(
      f"feed '{producer.name}': {expected}, got one on device {context.device}"
    )
  producer.begin(taker, context.run)
  take(producer, rank, outs, taker)


# -- the primitive ---------------------------------------------------------------------------------
# Parameters: gate and site, as for the gate's primitive; lead, the sizes of the axes that the call
# is mapped over, outermost first; engine, the engine that runs it.
next_p = tracing.Primitive("feed_next")
next_p.multiple_results = True
tracing.define_impl(next_p, lambda gate, site, **_: gate.programs(site))
tracing.weakly_cached.add(FeedGate)


@next_p.def_effectful_abstract_eval
def _abstract_eval(*, gate: GateCallee, site: CallSite, lead: tuple[int, ...], engine: str) -> Any:
  effect = tracing.ordered_io_effect if engine == "jax" else effects.ORDERED_GATE_EFFECT
  avals = (tracing.shaped_array((*lead, *shape), dtype, ()) for shape, dtype in site.results)
  axes = tracing.manual_axes()  # in a jax.shard_map each device takes its own items
  return tuple(tracing.varying_aval(aval, axes) for aval in avals), frozenset({effect})


def _batch(axis_data: Any, _: Any, dims: Any, *, lead: tuple[int, ...], **params: Any) -> Any:
  results = next_p.bind(lead=(axis_data.size, *lead), **params)
  return results, [0] * len(results)


batching.fancy_primitive_batchers[next_p] = _batch


def _lower(
  context: Any, *, gate: GateCallee, site: CallSite, lead: tuple[int, ...], engine: str
) -> Sequence[Any]:
  results = tuple(((*lead, *shape), dtype) for shape, dtype in site.results)
  site = dataclasses.replace(site, results=results)
  if engine != "jax":
    return primitive.lower(context, call=BoundCall(gate, site))
  call = mlir.lower_fun(lambda: jax_engine.bind(gate, site, ()), multiple_results=True)
  return call(context)


# Not cached, like the gates' own rule, because its source line is part of the program.
mlir.register_lowering(next_p, _lower, cacheable=False)
