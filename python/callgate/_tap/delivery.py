"""From what the runtime hands over to what a consumer is called with.

Runs on a channel's thread, under the GIL. A consumer's exception is kept with its record for
`barrier()`, `errors()` and the channel's `close()`; the consumer is called again for the next. The
runtime is told how many records were lost so. Taps with `on_device=True` give jax.Arrays: from a
GPU by DLPack, of Buffers that own a copy on the device, from the CPU of arrays of the record's own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import encoding
from callgate._core.dtypes import dtype_named
from callgate._core.failures import keep_consumer_error
from callgate._core.signatures import signature_of, wants_info
from callgate._jax import dispatch
from callgate._sharding.tiles import SHARD_BIT, Part, shard_of
from callgate._tap import padding
from callgate._tap.records import BatchInfo, Record, TapInfo

ROLES = ("primal", "tangent", "cotangent")
REPEATED = 1  # kRepeated in src/channel/record.h
# (id, name, role, description, has lanes), and (lane, seq, time_ns, device, run, flags, arrays)
_RawSource = tuple[int, str, int, str, bool]
_Row = tuple[int, int, int, int, int, int, tuple[Any, ...]]
_Transforms = tuple[tuple[str, dict[str, Any]], ...]


class Description:
  """A tap's description, read from the text that its program holds (`site.describe`)."""

  def __init__(self, text: str) -> None:
    code = json.loads(text)
    args, _ = encoding.Signature(code["spec"]).arguments(range(code["values"]))
    self._tree = jax.tree.structure(args[0])
    self._is_leaf = self._tree == jax.tree.structure(0)
    self.values: int = code["values"]
    self.sizes: tuple[int, ...] = tuple(code["sizes"])
    self.dtypes: list[str | None] = code["dtypes"]
    self.logical: list[int] = code["logical"]
    self.transforms: _Transforms = tuple((name, dict(how)) for name, how in code["transforms"])
    self._plain = not self.logical and not any(self.dtypes)
    self.on_device: bool = code.get("on_device", False)
    shards = code.get("shards")
    self._parts = [Part(part) for part in shards["leaves"]] if shards else None
    self._lane_starts: list[list[int]] = shards["lanes"] if shards else []

  def value(self, arrays: Sequence[np.ndarray], shard: int = -1) -> Any:
    """The tapped pytree of one record: of its leaves, then their logical sizes."""
    if not self._plain:
      arrays = self._restored(arrays, self.logical_shapes(arrays), shard)
    return arrays[0] if self._is_leaf else jax.tree.unflatten(self._tree, arrays)

  def stacked(self, arrays: Sequence[np.ndarray], shard: int) -> Any:
    """The tapped pytree of stacked arrays, of rows with the same shape."""
    sizes = [own[0] for own in self.logical_shapes(arrays)]
    return self._unflatten(self._restored(arrays, sizes, shard))

  def _unflatten(self, leaves: Sequence[Any]) -> Any:
    return leaves[0] if self._is_leaf else jax.tree.unflatten(self._tree, leaves)

  def _restored(
    self, arrays: Sequence[np.ndarray], sizes: Sequence[np.ndarray], shard: int
  ) -> list[np.ndarray]:
    """The dtypes that had to travel as others, and arrays without their padding."""
    values = list(arrays[: self.values])
    padding.cut(values, self.logical, sizes, self._parts, shard)
    for index, name in enumerate(self.dtypes):
      if name is not None:
        values[index] = values[index].astype(dtype_named(name))
    return values

  def logical_shapes(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The logical sizes that came with a record, for each leaf that has them."""
    return [np.asarray(array) for array in arrays[self.values :]]

  def same_shapes(self, arrays: Sequence[np.ndarray], shard: np.ndarray) -> list[slice]:
    """The runs of rows whose values have one shape, without padding: all rows where there is none.

    `arrays` are the leaves and their logical sizes, `shard` the number of each row's shard.
    """
    total = len(shard)
    if not self.logical:
      return [slice(0, total)]
    sizes = np.concatenate([*self.logical_shapes(arrays), shard[:, None]], axis=1)
    changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
    bounds = [0, *changes.tolist(), total]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]

  def lane(self, index: int, shard: int = -1) -> tuple[int, ...]:
    """A lane's index in each level, of all devices' lanes."""
    if not self.sizes:
      return ()
    lanes = [int(i) for i in np.unravel_index(index, self.sizes)]
    if shard >= 0 and self._lane_starts:
      lanes = [i + starts[shard] for i, starts in zip(lanes, self._lane_starts, strict=True)]
    return tuple(lanes)

  def lanes(self, index: np.ndarray, shard: np.ndarray) -> np.ndarray:
    """Of many lanes at once, a row each."""
    if not self.sizes:
      return np.empty((len(index), 0), np.int64)
    lanes = np.stack(np.unravel_index(index, self.sizes), -1)
    if self._lane_starts:
      starts = np.array([[0, *one] for one in self._lane_starts], np.int64)  # of -1 come first
      lanes += starts[:, shard + 1].T
    return lanes

  def shard(self, number: int) -> Any:
    """The slices of the whole that a shard's value is, for each leaf; None for whole values."""
    if number < 0 or self._parts is None:
      return None
    return self._unflatten([part.slices(number) for part in self._parts])

  @functools.cached_property
  def shapes(self) -> Any:
    """The shape of the whole value's leaves; None where they are not known."""
    if self._parts is None:
      return None
    return self._unflatten([part.shape for part in self._parts])


@functools.lru_cache(maxsize=4096)
def description(text: str) -> Description:
  """The decoded description, cached."""
  return Description(text)


@functools.cache
def process_index() -> int:
  """This process's index, asked once: programs ran before, so the backend is there."""
  return jax.process_index()


def info_of(source: _RawSource, row: _Row) -> TapInfo:
  """The `TapInfo` of a row."""
  about = description(source[3])
  lane, seq, time_ns, device, run, flags, _ = row
  shard = shard_of(flags)
  return TapInfo(
    source[1],
    seq,
    time_ns,
    process_index(),
    device,
    run,
    about.shard(shard),
    about.lane(lane, shard),
    ROLES[source[2]],
    about.transforms,
    bool(flags & REPEATED),
    about.shapes if shard >= 0 else None,
  )


@dataclasses.dataclass
class Presence:
  """Whether a consumer still is with its channel: one that leaves has had its last call."""

  ended: bool = False


# Told the newest scalar of each tap, once a batch: progress bars show it.
_listener: Callable[[str, Any], None] | None = None


def listen(listener: Callable[[str, Any], None]) -> None:
  """Has `listener(name, value)` told the newest scalar of each tap."""
  global _listener
  _listener = listener


def _tell(source: _RawSource, arrays: Sequence[np.ndarray]) -> None:
  if _listener is None or len(arrays) != 1 or source[2] != 0 or isinstance(arrays[0], tuple):
    return
  if arrays[0].ndim == 0:
    _listener(source[1], arrays[0].item())


def takes_values(function: Callable[..., Any]) -> bool:
  """Whether a function can be called with a value, or with a value and what is known of it."""
  signature = signature_of(function)
  if signature is None:
    return True  # it does not say
  try:
    signature.bind(*(None,) * (2 if wants_info(function) else 1))
  except TypeError:
    return False
  return True


def rows_to_function(
  function: Callable[..., Any], presence: Presence | None = None
) -> Callable[..., int]:
  """A consumer of rows that calls `function(value)` or `function(value, info)` for each."""
  presence = presence or Presence()
  with_info = wants_info(function)

  def consume(source: _RawSource, rows: list[_Row]) -> int:
    about = description(source[3])
    value_of = about.value
    _tell(source, rows[-1][6])
    convert = Converter() if about.on_device else None
    lost = 0
    for row in rows:
      if presence.ended:
        break
      try:
        if convert is not None:
          row = convert(row)
        if with_info:
          function(value_of(row[6], shard_of(row[5])), info_of(source, row))
        else:
          function(value_of(row[6], shard_of(row[5])))
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        keep_consumer_error(error, _where(function, source, row))
        lost += 1
    return lost

  return consume


def rows_to_records(
  write: Callable[[list[Record]], Any], owner: object, presence: Presence
) -> Callable[..., int]:
  """A consumer of rows that calls `write(records)` with all that are there."""

  def consume(source: _RawSource, rows: list[_Row]) -> int:
    if presence.ended:
      return 0
    about = description(source[3])
    value_of = about.value
    _tell(source, rows[-1][6])
    lost = 0
    try:
      if about.on_device:
        rows = list(map(Converter(), rows))
      records: list[Record] = []
      for row in rows:
        try:
          records.append(Record(value_of(row[6], shard_of(row[5])), info_of(source, row)))
        except padding.SizeError as error:  # the others are written all the same
          keep_consumer_error(error, _where(owner, source, row))
          lost += 1
      if records:
        write(records)
    except BaseException as error:  # noqa: BLE001 - as above
      keep_consumer_error(error, _where(owner, source, rows[0], last=rows[-1]))
      # A SinkError knows.
      return min(lost + getattr(error, "lost", len(rows)), len(rows))
    return lost

  return consume


def stacks_to_function(
  function: Callable[..., Any], limit: int | None, presence: Presence
) -> Callable[..., int]:
  """A consumer of stacked arrays, with at most `limit` rows a call."""
  with_info = wants_info(function)

  def consume(source: _RawSource, numbers: Any, arrays: tuple[np.ndarray, ...]) -> int:
    about = description(source[3])
    _tell(source, [array[-1, ...] for array in arrays])
    shard = (numbers[5] >> SHARD_BIT).astype(np.int64) - 1
    lost = 0
    for run in about.same_shapes(arrays, shard):
      step = limit or run.stop - run.start
      for start in range(run.start, run.stop, step):
        if presence.ended:
          break
        part = slice(start, min(start + step, run.stop))
        try:
          value = about.stacked([array[part] for array in arrays], int(shard[start]))
          if with_info:
            function(value, _batch_info(source, about, [n[part] for n in numbers], shard[part]))
          else:
            function(value)
        except BaseException as error:  # noqa: BLE001 - as above
          row = (*(int(n[start]) for n in numbers), ())
          keep_consumer_error(error, _where(function, source, row))
          lost += part.stop - part.start
    return lost

  return consume


def _batch_info(
  source: _RawSource, about: Description, numbers: Sequence[Any], shard: np.ndarray
) -> BatchInfo:
  lane, seq, time_ns, device, run, flags = numbers
  return BatchInfo(
    source[1],
    ROLES[source[2]],
    about.transforms,
    seq,
    time_ns,
    device,
    run,
    about.lanes(lane, shard),
    (flags & REPEATED) != 0,
    process_index(),
    shard,
  )


def _where(consumer: object, source: _RawSource, row: Any, last: Any = None) -> str:
  named = getattr(consumer, "__qualname__", None) or repr(consumer)
  who = f"callgate: raised in consumer {named} of tap '{source[1]}'"
  if last is not None and last[1] != row[1]:
    return f"{who}, given records {row[1]} to {last[1]}"
  lanes = description(source[3]).lane(row[0])
  return f"{who}, record {row[1]}" + (f", lane {lanes}" if lanes else "")


class Converter:
  """Makes jax.Arrays of the arrays of rows; those of one record's lanes share its array."""

  def __init__(self) -> None:
    # Of each leaf: the Buffer that was converted last, and its array.
    self._whole: dict[int, tuple[Any, Any]] = {}

  def __call__(self, row: Any) -> Any:
    """The row, with jax.Arrays in place of what the runtime handed over."""
    *about, arrays = row
    device = row[3]
    return (*about, tuple(self._array(i, array, device) for i, array in enumerate(arrays)))

  def _array(self, index: int, array: Any, device: int) -> jax.Array:
    if isinstance(array, np.ndarray):
      return jax.device_put(array, _cpu(device))
    buffer, start, shape = array
    known = self._whole.get(index)
    if known is None or known[0] is not buffer:
      known = self._whole[index] = (buffer, import_buffer(buffer))
    whole = known[1]
    if whole.shape == shape:
      return whole
    size = math.prod(shape)
    return _sliced(whole, start // size if size else 0, shape)


def import_buffer(buffer: Any) -> jax.Array:
  """A runtime's Buffer that owns its memory, as a jax.Array over the same memory."""
  return jax.dlpack.from_dlpack(buffer)


@functools.partial(jax.jit, static_argnums=2)
def _sliced(whole: Any, lane: Any, shape: tuple[int, ...]) -> Any:
  if 0 in shape:
    return jnp.zeros(shape, whole.dtype)
  return jax.lax.dynamic_index_in_dim(whole.reshape(-1, *shape), lane, keepdims=False)


@functools.cache
def _cpu(device: int) -> Any:
  """The CPU device of an id; the default one where a record names none."""
  devices = dispatch.cpu_devices("a consumer of jax.Arrays")
  return next((one for one in devices if one.id == device), devices[0])
