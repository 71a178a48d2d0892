# SPDX-License-Identifier: Apache-2.0
"""Feeds that a saved loop reads: counts their items, and skips them in a resumed run.

Both are ordered gates of the feed, made when a loop first needs them. They hold only the feed's
producer, because a program may outlive the feed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate import _callgate
from callgate._core import registry
from callgate._core.errors import EndOfFeed, GateDefinitionError, GateError
from callgate._feed.gate import FeedGate
from callgate._feed.producer import Producer
from callgate._feed.shares import Shares
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import tracing, walk

COUNT = jax.ShapeDtypeStruct((2,), np.uint32)


def feeds_in(jaxpr: Any) -> tuple[FeedGate, ...]:
  """Returns the feeds that a traced function reads, in order; skips `resumable=False`.

  Raises:
    GateDefinitionError: the devices of a `jax.shard_map` read a feed.
  """
  found: dict[FeedGate, None] = {}
  for *around, eqn in walk.paths(jaxpr):
    feed = eqn.params.get("gate", getattr(eqn.params.get("call"), "gate", None))
    if not isinstance(feed, FeedGate) or not feed.resumable:
      continue
    devices = (one.params["mesh"].size for one in around if one.primitive.name == "shard_map")
    if feed.shares is None and max(devices, default=1) > 1:
      raise GateDefinitionError(
        f"feed '{feed.name}': expected next() outside of the jax.shard_map in a saved loop. Its "
        "devices take items at different times, so a checkpoint can't count the items of a step. "
        "Pass the item in (sharding= splits it), or use cg.feed(..., resumable=False)"
      )
    found[feed] = None
  return tuple(found)


def names(feeds: Sequence[FeedGate]) -> tuple[str, ...]:
  return tuple(feed.name for feed in feeds)


def counts(feeds: Sequence[FeedGate], where: Any) -> dict[str, Any]:
  """Returns how many items the feeds have given, uint32[2] each; zeros unless `where`.

  The keys are the feeds' names after a number, because JAX sorts keys.
  """
  return {f"{i:06d}{feed.name}": _count_where(feed, where) for i, feed in enumerate(feeds)}


def numbers(counted: Mapping[str, Any]) -> dict[str, int]:
  """Returns the counts by the feeds' names, in the feeds' order."""
  return {key[6:]: _number(count) for key, count in counted.items()}


def words(number: int) -> np.ndarray:
  """Returns a count as programs hold it, the low word first."""
  return np.array([number % 2**32, number >> 32], np.uint32)


def _number(words: Any) -> int:
  return int(words[0]) + (int(words[1]) << 32)


def _count_where(feed: FeedGate, where: Any) -> Any:
  gate = _gate_of(feed, "count", _count, COUNT)
  (aval,) = tracing.types_of_results(gate, ())
  return jax.lax.cond(where, gate, lambda: tracing.zeros_of(aval))


def skip(feeds: Sequence[FeedGate], counted: Any) -> None:
  """Makes the feeds continue at these items: uint32[feeds, 2], as from `counts`.

  Raises:
    GateError: (fails the program) a feed has already given more items, or has fewer.
  """
  for number, feed in enumerate(feeds):
    shares: Shares | None = feed.shares
    gate = _gate_of(feed, "skip", _skip, ())
    if shares is None:
      gate(counted[number])
    else:  # each process has its own iterator
      everywhere = jax.P()
      skip = jax.shard_map(
        gate, mesh=shares.mesh, in_specs=everywhere, out_specs=(), check_vma=False
      )
      jax.jit(skip)(counted[number])


def _gate_of(feed: FeedGate, what: str, function: Any, out: Any) -> GateCallee:
  if what not in feed.of_loops:
    takers: Mapping[int, int] = {} if feed.shares is None else feed.shares.takers
    name = registry.free_name(f"{feed.name} {what}")
    options = GateOptions(out=out, name=name, effect="ordered")
    bound = functools.partial(function, feed.producer, takers)
    feed.of_loops[what] = LoopGate(bound, options)
  return feed.of_loops[what]


class LoopGate(GateCallee):
  """A gate of a saved loop, which isn't recorded, since recordings have the items."""

  traits = GateCallee.traits.but(located=True, taped=False, knows_lanes=False)


def _taker(takers: Mapping[int, int]) -> int:
  place = _callgate.current_place()
  return 0 if place is None else takers.get(place[2], 0)


def _count(producer: Producer, takers: Mapping[int, int]) -> np.ndarray:
  return words(producer.position(_taker(takers)))


def _skip(producer: Producer, takers: Mapping[int, int], count: Any) -> tuple[()]:
  number, taker = _number(count), _taker(takers)
  if number:
    if takers and (run := _callgate.current_run()) is not None:
      producer.begin(taker, run)
    with producer.skipping:
      _skip_to(producer, taker, number)
  return ()


def _skip_to(producer: Producer, taker: int, number: int) -> None:
  said = f"feed '{producer.name}': expected"
  if (now := producer.position(taker)) > number:
    raise GateError(
      f"{said} a feed that has given at most {number} item(s), the count in the checkpoint, got "
      f"one that has given {now}; make the feed again, or pass resumable=False if its iterator "
      "continues where the loop does"
    )
  try:
    while producer.position(taker) < number:
      producer.drop(taker)
  except EndOfFeed as error:
    raise GateError(
      f"{said} at least {number} item(s), the count in the checkpoint, got "
      f"{producer.position(taker)}; make the feed from the data of the first run"
    ) from error
