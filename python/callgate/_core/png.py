# SPDX-License-Identifier: Apache-2.0
"""Pictures as PNG files."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np


def png(pixels: np.ndarray[Any, Any]) -> bytes:
  """A PNG of uint8[height, width, 3]: https://www.w3.org/TR/png-3/"""
  height, width, _ = pixels.shape
  lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter, none
  lines[:, 1:] = pixels.reshape(height, -1)

  def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

  head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
  return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")
