"""Which part of its arrays a call on a shard sees: what programs hold of it, and how it is read.

The partitioner writes a `Part` for each array into the call it makes for the devices; messages,
`TapInfo.shard` and `assemble` read it. A shard's number is the device's position in the program.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._tiles import Tiling

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
