# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal, and numbers from a command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int]  # takes the parsed arguments, returns the exit status


def integer(expected: str, *, least: int = 0, most: int = 2**31) -> Callable[[str], int]:
  """Returns a function that reads an integer from a command line."""

  def read(text: str) -> int:
    with contextlib.suppress(ValueError):
      if least <= (number := int(text)) <= most:
        return number
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

  return read


def printable(text: str) -> str:
  """Returns a text with control characters escaped as in Python, safe for a terminal."""
  shown = "".join(
    letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
  )
  encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
  return shown.encode(encoding, "backslashreplace").decode(encoding)
