# SPDX-License-Identifier: Apache-2.0
"""PNG files of arrays: https://www.w3.org/TR/png-3/"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # by channels: gray, RGB, RGBA


def png(pixels: np.ndarray[Any, Any]) -> bytes:
  """Returns a PNG of uint8[height, width, 1, 3 or 4]."""
  height, width, channels = pixels.shape
  lines = np.zeros((height, 1 + channels * width), np.uint8)  # each line begins with its filter, 0
  lines[:, 1:] = pixels.reshape(height, -1)

  def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

  head = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
  body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
  return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")
