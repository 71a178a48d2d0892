# SPDX-License-Identifier: Apache-2.0
"""The batch levels that vmap puts around a call, and the positions of their lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._core.encoding import OPEN, is_open

# A batch level: its extent and, for each operand, whether it has that axis.
Level = tuple[int, tuple[bool, ...]]
# A numbered level, whose lanes the program runs one after the other: its extent, and how many of
# the call's other levels are inside of it. No operand has an axis of it.
Numbered = tuple[int, int]


def all_sizes(sizes: Sequence[int], numbered: Sequence[Numbered]) -> list[tuple[int, bool]]:
  """The extents of all levels, outermost first, each with True if the level is numbered."""
  found: list[tuple[int, bool]] = []
  for inside, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
    found += [(n, True) for n, own in numbered if own == inside]
    found.append((size, False))
  return found + [(n, True) for n, own in numbered if own == 0]


def index_in_levels(
  index: Sequence[int], sizes: Sequence[int], numbered: Sequence[Numbered], number: int
) -> tuple[tuple[int, ...], int]:
  """A lane's index in all levels, and its position (`Lanes::position` in src/core/lanes.h).

  `index` is its index in the levels that are not numbered, and `number` that of the call.
  """
  levels = all_sizes(sizes, numbered)
  numbers = iter(np.unravel_index(number, [n for n, _ in numbered]) if numbered else ())
  own = iter(index)
  every = tuple(int(next(numbers if flag else own)) for _, flag in levels)
  position = int(np.ravel_multi_index(every, [n for n, _ in levels])) if levels else 0
  return every, position


def number_of_lane(lane: Any, numbered: Sequence[Numbered], inner: Sequence[Any]) -> Any:
  """The number of a call in one more numbered level, the outermost, where it is in `lane`.

  `inner` is the number that the call has in the `numbered` levels, if there are any.
  """
  return lane * math.prod(n for n, _ in numbered) + inner[0] if numbered else lane


def encode_levels(
  levels: Sequence[Level], numbered: Sequence[Numbered] = (), operands: int = 0
) -> dict[str, Any]:
  """Batch levels of so many operands as programs hold them (`Lanes::of` in src/core/lanes.h)."""
  if not levels and not numbered:
    return {}
  found = all_sizes([n for n, _ in levels], numbered)
  masks = (mask for _, mask in levels)
  flags = [flag for _, own in found for flag in ((False,) * operands if own else next(masks))]
  batch = {
    "sizes": np.array([OPEN if is_open(n) else n for n, _ in found], np.int64),
    "masks": np.array(flags, np.int64),
  }
  if numbered:
    batch["numbered"] = np.array([own for _, own in found], np.int64)
  return batch
