# SPDX-License-Identifier: Apache-2.0
"""The functions that the processes of `bench_workers` import from here, and run."""

from __future__ import annotations

import time
from typing import Any


def same(x: Any) -> Any:
  return x


def busy(x: Any) -> Any:
  """Pure Python, for a millisecond."""
  end = time.perf_counter() + 0.001
  while time.perf_counter() < end:
    pass
  return x
