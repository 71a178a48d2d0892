# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

# Code of a process, after a `folder`: the address of a server that accepts nobody, at which clients
# wait already.
CROWDED = """
import socket
crowded = f"unix:{folder}/crowded"
server = socket.socket(socket.AF_UNIX)
server.bind(crowded[5:])
server.listen(0)
clients = [socket.socket(socket.AF_UNIX) for _ in range(4)]
for client in clients:
  client.setblocking(False)
  client.connect_ex(crowded[5:])
"""


def until(condition: Callable[[], bool], what: str = "true") -> None:
  """Polls for what has no event; a test that would hang fails after a minute."""
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, f"after a minute: not {what}"
    time.sleep(0.01)
