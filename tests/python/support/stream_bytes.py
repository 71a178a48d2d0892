# SPDX-License-Identifier: Apache-2.0
"""The stream format once more, in Python alone: an encoder that shares nothing with callgate's.

Written from the comment at the top of include/callgate/stream.h. Imports neither JAX nor callgate,
so that a child process which writes starts at once.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

# XLA_FFI_DataType's codes and bits of the dtypes used here.
CODES = {
  "bool": (1, 8), "int8": (2, 8), "int16": (3, 16), "int32": (4, 32), "int64": (5, 64),
  "uint8": (6, 8), "uint16": (7, 16), "uint32": (8, 32), "uint64": (9, 64), "float16": (10, 16),
  "float32": (11, 32), "float64": (12, 64), "complex64": (15, 64), "bfloat16": (16, 16),
  "complex128": (18, 128), "int4": (21, 4), "uint4": (22, 4), "int2": (26, 2),
}  # fmt: skip


def _crc_table() -> list[int]:
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
  return crc ^ 0xFFFFFFFF


def padded(data: bytes) -> bytes:
  return data + bytes(-len(data) % 8)


def frame(kind: str, body: bytes) -> bytes:
  body = padded(body)
  head = b"cgs" + kind.encode() + struct.pack("<IQI", crc32c(body), 24 + len(body), 0)
  return head + struct.pack("<I", crc32c(head)) + body


def session(
  process: int = 1, time_ns: int = 0, version: int = 1, index: int | None = None
) -> bytes:
  """A session; without `index` as it was before that field came."""
  extra = b"" if index is None else struct.pack("<iI", index, 0)
  return frame("S", struct.pack("<IIq", version, process, time_ns) + extra)


def leaf(path: str, dtype: str, dims: tuple[int, ...]) -> bytes:
  code, bits = CODES[dtype]
  fields = struct.pack("<6I", code, bits, len(dims), len(dtype), len(path.encode()), 0)
  return (
    fields + struct.pack(f"<{len(dims)}q", *dims) + padded(dtype.encode()) + padded(path.encode())
  )


def source(
  number: int,
  name: str,
  leaves: list[tuple[str, str, tuple[int, ...]]],
  *,
  description: str = "{}",
  role: int = 0,
  lanes: str = "",
  has_where: bool = False,
) -> bytes:
  """A description; with `has_where` the last leaf is the `where`."""
  texts = [name.encode(), description.encode(), lanes.encode()]
  body = struct.pack("<IBBHQ", number, role, has_where, 0, 100 + number)
  values = len(leaves) - has_where
  body += struct.pack("<6I", *(len(t) for t in texts), len(leaves), values, 0)
  body += b"".join(padded(text) for text in texts)
  return frame("D", body + b"".join(leaf(*one) for one in leaves))


def record(
  number: int,
  arrays: list[Any],
  *,
  seq: int = 0,
  time_ns: int = 0,
  run: int = -1,
  device: int = 0,
  flags: int = 0,
) -> bytes:
  body = struct.pack("<IIQqqiI", number, flags, seq, time_ns, run, device, 0)
  for array in arrays:
    body += padded(array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes())
  return frame("R", body)


def end(records: int = 0, time_ns: int = 0) -> bytes:
  return frame("E", struct.pack("<Qq", records, time_ns))


LOSS = [("", "float32", ())]


def losses(values: list[float], *, name: str = "loss", begin: int = 0, **fields: Any) -> bytes:
  """A session of scalar records whose seq and time count from `begin`."""
  out = session() + source(0, name, LOSS)
  for step, value in enumerate(values, begin):
    out += record(0, [np.float32(value)], seq=step, time_ns=step * 1000, **fields)
  return out
