# SPDX-License-Identifier: Apache-2.0
"""Where the user's code was when it traced a call, as programs hold it."""

from __future__ import annotations

import sys
from pathlib import Path

from callgate._core.where import frames

# Outermost first: file, line, function.
Stack = tuple[tuple[str, int, str], ...]
_MOST_FRAMES = 64
_NOT_THE_USERS = tuple(
  f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("jax", "callgate")
)


def of_user() -> Stack:
  """The frames that are running, without those of JAX and callgate."""
  found = [
    (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    for frame in frames()
    if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
  ]
  return tuple(reversed(found[:_MOST_FRAMES]))
