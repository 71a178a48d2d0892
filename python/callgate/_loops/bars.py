# SPDX-License-Identifier: Apache-2.0
"""Draws bars: by tqdm or Rich where they can be redrawn, else as lines of a log.

Imported with the first bar that is drawn, and used by the drawing thread only.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, ClassVar, TextIO

from tqdm.std import tqdm

_LINE_SECONDS = 60.0
_LINE_FORMAT = (
  "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)
# The format of a bar by value; `where` is the value.
_VALUE_FORMAT = "{l_bar}{bar}| {where} [{elapsed}<{remaining}{postfix}]"
_VALUE_LINE = "{desc}{percentage:3.0f}% {where} [{elapsed}<{remaining}{postfix}]"


class Redrawn(tqdm):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
  """A bar of tqdm, of any kind, that may also show a value."""

  monitor_interval = 0  # no monitoring thread: ours redraws all the time
  where: str | None = None

  @property
  def format_dict(self) -> Any:
    form: Any = super().format_dict
    form["ncols"] = form["ncols"] or None  # a terminal with 0 columns doesn't know its width
    if self.where is not None:
      form |= {"bar_format": _VALUE_FORMAT, "where": self.where}
    return form


class Counted(Redrawn):
  """A bar for which tqdm only counts; `refresh` shows the numbers."""

  # Takes no position among tqdm's own bars. One thread: that of `_loops/draw.py`.
  _instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

  def __init__(self, **options: Any) -> None:
    super().__init__(gui=True, disable=False, mininterval=0, miniters=0, **options)


class Lines(Counted):
  """A bar in a log file: a line each minute, and one at the end."""

  def __init__(self, file: TextIO, **options: Any) -> None:
    super().__init__(smoothing=0, **options)
    self._file, self._written = file, time.monotonic()

  def refresh(self, *_: Any, **__: Any) -> None:
    """Writes a line if the last one is a minute old."""
    if time.monotonic() - self._written >= _LINE_SECONDS:
      self._write()

  def _write(self) -> None:
    self._written = time.monotonic()
    form = self.format_dict
    form |= {"elapsed": max(form["elapsed"], 0.0), "ncols": None, "bar_format": None}
    if self.where is not None:
      form["bar_format"] = _VALUE_LINE
    elif self.total is not None and self.n < self.total + 0.5:  # as tqdm does
      form["bar_format"] = _LINE_FORMAT
    if self.desc and form["bar_format"]:  # without a format, tqdm adds the colon
      form["prefix"] = f"{self.desc}: "
    self._file.write(self.format_meter(**form).strip() + "\n")
    self._file.flush()

  def close(self) -> None:
    """Writes the last line, unless the bar is removed."""
    leave = self.leave and not self.disable
    super().close()
    if leave:
      self._write()
