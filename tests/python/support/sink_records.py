# SPDX-License-Identifier: Apache-2.0
"""Records made by hand, and readers of text files, for the tests of sinks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from callgate import sinks

TIME = 1_700_000_000_000_000_000


def record(name: str, value: Any, seq: int = 0, **info: Any) -> sinks.Record:
  return sinks.Record(value, sinks.TapInfo(name, seq, TIME + seq * 10**9, **info))


def losses(count: int, start: int = 0) -> list[sinks.Record]:
  return [record("loss", np.float32(1 / (i + 1)), i) for i in range(start, start + count)]


def grads(count: int) -> list[sinks.Record]:
  """A pytree of arrays of several dtypes, one of which NumPy lacks."""
  return [
    record(
      "grad",
      {"w": [np.full((2, 3), i, ml_dtypes.bfloat16)], "c": np.complex64(i + 2j), "n": np.int32(i)},
      i,
      device=i % 2,
    )
    for i in range(count)
  ]


EXPECTED = np.array([1 / (i + 1) for i in range(6)], np.float32)
W = np.arange(6, dtype=np.float32)[:, None, None] * np.ones((2, 3), np.float32)
C = np.arange(6).astype(np.complex64) + np.complex64(2j)


def floats(start: int, stop: int) -> list[sinks.Record]:
  return [record("loss", np.float64(i), i) for i in range(start, stop)]


def lines_of(path: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table_of(path: Path) -> list[dict[str, str]]:
  with open(path, newline="", encoding="utf-8") as file:
    return list(csv.DictReader(file))
