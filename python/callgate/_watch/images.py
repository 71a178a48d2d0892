# SPDX-License-Identifier: Apache-2.0
"""Shows arrays as small pictures, if their shape is that of a picture."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

_LEAST, _MOST = 4, 256  # pixels of an edge
# Dark blue, green, yellow, with evenly increasing lightness; RGB, from 0 to 255.
_COLORS = np.array([(25, 20, 80), (45, 85, 140), (30, 140, 130), (105, 190, 85), (250, 230, 50)])


@dataclasses.dataclass(frozen=True)
class Image:
  """A picture of an array, and the values at the ends of its color scale."""

  pixels: np.ndarray[Any, Any]  # uint8[height, width, 1, 3 or 4]
  low: float
  high: float


def image_of(array: np.ndarray[Any, Any]) -> Image | None:
  """Returns the array as a picture if its shape is [height, width], or [height, width, 1, 3 or 4].

  Large arrays lose rows and columns. A fourth channel is dropped. uint8 is used as it is; other
  numbers are scaled from the range 0 to 1, or 0 to 255 if one is above 1. A single channel gets
  colors from its least to its greatest value.
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
  """Returns the array with evenly chosen rows and columns, so that it has few enough pixels."""
  step = max(1, -(-max(array.shape[:2]) // _MOST))
  return array[::step, ::step]
