# SPDX-License-Identifier: Apache-2.0
"""Where the user's code was when it traced a call, as programs hold it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

# Outermost first: file, line, function.
Stack = tuple[tuple[str, int, str], ...]
_MOST_FRAMES = 64
_NOT_THE_USERS = tuple(
  f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("jax", "callgate")
)


def of_user() -> Stack:
  """The frames that are running, without those of JAX and callgate."""

  def frames() -> Iterable[tuple[str, int, str]]:
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
      code = frame.f_code
      if not code.co_filename.startswith(_NOT_THE_USERS):
        yield code.co_filename, frame.f_lineno, code.co_name
      frame = frame.f_back

  return tuple(reversed([*frames()][:_MOST_FRAMES]))
