# SPDX-License-Identifier: Apache-2.0
"""Calls consumers with the records that the runtime passes, on a channel's thread.

A consumer's exception is kept with its record, the runtime gets the number of lost records, and the
consumer is called again for the next record. Taps with `on_device=True` give jax.Arrays. From a GPU
they share, by DLPack, the memory of Buffers that own a copy on the device. On the CPU they are made
from the record's arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate, _part
from callgate._core import dtypes, encoding, errors, exact, failures, foreign, signatures
from callgate._jax import dispatch, tracing
from callgate._runtime import timeline
from callgate._sharding.tiles import SHARD_BIT, ShardedArray, shard_of
from callgate._tap import kinds
from callgate._tap.records import BatchInfo, Record, TapInfo

ROLES = ("primal", "tangent", "cotangent")
REPEATED = 1  # kRepeated in src/channel/record.h
# (id, name, role, description, sizes of the batch levels), and (lane, seq, time_ns, device, run,
# flags, arrays)
_RawSource = tuple[int, str, int, str, tuple[int, ...]]
_Row = tuple[int, int, int, int, int, int, tuple[Any, ...]]
# Called once: a program has run before, so the backend exists.
_process_index = functools.cache(jax.process_index)  # at most one entry
import_buffer = jax.dlpack.from_dlpack  # of a Buffer that owns its memory, which the array shares


class TapDescription:
  """A tap's description, read from the text that its program holds (`site.describe`)."""

  def __init__(self, text: str) -> None:
    code = json.loads(text)
    self._signature = encoding.DecodedSpec(code["spec"])  # keeps the named objects alive
    # The pytree of `value` in ((value,), {}).
    tree = self._signature.in_tree.children()[0].children()[0]
    lone = tree == jax.tree.structure(0)
    self._unflatten: Callable[[Sequence[Any]], Any] = (
      operator.itemgetter(0) if lone else functools.partial(jax.tree.unflatten, tree)
    )
    self.values: int = code["values"]
    self.dtypes: list[str | None] = code["dtypes"]
    self.logical: list[int] = code["logical"]
    self.transforms = tuple((name, dict(how)) for name, how in code["transforms"])
    self.on_device: bool = code.get("on_device", False)
    self.kind: str | None = code.get("kind")
    self._fields: kinds.Fields | None = code.get("fields")
    self._plain = not self.logical and not any(self.dtypes)
    shards = code.get("shards")
    self._parts = [ShardedArray(part) for part in shards["leaves"]] if shards else None
    self._lane_starts: list[list[int]] = shards["lanes"] if shards else []
    self._first: dict[int, Any] = {}
    # Under `jax.pmap` the device determines the shard; each device has whole values.
    stacked = code.get("stacked", {"devices": [], "leaves": []})
    self._on_device = {device: shard for shard, device in enumerate(stacked["devices"])}
    self._lie = self._parts or [ShardedArray(part) for part in stacked["leaves"]] or None
    # The shapes of the whole value's leaves; None if they are not known.
    self.shapes = self._lie and self._unflatten([part.shape for part in self._lie])

  def value(
    self, arrays: Sequence[Any], shard: int = -1, *, stacked: bool = False, keys: bool = True
  ) -> Any:
    """Returns the tapped pytree of one record, or of stacked records whose values have one shape.

    `arrays` are its leaves, then their logical sizes. It restores dtypes and cuts off padding.
    Without `keys`, PRNG keys become their data.
    """
    if not self._plain:
      sizes = [np.asarray(array) for array in arrays[self.values :]]
      arrays = list(arrays[: self.values])
      cut(arrays, self.logical, [n[0] for n in sizes] if stacked else sizes, self._parts, shard)
      for index, name in enumerate(self.dtypes):
        if name is not None:
          arrays[index] = dtypes.uncarried(arrays[index], name, keys=keys)
    if self.kind == "text":
      return kinds.texts(arrays, self._fields) if stacked else kinds.text(arrays, self._fields)
    return self._unflatten(arrays)

  def same_shapes(self, arrays: Sequence[Any], shard: np.ndarray) -> list[slice]:
    """Returns the runs of stacked records whose values have the same shapes without padding."""
    if not self.logical:
      return [slice(0, len(shard))]
    sizes = np.concatenate([*arrays[self.values :], shard[:, None]], axis=1)
    changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
    return [slice(*pair) for pair in itertools.pairwise([0, *changes.tolist(), len(shard)])]

  def lane(self, index: int, sizes: tuple[int, ...], shard: int = -1) -> tuple[int, ...]:
    """Returns a lane's index in each level, of these sizes, among all devices' lanes."""
    if not sizes:
      return ()
    lanes = [int(i) for i in np.unravel_index(index, sizes)]
    if shard >= 0 and self._lane_starts:
      lanes = [i + starts[shard] for i, starts in zip(lanes, self._lane_starts, strict=True)]
    return tuple(lanes)

  def lanes(self, index: np.ndarray, sizes: tuple[int, ...], shard: np.ndarray) -> np.ndarray:
    """Returns the indices of many lanes at once, a row for each."""
    if not sizes:
      return np.empty((len(index), 0), np.int64)
    lanes = np.stack(np.unravel_index(index, sizes), -1)
    if self._lane_starts:
      # The starts of shard -1 come first.
      starts = np.array([[0, *one] for one in self._lane_starts], np.int64)
      lanes += starts[:, shard + 1].T
    return lanes

  def number_of_shard(self, flags: int, device: int) -> int:
    """Returns the number of a record's shard, by its flags or its device; -1 for whole values."""
    return self._on_device.get(device, shard_of(flags))

  def numbers_of_shards(self, shards: np.ndarray, devices: np.ndarray) -> np.ndarray:
    """Returns the numbers of many records' shards."""
    if not self._on_device:
      return shards
    pairs = zip(shards.tolist(), devices.tolist(), strict=True)
    return np.array([self._on_device.get(device, shard) for shard, device in pairs], np.int64)

  def shard(self, number: int) -> Any:
    """Returns the shard's slices of the whole value, for each leaf; None for whole values."""
    if number < 0 or self._lie is None:
      return None
    return self._unflatten([part.slices(number) for part in self._lie])

  def first(self, number: int) -> Any:
    """Returns for each leaf True if no earlier shard has the same part; None for whole values."""
    if number < 0 or self._lie is None:
      return None
    if number not in self._first:
      self._first[number] = self._unflatten([part.is_first(number) for part in self._lie])
    return self._first[number]


# The decoded description, which may keep the user's objects alive.
description = tracing.clearable_cache(max_size=4096)(TapDescription)


class _Pins:
  """Keeps alive the objects that waiting records of the newest programs name.

  A program may end before its records are delivered.
  """

  _MOST = 256

  def __init__(self) -> None:
    self._kept: collections.OrderedDict[exact.Exact, None] = collections.OrderedDict()
    self._lock = threading.Lock()

  def add(self, one: exact.Exact) -> None:
    with self._lock:
      self._kept[one] = None
      self._kept.move_to_end(one)
      while len(self._kept) > self._MOST:
        self._kept.popitem(last=False)

  def cache_clear(self) -> None:
    """Drops everything if no record waits; `jax.clear_caches()` calls it."""
    if not any(stats["pending"] for stats in _callgate.channel_stats().values()):
      with self._lock:
        dropped, self._kept = self._kept, collections.OrderedDict()
      del dropped


pins = _Pins()  # locks itself: `_Pins._lock`
tracing.clear_with_caches(pins, "what callgate's records name")


class SizeError(ValueError):
  """A size of `logical_shape` is negative, or more than the array has."""


def cut(
  values: list[Any], padded: Sequence[int], sizes: Sequence[Any], parts: Any, shard: int
) -> None:
  """Cuts the padding off the `padded` leaves, in place. Raises SizeError.

  `sizes` are their logical sizes. With several lanes at once (`TapSite.whole`) the consumer cuts.
  `parts` are the places of the leaves' shards, and `shard` is the shard's number, -1 for whole
  arrays. src/channel/consumer.h does the same for native sinks.
  """
  for index, own in zip(padded, sizes, strict=True):
    if own.ndim != 1:
      continue
    value = values[index]
    lead = value.ndim - len(own)  # lanes that stay together are the first axes
    shape = value.shape[lead:]
    part = parts[index] if parts and shard >= 0 else None
    for axis, (size, extent) in enumerate(zip(own, part.shape if part else shape, strict=True)):
      if not 0 <= size <= extent:
        expected = f"expected a size from 0 to {extent}, got {size}"
        raise SizeError(f"logical_shape of leaf {index}, dimension {axis}: {expected}")
    if part:  # the logical size of the part, from that of the whole
      own = np.clip(own - [one.start for one in part.slices(shard)], 0, shape)
    values[index] = value[(slice(None),) * lead + tuple(slice(0, int(n)) for n in own)]


_told_lanes = 0  # the most lanes of each tap. Atomic: one assignment


def tell_of_lanes(most: int) -> None:
  """From now on, reports "tap value" also for the first `most` lanes, with their numbers."""
  global _told_lanes
  _told_lanes = most


def _tell(source: _RawSource, arrays: Sequence[Any], lane: int | None = None) -> None:
  if len(arrays) == 1 and source[2] == 0 and getattr(arrays[0], "ndim", 1) == 0:
    _part.tell("tap value", source[1], arrays[0].item(), lane)


def _tell_rows(source: _RawSource, rows: list[_Row]) -> None:
  _tell(source, rows[-1][6])
  if _told_lanes and source[4]:
    for row in rows[-_told_lanes:]:
      _tell(source, row[6], row[0])


def check_takes_values(where: str, function: Callable[..., Any]) -> None:
  """Raises unless a consumer can be called with (value) or (value, info), and then runs."""
  signatures.refuse_unrun(where, function)
  signature = signatures.signature_of(function)
  try:
    if signature is not None:
      signature.bind(*(None,) * (2 if signatures.wants_info(function) else 1))
  except TypeError:
    expected = f"{where} of (value) or of (value, info)"
    raise errors.GateDefinitionError(f"{expected}, got {foreign.repr_of(function)}") from None


@dataclasses.dataclass(eq=False)
class Attached:
  """A consumer of a channel. After it has left the channel, it isn't called again."""

  given: Any  # the user's object
  only: Callable[[Record], Any] | None = None  # a sink's filter of records
  runs_natively: bool = False  # without Python
  left: bool = False

  def is_sink(self) -> bool:
    """True if it is to be opened, written to and closed."""
    return hasattr(self.given, "open") and hasattr(self.given, "write")

  @functools.cached_property
  def wants_info(self) -> bool:
    return signatures.wants_info(self.given)


def call_with_rows(attached: Attached, source: _RawSource, rows: list[_Row]) -> int:
  """Calls `function(value)` or `function(value, info)` for each row."""
  function, with_info = attached.given, attached.wants_info
  about = description(source[3])
  value_of = about.value
  _tell_rows(source, rows)
  convert = _converter() if about.on_device else None
  lost = 0
  with timeline.span("deliver", source[1]):
    for row in rows:
      if attached.left:
        break
      try:
        if convert is not None:
          row = convert(row)
        if with_info:
          function(value_of(row[6], shard_of(row[5])), _info_of(source, row))
        else:
          function(value_of(row[6], shard_of(row[5])))
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        failures.keep_consumer_error(error, _where(function, source, row))
        lost += 1
  return lost


def write_records(attached: Attached, source: _RawSource, rows: list[_Row]) -> int:
  """Calls a sink's `write(records)` with all rows that are there."""
  if attached.left:
    return 0
  sink, about = attached.given, description(source[3])
  _tell_rows(source, rows)
  lost = 0
  try:
    if about.on_device:
      rows = list(map(_converter(), rows))
    records: list[Record] = []
    for row in rows:
      try:
        value = about.value(row[6], shard_of(row[5]), keys=False)
        record = Record(value, _info_of(source, row))
        if attached.only is None or attached.only(record):
          records.append(record)
      except Exception as error:  # noqa: BLE001 - the other records are still written
        failures.keep_consumer_error(error, _where(sink, source, row))
        lost += 1
    if records:
      sink.write(records)
  except BaseException as error:  # noqa: BLE001 - as above
    failures.keep_consumer_error(error, _where(sink, source, rows[0], last=rows[-1]))
    known = error.lost if foreign.is_a(error, errors.LossError) else len(rows)
    lost = min(lost + known, len(rows))
  return lost


def call_with_stacks(
  attached: Attached, limit: int | None, source: _RawSource, numbers: Any, arrays: Sequence[Any]
) -> int:
  """Calls a function with stacked arrays, of at most `limit` rows in a call."""
  function, about = attached.given, description(source[3])
  _tell(source, [array[-1, ...] for array in arrays])
  shard = (numbers[5] >> SHARD_BIT).astype(np.int64) - 1
  lost = 0
  for same in about.same_shapes(arrays, shard):
    step = limit or same.stop - same.start
    for start in range(same.start, same.stop, step):
      if attached.left:
        break
      part = slice(start, min(start + step, same.stop))
      try:
        value = about.value([x[part] for x in arrays], int(shard[start]), stacked=True)
        if attached.wants_info:
          lane, seq, time_ns, device, run, flags = (n[part] for n in numbers)
          info = BatchInfo(
            source[1], ROLES[source[2]], about.transforms, seq, time_ns, device, run,
            about.lanes(lane, source[4], shard[part]), (flags & REPEATED) != 0,
            _process_index(), about.numbers_of_shards(shard[part], device),
          )  # fmt: skip
          function(value, info)
        else:
          function(value)
      except BaseException as error:  # noqa: BLE001 - as above
        row = [int(n[start]) for n in numbers]
        failures.keep_consumer_error(error, _where(function, source, row))
        lost += part.stop - part.start
  return lost


def _info_of(source: _RawSource, row: _Row) -> TapInfo:
  about = description(source[3])
  lane, seq, time_ns, device, run, flags, _ = row
  shard = about.number_of_shard(flags, device)
  return TapInfo(
    source[1], seq, time_ns, _process_index(), device, run, about.shard(shard),
    about.lane(lane, source[4], shard), ROLES[source[2]], about.transforms, bool(flags & REPEATED),
    about.shapes if shard >= 0 else None, about.first(shard), about.kind,
  )  # fmt: skip


def _where(consumer: object, source: _RawSource, row: Any, last: Any = None) -> str:
  named = foreign.qualified_name(consumer)
  who = f"callgate: raised in consumer {named} of tap '{source[1]}'"
  if last is not None and last[1] != row[1]:
    return f"{who}, given records {row[1]} to {last[1]}"
  lanes = description(source[3]).lane(row[0], source[4])
  return f"{who}, record {row[1]}" + (f", lane {lanes}" if lanes else "")


def _converter() -> Callable[[Any], Any]:
  """Puts jax.Arrays into rows; the lanes of one record share its array."""
  known: dict[int, tuple[Any, jax.Array]] = {}  # by leaf: the last Buffer, and its array

  def made(index: int, array: Any, device: int) -> jax.Array:
    if isinstance(array, np.ndarray):
      return jax.device_put(array, _cpu(device))
    buffer, start, shape = array
    if index not in known or known[index][0] is not buffer:
      known[index] = buffer, import_buffer(buffer)
    whole = known[index][1]
    size = math.prod(shape)
    return whole if whole.shape == shape else _sliced(whole, start // size if size else 0, shape)

  return lambda row: (*row[:-1], tuple(made(i, array, row[3]) for i, array in enumerate(row[-1])))


@functools.partial(jax.jit, static_argnums=2)
def _sliced(whole: Any, lane: Any, shape: tuple[int, ...]) -> Any:
  if 0 in shape:
    return jnp.zeros(shape, whole.dtype)
  return jax.lax.dynamic_index_in_dim(whole.reshape(-1, *shape), lane, keepdims=False)


@functools.cache  # at most one entry for each device
def _cpu(device: int) -> Any:
  """Returns the CPU device of an id; the default one for a record without a device."""
  devices = dispatch.cpu_devices("a consumer of jax.Arrays")
  return next((one for one in devices if one.id == device), devices[0])
