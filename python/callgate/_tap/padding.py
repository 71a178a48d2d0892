"""Which part of a tapped array counts, where `logical_shape` said so.

A tap sends padded arrays whole, with their sizes; who reads a record cuts the padding off here (in
native sinks, src/channel/record.cc does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._sharding.tiles import Part


class SizeError(ValueError):
  """A size is negative, or more than the array has."""


def cut(
  values: list[Any],
  padded: Sequence[int],
  sizes: Sequence[np.ndarray],
  parts: Sequence[Part] | None,
  shard: int,
) -> None:
  """Puts what counts in the places of the `padded` ones of the leaves. Raises SizeError.

  `sizes` are, for each of these, the sizes that count, one a dimension; those of several lanes at
  once (`TapSite.whole`) are left to the consumer. `parts` says where the shards of each leaf lie,
  and `shard` which one they are: None and -1 for whole arrays.
  """
  for index, own in zip(padded, sizes, strict=True):
    if own.ndim != 1:
      continue
    value = values[index]
    lead = value.ndim - len(own)  # lanes that stay together come first
    local = within(index, own, value.shape[lead:], parts, shard)
    values[index] = value[(slice(None),) * lead + tuple(slice(0, int(n)) for n in local)]


def within(
  index: int,
  sizes: np.ndarray,
  shape: tuple[int, ...],
  parts: Sequence[Part] | None,
  shard: int,
) -> np.ndarray:
  """How much of a shard's array counts, by the sizes of the whole."""
  part = parts[index] if parts is not None and shard >= 0 else None
  whole = shape if part is None else part.shape
  for axis, (size, extent) in enumerate(zip(sizes, whole, strict=True)):
    if not 0 <= size <= extent:
      raise SizeError(
        f"logical_shape of leaf {index}, dimension {axis}: expected a size from 0 to {extent}, "
        f"got {size}"
      )
  if part is None:
    return sizes
  return np.clip(sizes - [one.start for one in part.slices(shard)], 0, shape)
