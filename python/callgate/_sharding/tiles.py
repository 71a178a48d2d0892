# SPDX-License-Identifier: Apache-2.0
"""Finds the tile of an array on each device, and the tiles that a call needs.

The code is plain arithmetic on device numbers and independent of XLA. A device's number is its
position in the program's device assignment, which `stablehlo.partition_id` returns. In a partly
manual program devices with different `manual` labels have different arrays. A `ShardedArray` is a
tiling as programs contain it; messages, `TapInfo.shard` and `assemble` read it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._sharding.rules import Rule, Shape


@dataclasses.dataclass(frozen=True)
class Tiling:
  """The tiles of one array on `len(index)` devices."""

  counts: tuple[int, ...]  # tiles along each dimension
  index: np.ndarray  # int64[devices, rank]: the tile that each device holds
  manual: np.ndarray  # int64[devices]: equal for devices that share the array

  @classmethod
  def replicated(cls, rank: int, devices: int) -> Tiling:
    return cls((1,) * rank, np.zeros((devices, rank), int), np.zeros(devices, int))

  @classmethod
  def of_grid(cls, grid: np.ndarray, rank: int) -> Tiling:
    position = np.stack(np.unravel_index(np.argsort(grid, axis=None), grid.shape), 1)
    return cls(tuple(grid.shape[:rank]), position[:, :rank], position[:, -1])

  def grid(self) -> np.ndarray:
    """Device numbers by [tile along each dimension..., replica, manual]."""
    # Sorts by tile and label, then by number.
    order = np.lexsort((self.manual, *self.index.T[::-1]))
    return np.moveaxis(order.reshape(*self.counts, self._labels, -1), -1, -2)

  @property
  def _labels(self) -> int:
    return int(self.manual.max(initial=0)) + 1

  @property
  def expressible(self) -> bool:
    """True if each combination of tiles is on equally many devices, which XLA can express."""
    cells = np.column_stack([self.index, self.manual])
    _, held = np.unique(cells, axis=0, return_counts=True)
    return len(held) == math.prod(self.counts) * self._labels and len(set(held)) == 1

  def tile(self, shape: Shape) -> Shape:
    return tuple(extent // count for extent, count in zip(shape, self.counts, strict=True))


@dataclasses.dataclass(frozen=True)
class TilePlan:
  """The tilings of a call on tiles."""

  operands: tuple[Tiling, ...]  # the tilings that the operands must have
  results: tuple[Tiling, ...]
  devices: int

  @functools.cached_property
  def groups(self) -> list[list[int]]:
    """Groups of devices that hold the same tiles of all arrays, by their numbers."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(self.devices):
      arrays = (*self.operands, *self.results)
      tiles = tuple(i for one in arrays for i in (*one.index[device], one.manual[device]))
      found.setdefault(tiles, []).append(device)
    return list(found.values())


def plan(
  rule: Rule,
  shapes: tuple[Sequence[Shape], Sequence[Shape]],
  tilings: tuple[Sequence[Tiling], Sequence[Tiling]],
  devices: int,
) -> TilePlan:
  """Returns the tilings, nearest to the given ones, for a correct call on tiles by a closed rule.

  The results' tilings come first: the program asks for them, and propagation derived the operands'
  tilings from them. A factor that may be split is split as in the first array that has it. It is
  whole if another array can't express that split, or if tiles would be uneven.
  """
  terms = [*rule.results, *rule.operands]
  extents = [*shapes[1], *shapes[0]]
  given = [*tilings[1], *tilings[0]]
  none = np.zeros(devices, int)
  manual = next((t.manual for t in given if t.manual.any()), none)
  split: dict[int, tuple[int, np.ndarray]] = {}

  def tiling_of(term: Sequence[int]) -> Tiling:
    parts = [split.get(factor, (1, none)) for factor in term]
    index = np.array([column for _, column in parts], int).reshape(len(term), devices).T
    return Tiling(tuple(count for count, _ in parts), index, manual)

  for term, shape, tiling in zip(terms, extents, given, strict=True):
    for axis, factor in enumerate(term):
      count = tiling.counts[axis]
      if factor in rule.whole or factor in split or count == 1 or shape[axis] % count:
        continue
      if factor in rule.least and shape[axis] == count:
        continue
      split[factor] = (count, tiling.index[:, axis])
      if not all(tiling_of(other).expressible for other in terms if factor in other):
        del split[factor]
  found = [tiling_of(term) for term in terms]
  results = len(rule.results)
  return TilePlan(tuple(found[results:]), tuple(found[:results]), devices)


# The number of a record's shard, plus one, starts at this bit (kShardBit in src/channel/record.h).
SHARD_BIT = 8


def shard_of(flags: int) -> int:
  """Returns the shard's number in a record's flags; -1 for a record of whole arrays."""
  return (flags >> SHARD_BIT) - 1


def encode(tiling: Tiling, shape: Sequence[int]) -> dict[str, Any]:
  """Returns a tiling for JSON: the whole shape, tiles along each dimension, each device's tile."""
  part: dict[str, Any] = {"shape": list(shape)}
  if any(count > 1 for count in tiling.counts):
    part["counts"] = list(tiling.counts)
    part["tile"] = np.ravel_multi_index(tuple(tiling.index.T), tiling.counts).tolist()
  return part


class ShardedArray:
  """The places of one array's shards in the whole array."""

  def __init__(self, code: dict[str, Any]) -> None:
    self.shape: tuple[int, ...] = tuple(code["shape"])
    self.counts: tuple[int, ...] = tuple(code.get("counts", (1,) * len(self.shape)))
    self._tiles: list[int] | None = code.get("tile")

  def slices(self, shard: int) -> tuple[slice, ...]:
    tile = self._tiles[shard] if self._tiles is not None else 0
    index = map(int, np.unravel_index(tile, self.counts) if self.counts else ())
    extents = [extent // count for extent, count in zip(self.shape, self.counts, strict=True)]
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, extents, strict=True))

  def is_first(self, shard: int) -> bool:
    """Returns True if no earlier shard has the same part."""
    return shard == (self._tiles.index(self._tiles[shard]) if self._tiles is not None else 0)


@functools.lru_cache(maxsize=1024)
def _layout(text: str) -> tuple[int, list[tuple[str, ShardedArray]]]:
  code = json.loads(text)
  return code["devices"], [(name, ShardedArray(part)) for name, part in code["operands"]]


def parts(layout: str, shard: int) -> list[tuple[slice, ...]]:
  """Returns a shard's part of each operand."""
  return [part.slices(shard) for _, part in _layout(layout)[1]]


def describe(layout: str, shard: int) -> str:
  """Describes a shard, "shard 3 of 8 (x[4:6, 0:8])"; "" for a call on whole arrays."""
  if shard < 0:
    return ""
  devices, operands = _layout(layout)
  parts = [
    f"{name}[{', '.join(f'{s.start}:{s.stop}' for s in part.slices(shard))}]"
    for name, part in operands
    if any(count > 1 for count in part.counts)
  ]
  return f"shard {shard} of {devices}" + (f" ({', '.join(parts)})" if parts else "")
