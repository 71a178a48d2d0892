# SPDX-License-Identifier: Apache-2.0
"""How often Python's threads take the GIL from each other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

ALL_THE_TIME = 1e-6  # seconds


@contextlib.contextmanager
def switch_interval(seconds: float = ALL_THE_TIME) -> Generator[None]:
  """In the block a thread may have the GIL for so long while another waits for it."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(seconds)
  try:
    yield
  finally:
    sys.setswitchinterval(before)
