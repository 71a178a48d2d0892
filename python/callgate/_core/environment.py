# SPDX-License-Identifier: Apache-2.0
"""Numbers from environment variables; a wrong value is reported and replaced by the default.

The report goes to stderr, once, and nothing is raised: the variables are read by the import and at
the end of the process, where an exception would hide the program's result.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

_MOST = 1e8  # seconds (three years): larger numbers overflow clocks


def seconds(name: str, default: float) -> float:
  """Returns the seconds in an environment variable; `default` if it is unset or empty."""
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
    f"{given!r}; using {default:g}",
    file=sys.stderr,
  )
