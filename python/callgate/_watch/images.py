# SPDX-License-Identifier: Apache-2.0
"""Arrays as pictures: what may be one, in few enough pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

_LEAST, _MOST = 4, 256  # pixels of an edge
# A path from dark blue over green to yellow whose lightness grows evenly; RGB, from 0 to 255.
_COLORS = np.array([(25, 20, 80), (45, 85, 140), (30, 140, 130), (105, 190, 85), (250, 230, 50)])


@dataclasses.dataclass(frozen=True)
class Image:
  """A picture of an array, and between which values its colours lie."""

  pixels: np.ndarray[Any, Any]  # uint8[height, width, 1, 3 or 4]
  low: float
  high: float


def image_of(array: np.ndarray[Any, Any]) -> Image | None:
  """The array as a picture if its shape is [height, width], or [height, width, 1, 3 or 4].

  Large ones lose rows and columns. A fourth channel is left out; uint8 are taken as they are, other
  numbers as 0 to 1, or to 255 where one is above 1. The colours of a lone channel go from the least
  to the greatest value.
  """
  channels = array.shape[2] if array.ndim == 3 else 1
  if array.ndim not in (2, 3) or channels not in (1, 3, 4) or min(array.shape[:2]) < _LEAST:
    return None
  few = small(array)
  few = few.reshape(*few.shape[:2], channels)
  values = (np.abs(few) if few.dtype.kind == "c" else few).astype(np.float64)
  finite = values[np.isfinite(values)]
  low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
  values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
  if channels >= 3:
    scale = 1.0 if array.dtype == np.uint8 or high > 1 else 255.0
    return Image(np.clip(values[..., :3] * scale, 0, 255).astype(np.uint8), low, high)
  with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
    part = (
      np.nan_to_num((values[..., 0] - low) / (high - low)) if high > low else values[..., 0] * 0
    )
  places = np.linspace(0, 1, len(_COLORS))
  colored = [np.interp(part, places, _COLORS[:, channel]) for channel in range(3)]
  return Image(np.stack(colored, -1).round().astype(np.uint8), low, high)


def small(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
  """The array with each so many rows and columns, alike, that few enough pixels are left."""
  step = max(1, -(-max(array.shape[:2]) // _MOST))
  return array[::step, ::step]
