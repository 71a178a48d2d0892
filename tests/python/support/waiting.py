# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], what: str = "true") -> None:
  """Polls for what has no event; a test that would hang fails after a minute."""
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, f"after a minute: not {what}"
    time.sleep(0.01)
