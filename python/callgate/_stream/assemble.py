# SPDX-License-Identifier: Apache-2.0
"""`callgate.assemble`: whole arrays from the records of their shards."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import options
from callgate._stream.records import StreamRecord
from callgate._stream.rows import of_row
from callgate._tap.records import Record


def assemble(records: Iterable[Record | StreamRecord | Mapping[str, Any]]) -> Any:
  """Assembles the whole value of a tap in a program over several devices from its shards' records.

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
    records: the records of one tap in one execution (`info.run`), in any order and from all
      processes. They may be `Record`s, `StreamRecord`s of `open_stream`, or rows of sinks' files as
      dictionaries: lines of `JSONL`, or `Table.to_pylist()` of Parquet (docs/sinks_files.md).
      Copies of a shard are allowed.

  Returns:
    The pytree, with NumPy arrays of the global shapes, or of the tap's `logical_shape`. For a
    stream or a file it is a single array, or a dictionary of arrays by path.

  Raises:
    ValueError: there are no records, shards are missing, or the records differ in tap, lane, shape,
      execution or step of a loop.
  """
  expected = "an iterable of records"
  if not isinstance(records, Iterable) or isinstance(records, (str, bytes, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
    options.refuse("assemble", "records", expected, records)
  try:
    found = list(records)
  except TypeError:  # an array without dimensions
    options.refuse("assemble", "records", expected, records)
  for record in found:
    if not isinstance(record, (Record, StreamRecord, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
      options.refuse("assemble", "records", expected, record)
  if not found:
    raise ValueError("assemble: expected the records of one tap's shards, got none")
  shards = [_Shard(of_row(one) if isinstance(one, Mapping) else one) for one in found]
  _check_alike(shards)
  first = shards[0]
  if first.parts is None:
    if len(found) > 1:
      got = f"{len(found)}; a record whose shard is None is a whole value"
      raise ValueError(
        f"assemble: expected one record with the whole value of tap {first.name!r}, got {got}"
      )
    return first.value
  whole: list[np.ndarray] = []
  for index, (shape, leaf) in enumerate(zip(first.shapes, first.leaves, strict=True)):
    array, filled = np.empty(shape, leaf.dtype), np.zeros(shape, bool)
    counted = [0] * len(shape)  # the logical size of each dimension (`logical_shape`)
    for shard in shards:
      leaf, part = shard.leaves[index], (shard.parts or ())[index]
      ends = [one.start + extent for one, extent in zip(part, leaf.shape, strict=True)]
      array[tuple(slice(one.start, end) for one, end in zip(part, ends, strict=True))] = leaf
      filled[part] = True
      dims = zip(counted, ends, leaf.shape, strict=True)
      counted = [max(size, end) if extent else size for size, end, extent in dims]
    if not filled.all():
      leaf = f"leaf {index} of tap {first.name!r}, of shape {list(shape)}"
      got = f"{int(filled.sum())} of {filled.size} elements"
      raise ValueError(f"assemble: expected shards that cover {leaf}, got {got}")
    whole.append(array[tuple(map(slice, counted))])
  return jax.tree.unflatten(first.tree, whole)


class _Shard:
  """One record's leaves, their places, and the shapes of the whole leaves."""

  def __init__(self, record: Record | StreamRecord) -> None:
    streamed = isinstance(record, StreamRecord)
    at: Any = record if streamed else record.info
    value: Any = dict(record.leaves) if streamed else record.value
    parts, shapes = at.shard, at.global_shape
    if streamed and list(value) == [""]:  # a single array
      value, parts, shapes = (x and x[""] for x in (value, parts, shapes))
    self.name: str = at.name
    self.kind = (self.name, at.role, at.lane)
    self.process, self.device, self.run = at.process, at.device, at.run
    self.value = value
    self.leaves, self.tree = jax.tree.flatten(value)
    self.parts = None if parts is None else self.tree.flatten_up_to(parts)
    self.shapes: Sequence[Any] = () if parts is None else self.tree.flatten_up_to(shapes)
    # Under `jax.pmap` the whole has the devices' values stacked along an additional axis.
    if parts is not None:
      pairs = zip(self.leaves, self.shapes, strict=True)
      self.leaves = [x[None] if len(shape) > np.ndim(x) else x for x, shape in pairs]


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
  places = collections.Counter((shard.process, shard.device) for shard in shards)
  (process, device), count = places.most_common(1)[0]
  if count > 1:
    raise ValueError(
      f"assemble: expected one record of each device, got {count} of device {device} of process "
      f"{process}; select one execution by info.run, or one step of a loop by info.seq"
    )
  runs = sorted({(shard.process, shard.run) for shard in shards})
  if len(runs) > len({process for process, _ in runs}):
    got = f"records of the runs {', '.join(str(run) for _, run in runs)}; select one by info.run"
    raise ValueError(f"assemble: expected the records of one execution, got {got}")
