# SPDX-License-Identifier: Apache-2.0
"""Numbers from environment variables: one that can't be read is named, and its default taken.

A wrong value is told on stderr, once, and raises nothing: these are read by the import and at the
end of the process, where one would hide what the program did.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

_MOST = 1e8  # seconds, three years: what is more overflows clocks


def seconds(name: str, default: float) -> float:
  """The seconds that an environment variable asks for; `default` where it is not set, or empty."""
  given = os.environ.get(name, "").strip()
  with contextlib.suppress(ValueError):
    if 0 <= (value := float(given or default)) <= _MOST:
      return value
  _tell(name, given, default)
  return default


@functools.cache  # never emptied: one entry for each wrong value
def _tell(name: str, given: str, default: float) -> None:
  print(
    f"callgate: environment variable {name}: expected seconds, a number from 0 to {_MOST:.0f}, got "
    f"{given!r}; taking {default:g}",
    file=sys.stderr,
  )
