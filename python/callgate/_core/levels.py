# SPDX-License-Identifier: Apache-2.0
"""The batch levels of a call under vmap, and the positions of their lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._core.encoding import OPEN, is_open

# A batch level: its extent and, for each operand, True if the operand has that axis.
Level = tuple[int, tuple[bool, ...]]
# A numbered level, whose lanes the program runs one after another: its extent, and the number of
# the call's other levels inside it. No operand has its axis.
Numbered = tuple[int, int]


def all_sizes(sizes: Sequence[int], numbered: Sequence[Numbered]) -> list[tuple[int, bool]]:
  """Returns the extents of all levels, outermost first, each with True if the level is numbered."""
  found: list[tuple[int, bool]] = []
  for inside, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
    found += [(n, True) for n, own in numbered if own == inside]
    found.append((size, False))
  return found + [(n, True) for n, own in numbered if own == 0]


def index_in_levels(
  index: Sequence[int], sizes: Sequence[int], numbered: Sequence[Numbered], number: int
) -> tuple[tuple[int, ...], int]:
  """Returns a lane's index in all levels, and its position (`Lanes::position` in src/core/lanes.h).

  `index` is its index in the levels that are not numbered; `number` is the call's lane number.
  """
  levels = all_sizes(sizes, numbered)
  numbers = iter(np.unravel_index(number, [n for n, _ in numbered]) if numbered else ())
  own = iter(index)
  every = tuple(int(next(numbers if flag else own)) for _, flag in levels)
  position = int(np.ravel_multi_index(every, [n for n, _ in levels])) if levels else 0
  return every, position


def number_of_lane(lane: Any, numbered: Sequence[Numbered], inner: Sequence[Any]) -> Any:
  """Returns a call's number in one more numbered level, the outermost, for its lane `lane` there.

  `inner` is the call's number in the `numbered` levels, if there are any.
  """
  return lane * math.prod(n for n, _ in numbered) + inner[0] if numbered else lane


def encode_levels(
  levels: Sequence[Level], numbered: Sequence[Numbered] = (), operands: int = 0
) -> dict[str, Any]:
  """Returns batch levels as programs contain them (`Lanes::of` in src/core/lanes.h)."""
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
