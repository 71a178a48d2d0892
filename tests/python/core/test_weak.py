# SPDX-License-Identifier: Apache-2.0
"""A set of weak references is read while other threads add to it."""

from __future__ import annotations

import threading
import weakref

from switch_interval import switch_interval

from callgate._core.weak import members


class _Member:
  pass


def test_members_are_read_while_threads_add_some() -> None:
  weak: weakref.WeakSet[_Member] = weakref.WeakSet()
  kept = [_Member() for _ in range(100)]
  first = set(map(id, kept))
  weak.update(kept)
  done = threading.Event()

  def add() -> None:
    while not done.is_set():
      more = [_Member() for _ in range(100)]
      weak.update(more)
      del more

  threads = [threading.Thread(target=add) for _ in range(2)]
  try:
    with switch_interval():
      for thread in threads:
        thread.start()
      for _ in range(300):
        assert first <= set(map(id, members(weak)))
  finally:
    done.set()
    for thread in threads:
      thread.join()
