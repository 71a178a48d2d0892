# SPDX-License-Identifier: Apache-2.0
"""The stream into which the tests of `callgate.compat.host_callback` print, and its comparison."""

from __future__ import annotations

import textwrap


class Stream:
  """Collects what is written."""

  def __init__(self) -> None:
    self._text = ""

  def write(self, text: str) -> None:
    self._text += text

  def taken(self) -> list[str]:
    """The lines written since the last call."""
    text, self._text = self._text, ""
    return text.splitlines()


def lines(text: str) -> list[str]:
  """The lines of an indented block."""
  return textwrap.dedent(text).strip("\n").splitlines()
