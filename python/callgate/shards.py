"""`callgate.assemble`: whole arrays from records of their shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from callgate._records import Record


def assemble(records: Iterable[Record]) -> Any:
  """The whole value of a tap in a program over several devices, from the records of its shards.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  with cg.channel("shards") as channel:
    jax.jit(lambda x: cg.tap(x, channel))(jnp.arange(4.0))
    cg.barrier()
    records = list(channel.records(timeout=0))
  assert cg.assemble(records).tolist() == [0.0, 1.0, 2.0, 3.0]
  ```

  Args:
    records: those of one tap in one execution (`info.run`; of several processes, from merged
      streams), in any order. Copies of one shard may be among them.

  Returns:
    The pytree, with NumPy arrays of the global shapes.

  Raises:
    ValueError: there is none, they are of several taps, lanes or shapes, or shards are missing.
  """
  found = list(records)
  if not found:
    raise ValueError("assemble: expected the records of one tap's shards, got none")
  _check_alike(found)
  first = found[0]
  if first.info.shard is None:
    if len(found) > 1:
      raise ValueError(
        f"assemble: expected one record of the whole value of tap {first.info.name!r}, got "
        f"{len(found)}; records with info.shard None are not shards of one array"
      )
    return first.value
  leaves, tree = jax.tree.flatten(first.value)
  shapes = _tuples(first.info.global_shape, len(leaves))
  whole = [np.empty(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
  filled = [np.zeros(shape, bool) for shape in shapes]
  for record in found:
    parts = _tuples(record.info.shard, len(leaves))
    for array, mask, leaf, part in zip(
      whole, filled, jax.tree.leaves(record.value), parts, strict=True
    ):
      array[part] = leaf
      mask[part] = True
  for index, mask in enumerate(filled):
    if not mask.all():
      raise ValueError(
        f"assemble: expected shards that make up leaf {index} of tap {first.info.name!r}, of shape "
        f"{list(mask.shape)}, got {int(mask.sum())} of {mask.size} elements"
      )
  return jax.tree.unflatten(tree, whole)


def _check_alike(records: Sequence[Record]) -> None:
  def what(record: Record) -> tuple[Any, ...]:
    info = record.info
    return info.name, info.role, info.lane, info.global_shape

  kinds = {repr(what(record)): what(record) for record in records}
  if len(kinds) > 1:
    shown = ", ".join(f"{name!r} ({role}, lane {lane})" for name, role, lane, _ in kinds.values())
    raise ValueError(f"assemble: expected the records of one tap and one lane, got {shown}")


def _tuples(value: Any, count: int) -> list[Any]:
  """One tuple a leaf, of a pytree of tuples of slices or numbers."""
  if isinstance(value, tuple) and count == 1 and all(not isinstance(x, tuple) for x in value):  # pyright: ignore[reportUnknownVariableType]
    return [value]

  def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(y, (slice, int)) for y in x)  # pyright: ignore[reportUnknownVariableType]

  return jax.tree.leaves(value, is_leaf=is_leaf)
