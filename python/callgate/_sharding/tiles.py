"""Which device holds which tile of which array, and what a call on tiles needs it to hold.

Plain arithmetic on device numbers: position in the program's device assignment, which is what
`stablehlo.partition_id` gives. Nothing here knows XLA; `_jax/partitioner.py` reads and writes its
shardings.

A `Tiling` says how many tiles each dimension has and, for each device, which of them it holds. In a
partly manual program devices with different `manual` labels hold different arrays altogether. A
`Part` is a tiling as programs hold it: messages, `TapInfo.shard` and `assemble` read it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._sharding.rules import Rule, Shape


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How one array lies on `len(index)` devices.

  Attributes:
    counts: tiles along each dimension.
    index: int64[devices, rank]: the tile that each device holds.
    manual: int64[devices]: equal for devices that share the array.
  """

  counts: tuple[int, ...]
  index: np.ndarray
  manual: np.ndarray

  @classmethod
  def replicated(cls, rank: int, devices: int) -> Tiling:
    """Every device holds the whole array."""
    return cls((1,) * rank, np.zeros((devices, rank), int), np.zeros(devices, int))

  @classmethod
  def of_grid(cls, grid: np.ndarray, rank: int) -> Tiling:
    """From device numbers by [tile along each dimension..., replica, manual]."""
    devices = grid.size
    index, manual = np.zeros((devices, rank), int), np.zeros(devices, int)
    for position in np.ndindex(grid.shape):
      index[grid[position]] = position[:rank]
      manual[grid[position]] = position[-1]
    return cls(tuple(grid.shape[:rank]), index, manual)

  def grid(self) -> np.ndarray:
    """Device numbers by [tile along each dimension..., replica, manual]."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for device, (tile, label) in enumerate(zip(self.index, self.manual, strict=True)):
      cells.setdefault((*tile.tolist(), int(label)), []).append(device)
    labels = int(self.manual.max(initial=0)) + 1
    replicas = len(self.index) // (int(np.prod(self.counts, dtype=int)) * labels)
    grid = np.zeros((*self.counts, labels, replicas), int)
    for cell, devices in cells.items():
      grid[cell] = devices
    return np.moveaxis(grid, -1, -2)

  @property
  def expressible(self) -> bool:
    """Whether each combination of tiles lies on equally many devices: what XLA can express."""
    cells = np.column_stack([self.index, self.manual])
    _, held = np.unique(cells, axis=0, return_counts=True)
    labels = int(self.manual.max(initial=0)) + 1
    return len(held) == int(np.prod(self.counts, dtype=int)) * labels and len(set(held)) == 1

  def tile(self, shape: Shape) -> Shape:
    """The extents of one tile."""
    return tuple(extent // count for extent, count in zip(shape, self.counts, strict=True))


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a call on tiles finds its arrays.

  Attributes:
    operands: the tilings that the operands must have.
    results: those that the results have.
    devices: how many there are.
  """

  operands: tuple[Tiling, ...]
  results: tuple[Tiling, ...]
  devices: int

  @functools.cached_property
  def groups(self) -> list[list[int]]:
    """The devices that hold the same tiles of everything, in order of their numbers."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(self.devices):
      found.setdefault(self.tiles_of(device), []).append(device)
    return list(found.values())

  def tiles_of(self, device: int) -> tuple[int, ...]:
    """A device's tiles of all arrays."""
    arrays = (*self.operands, *self.results)
    return tuple(int(i) for one in arrays for i in (*one.index[device], one.manual[device]))


def plan(
  rule: Rule,
  shapes: tuple[Sequence[Shape], Sequence[Shape]],
  tilings: tuple[Sequence[Tiling], Sequence[Tiling]],
  devices: int,
) -> Plan:
  """The tilings nearest to those at hand under which the call on tiles is right.

  Results come first: their tilings are what the program asks for, and what propagation has made of
  the operands'. A factor that a rule lets be split is split as the first array that has it is;
  where that can't be expressed for another array, and where tiles would be uneven, it is whole.

  The rule is closed (`Rule.closed`); shapes and tilings are the operands' and the results'.
  """
  operand_shapes, result_shapes = shapes
  terms = [*rule.results, *rule.operands]
  extents = [*result_shapes, *operand_shapes]
  given = [*tilings[1], *tilings[0]]
  manual = next((t.manual for t in given if t.manual.any()), np.zeros(devices, int))
  split: dict[int, tuple[int, np.ndarray]] = {}

  def made(term: Sequence[int]) -> Tiling:
    counts = tuple(split[f][0] if f in split else 1 for f in term)
    none = np.zeros(devices, int)
    columns = [split[f][1] if f in split else none for f in term]
    index = np.stack(columns, 1) if columns else np.zeros((devices, 0), int)
    return Tiling(counts, index, manual)

  for term, shape, tiling in zip(terms, extents, given, strict=True):
    for axis, factor in enumerate(term):
      count = tiling.counts[axis]
      if factor in rule.whole or factor in split or count == 1 or shape[axis] % count:
        continue
      if factor in rule.least and shape[axis] == count:
        continue
      split[factor] = (count, tiling.index[:, axis])
      if not all(made(other).expressible for other in terms if factor in other):
        del split[factor]
  found = [made(term) for term in terms]
  results = len(rule.results)
  return Plan(tuple(found[results:]), tuple(found[:results]), devices)


# The number of a record's shard, plus one, from this bit on (kShardBit in src/channel/record.h).
SHARD_BIT = 8


def shard_of(flags: int) -> int:
  """The shard's number in a record's flags; -1 for a record of whole arrays."""
  return (flags >> SHARD_BIT) - 1


def encode(tiling: Tiling, shape: Sequence[int]) -> dict[str, Any]:
  """A part as JSON has it: the whole's shape, tiles along each dimension, each device's tile."""
  part: dict[str, Any] = {"shape": list(shape)}
  if any(count > 1 for count in tiling.counts):
    part["counts"] = list(tiling.counts)
    part["tile"] = np.ravel_multi_index(tuple(tiling.index.T), tiling.counts).tolist()
  return part


class Part:
  """Where one array's shards lie in the whole."""

  def __init__(self, code: dict[str, Any]) -> None:
    self.shape: tuple[int, ...] = tuple(code["shape"])
    self.counts: tuple[int, ...] = tuple(code.get("counts", (1,) * len(self.shape)))
    self._tiles: list[int] | None = code.get("tile")

  def slices(self, shard: int) -> tuple[slice, ...]:
    """The slices of the whole that a shard is."""
    tile = self._tiles[shard] if self._tiles is not None else 0
    index = np.unravel_index(tile, self.counts) if self.counts else ()
    extents = [extent // count for extent, count in zip(self.shape, self.counts, strict=True)]
    return tuple(
      slice(int(i) * extent, (int(i) + 1) * extent)
      for i, extent in zip(index, extents, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _layout(text: str) -> tuple[int, list[tuple[str, Part]]]:
  code = json.loads(text)
  return code["devices"], [(name, Part(part)) for name, part in code["operands"]]


def describe(layout: str, shard: int) -> str:
  """A shard in words, "shard 3 of 8 (x[4:6, 0:8])"; "" for a call on whole arrays."""
  if shard < 0:
    return ""
  devices, operands = _layout(layout)
  parts = [f"{name}{text}" for name, part in operands if (text := _text(part, shard))]
  return f"shard {shard} of {devices}" + (f" ({', '.join(parts)})" if parts else "")


def _text(part: Part, shard: int) -> str:
  if all(count == 1 for count in part.counts):
    return ""
  return f"[{', '.join(f'{s.start}:{s.stop}' for s in part.slices(shard))}]"
