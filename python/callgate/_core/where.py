# SPDX-License-Identifier: Apache-2.0
"""Finds the running line of the user's code: the innermost frame outside this package.

JAX records where a program was traced, and its tracebacks outlive the frames: `_jax/sources.py`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import jax

from callgate._core import paths

_OWN = f"{paths.ROOT}{os.sep}"
_JAXS = f"{Path(str(jax.__file__)).parent}{os.sep}"
Stack = tuple[tuple[str, int, str], ...]  # outermost first: file, line, function
_MOST_FRAMES = 64  # the most frames of a stack


class Where(NamedTuple):
  """A line of the user's code; as a string, "file:line"."""

  module: str
  code: CodeType
  line: int

  @property
  def file(self) -> str:
    return self.code.co_filename

  def __str__(self) -> str:
    return f"{self.file}:{self.line}"

  def definition(self) -> Where | None:
    """Returns this line if it defines one name; None in a function of a module.

    Such a function may define several objects of one name. A function in a prompt or a notebook, in
    a `__main__` without a file, redefines the same object.
    """
    inside = self.code.co_flags & inspect.CO_OPTIMIZED or "<locals>" in self.code.co_qualname
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    interactive = self.module == "__main__" and self.file != script
    return None if inside and not interactive else self

  def redefines(self, old: Where | None) -> bool:
    """Returns True if this line redefines the object of `old`: a cell or a module has run again.

    Two lines of the same code define two objects.
    """
    if old is None or old.module != self.module:
      return False
    return old.code is not self.code or old.line == self.line


def where() -> Where:
  """Returns the line of the user's code that calls callgate now."""
  frame = next(frames())
  return Where(str(frame.f_globals.get("__name__", "__main__")), frame.f_code, frame.f_lineno)


def users_stack() -> Stack:
  """Returns the running frames, without those of JAX and callgate, as programs contain them."""
  found = [
    (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    for frame in frames()
    if not frame.f_code.co_filename.startswith((_OWN, _JAXS))
  ]
  return tuple(reversed(found[:_MOST_FRAMES]))


def is_users_call() -> bool:
  """Returns True if the user's code called the function that runs, or JAX's around it."""
  frame = sys._getframe(1).f_back  # pyright: ignore[reportPrivateUsage]
  while frame is not None and frame.f_code.co_filename.startswith(_JAXS):
    frame = frame.f_back
  return frame is None or not frame.f_code.co_filename.startswith(_OWN)


def frames() -> Iterator[FrameType]:
  """Yields the running frames, beginning with the innermost of the user's code."""
  frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
  while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
    frame = frame.f_back
  while frame is not None:
    yield frame
    frame = frame.f_back
