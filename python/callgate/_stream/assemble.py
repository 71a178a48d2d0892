"""`callgate.assemble`: whole arrays from records of their shards."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import options
from callgate._stream.records import StreamRecord
from callgate._tap.records import Record


def assemble(records: Iterable[Record | StreamRecord]) -> Any:
  """The whole value of a tap in a program over several devices, from the records of its shards.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec

  mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
  rows = NamedSharding(mesh, PartitionSpec("rows"))
  records = []

  @jax.jit
  def program(x):
    return cg.tap(x, lambda value, info: records.append(cg.Record(value, info)))

  program(jax.device_put(jnp.arange(16.0), rows))
  cg.barrier()
  assert cg.assemble(records).tolist() == list(range(16))
  ```

  Args:
    records: those of one tap in one execution (`info.run`), in any order, as consumers get them or
      as `open_stream` reads them, of several processes, too. Copies of a shard may be among them.

  Returns:
    The pytree, with NumPy arrays of the global shapes, or of what counts of them by the tap's
    `logical_shape`; from a stream, the array of a tap of a lone
    array, else a dictionary of arrays by their paths.

  Raises:
    ValueError: there is none, they are of several taps, lanes, shapes, executions or steps of a
      loop, or shards are missing.
  """
  if not isinstance(records, Iterable) or isinstance(records, (str, bytes, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
    options.refuse("assemble", "records", "an iterable of records", records)
  try:
    found = list(records)
  except TypeError:  # an array of no dimensions
    options.refuse("assemble", "records", "an iterable of records", records)
  for record in found:
    if not isinstance(record, (Record, StreamRecord)):  # pyright: ignore[reportUnnecessaryIsInstance]
      options.refuse("assemble", "records", "an iterable of records", record)
  if not found:
    raise ValueError("assemble: expected the records of one tap's shards, got none")
  shards = [_Shard(record) for record in found]
  _check_alike(shards)
  first = shards[0]
  if first.parts is None:
    if len(found) > 1:
      raise ValueError(
        f"assemble: expected one record of the whole value of tap {first.name!r}, got "
        f"{len(found)}; records whose shard is None are not shards of one array"
      )
    return first.value
  whole = [
    np.empty(shape, leaf.dtype) for shape, leaf in zip(first.shapes, first.leaves, strict=True)
  ]
  filled = [np.zeros(shape, bool) for shape in first.shapes]
  counted = [[0] * len(shape) for shape in first.shapes]  # what of each counts (`logical_shape`)
  for shard in shards:
    for array, mask, sizes, leaf, part in zip(
      whole, filled, counted, shard.leaves, shard.parts or (), strict=True
    ):
      ends = [one.start + extent for one, extent in zip(part, leaf.shape, strict=True)]
      array[tuple(slice(one.start, end) for one, end in zip(part, ends, strict=True))] = leaf
      mask[part] = True
      for axis, (end, extent) in enumerate(zip(ends, leaf.shape, strict=True)):
        sizes[axis] = max(sizes[axis], end) if extent else sizes[axis]
  for index, mask in enumerate(filled):
    if not mask.all():
      raise ValueError(
        f"assemble: expected shards that make up leaf {index} of tap {first.name!r}, of shape "
        f"{list(mask.shape)}, got {int(mask.sum())} of {mask.size} elements"
      )
  cut = [x[tuple(map(slice, sizes))] for x, sizes in zip(whole, counted, strict=True)]
  return jax.tree.unflatten(first.tree, cut)


class _Shard:
  """One record's leaves, where they belong, and the shapes of the whole ones."""

  def __init__(self, record: Record | StreamRecord) -> None:
    at: Any
    self.value: Any
    if isinstance(record, StreamRecord):
      at, self.value = record, dict(record.leaves)
    else:
      at, self.value = record.info, record.value
    parts, shapes = at.shard, at.global_shape
    if at is record and list(self.value) == [""]:  # a lone array
      self.value, parts, shapes = (x and x[""] for x in (self.value, parts, shapes))
    self.name: str = at.name
    self.kind = (self.name, at.role, at.lane)
    self.place = (at.process, at.device)
    self.run = at.run
    self.leaves, self.tree = jax.tree.flatten(self.value)
    known = parts is not None
    self.parts = self.tree.flatten_up_to(parts) if known else None
    self.shapes: Sequence[Any] = self.tree.flatten_up_to(shapes) if known else ()


def _check_alike(shards: Sequence[_Shard]) -> None:
  kinds = sorted({shard.kind for shard in shards})
  if len(kinds) > 1:
    shown = ", ".join(f"{name!r} ({role}, lane {lane})" for name, role, lane in kinds)
    raise ValueError(f"assemble: expected the records of one tap and one lane, got {shown}")
  shapes = sorted({repr(tuple(shard.shapes)) for shard in shards})
  if len(shapes) > 1:
    raise ValueError(f"assemble: expected shards of one value, got shapes {', '.join(shapes)}")
  if shards[0].parts is None:
    return
  places = collections.Counter(shard.place for shard in shards)
  (process, device), count = places.most_common(1)[0]
  if count > 1:
    raise ValueError(
      f"assemble: expected one record of each device, got {count} of device {device} of process "
      f"{process}: those of several executions (info.run), or steps of a loop (info.seq)"
    )
  runs = {(shard.place[0], shard.run) for shard in shards}
  if len(runs) > len({process for process, _ in runs}):
    raise ValueError(
      "assemble: expected the records of one execution, got those of the runs "
      + ", ".join(str(run) for _, run in sorted(runs))
    )
