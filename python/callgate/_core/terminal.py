# SPDX-License-Identifier: Apache-2.0
"""Text that a command shows in a terminal, and numbers that it reads from its command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int]  # from the parsed arguments to the exit status


def integer(expected: str, *, least: int = 0, most: int = 2**31) -> Callable[[str], int]:
  """Makes the reader of a command line's number."""

  def read(text: str) -> int:
    with contextlib.suppress(ValueError):
      if least <= (number := int(text)) <= most:
        return number
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

  return read


def printable(text: str) -> str:
  """A text, by anybody, as a terminal may have it: what steers one is written as Python does."""
  shown = "".join(
    letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
  )
  encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
  return shown.encode(encoding, "backslashreplace").decode(encoding)
