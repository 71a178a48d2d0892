# SPDX-License-Identifier: Apache-2.0
"""The bars themselves: tqdm's where they can be redrawn, lines where they can't.

Imported with the first bar that is drawn, and used by the drawing thread alone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, TextIO

from tqdm.std import tqdm

_LINE_SECONDS = 60.0
_LINE_FORMAT = (
  "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


class Redrawn(tqdm):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
  """tqdm's bar, without its thread that looks after slow bars: ours draws all the time."""

  monitor_interval = 0


class Lines:
  """A bar in a log file: a line a minute, and one at the end."""

  def __init__(self, total: int | None, desc: str | None, file: TextIO, leave: bool) -> None:
    self.n, self._total = 0, total
    self.start_t = time.time()  # set by who draws, as tqdm's own
    self._desc = f"{desc}: " if desc else ""
    self._file, self._leave, self._postfix = file, leave, ""
    self._written = time.monotonic()

  def update(self, steps: int) -> None:
    """Counts, and writes when the last line is a minute old."""
    self.n += steps
    if time.monotonic() - self._written >= _LINE_SECONDS:
      self.refresh()

  def reset(self, total: int | None) -> None:
    self.n, self._total = 0, total

  def set_postfix(self, values: dict[str, str], refresh: bool) -> None:
    self._postfix = ", ".join(f"{name}={text}" for name, text in values.items())

  def refresh(self) -> None:
    self._written = time.monotonic()
    meter: Any = tqdm.format_meter  # takes None for an unknown total, whatever its stub says
    elapsed = max(time.time() - self.start_t, 0.0)
    form = None if self._total is None else _LINE_FORMAT
    options = {"prefix": self._desc, "postfix": self._postfix or None, "bar_format": form}
    text: str = meter(self.n, self._total, elapsed, **options)
    self._file.write(text.strip() + "\n")
    self._file.flush()

  def close(self) -> None:
    """Writes the last line, unless the bar is to go."""
    if self._leave:
      self.refresh()


def make(*, file: TextIO, position: int | None, mininterval: float, **what: Any) -> Any:
  """The kind of bar that suits the file, and the place where Python runs.

  The rest are `total`, `desc` and `leave`.
  """
  ipython: Any = sys.modules.get("IPython")
  if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):  # in a notebook
    if file is sys.stderr:
      with contextlib.suppress(ImportError):  # without ipywidgets
        from tqdm.notebook import tqdm as widget

        return widget(mininterval=mininterval, miniters=0, **what)
  elif not (hasattr(file, "isatty") and file.isatty()):
    return Lines(file=file, **what)
  return Redrawn(
    file=file, position=position, mininterval=mininterval, miniters=0, dynamic_ncols=True, **what
  )
