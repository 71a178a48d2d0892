# SPDX-License-Identifier: Apache-2.0
"""Another thread's work at a chosen point of this thread's, for tests of what a lock guards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Meanwhile:
  """Has another thread call a function, once, where this is called; `end` waits for its end.

  The call waits for the thread as long as it may take without a lock that keeps it waiting.
  """

  _SECONDS = 0.2

  def __init__(self, function: Callable[[], Any]) -> None:
    self._function = function
    self._thread: threading.Thread | None = None

  def __call__(self) -> None:
    if self._thread is None:
      self._thread = threading.Thread(target=self._function)
      self._thread.start()
      self._thread.join(self._SECONDS)

  def end(self) -> None:
    """Waits for the thread, after the work that it came between."""
    assert self._thread is not None
    self._thread.join(60)
    assert not self._thread.is_alive()
