# SPDX-License-Identifier: Apache-2.0
"""The bars themselves: tqdm's or Rich's where they can be redrawn, lines where they can't.

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
# For a bar that a value moves: `where` that is.
_VALUE_FORMAT = "{l_bar}{bar}| {where} [{elapsed}<{remaining}{postfix}]"
_VALUE_LINE = "{desc}{percentage:3.0f}% {where} [{elapsed}<{remaining}{postfix}]"


class Redrawn(tqdm):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
  """tqdm's bar, which shows where a value is; any kind of it."""

  monitor_interval = 0  # no thread that looks after slow bars: ours draws all the time
  where: str | None = None

  @property
  def format_dict(self) -> Any:
    form: Any = super().format_dict
    if self.where is not None:
      form |= {"bar_format": _VALUE_FORMAT, "where": self.where}
    return form


class Lines:
  """A bar in a log file: a line a minute, and one at the end."""

  def __init__(self, total: float | None, desc: str | None, file: TextIO, leave: bool) -> None:
    self.n: float = 0
    self._total, self.where = total, None
    self.start_t = time.time()  # set by who draws, as tqdm's own
    self._desc = desc or ""
    self._file, self._leave, self._postfix = file, leave, ""
    self._written = time.monotonic()

  def update(self, steps: float) -> None:
    """Counts, and writes when the last line is a minute old."""
    self.n += steps
    if time.monotonic() - self._written >= _LINE_SECONDS:
      self.refresh()

  def reset(self, total: float | None) -> None:
    self.n, self._total = 0, total

  def set_postfix(self, values: dict[str, str], refresh: bool) -> None:
    self._postfix = ", ".join(f"{name}={text}" for name, text in values.items())

  def refresh(self) -> None:
    self._written = time.monotonic()
    meter: Any = tqdm.format_meter  # takes None for an unknown total, whatever its stub says
    elapsed = max(time.time() - self.start_t, 0.0)
    total = self._total if self._total is None or self.n < self._total + 0.5 else None  # as tqdm
    form = None if total is None else _LINE_FORMAT
    if self.where is not None:
      form = _VALUE_LINE
    # Where it has no format of ours, tqdm adds the colon.
    prefix = f"{self._desc}: " if self._desc and form is not None else self._desc
    options = {"prefix": prefix, "postfix": self._postfix or None, "bar_format": form}
    text: str = meter(self.n, total, elapsed, where=self.where, **options)
    self._file.write(text.strip() + "\n")
    self._file.flush()

  def close(self) -> None:
    """Writes the last line, unless the bar is to go."""
    if self._leave:
      self.refresh()


def make(*, file: TextIO, position: int | None, mininterval: float, style: str, **what: Any) -> Any:
  """The kind of bar that suits the file, and the place where Python runs.

  The rest are `total`, `desc` and `leave`. Its `where` is set to what a value that moves it shows.
  """
  ipython: Any = sys.modules.get("IPython")
  notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
  if not notebook and not (hasattr(file, "isatty") and file.isatty()):
    return Lines(file=file, **what)
  if style == "rich":
    from callgate._loops import rich

    return rich.RichBar(file=file, **what)
  if notebook and file is sys.stderr:
    with contextlib.suppress(ImportError):  # without ipywidgets
      from tqdm.notebook import tqdm as widget

      kind: Any = type("Widget", (Redrawn, widget), {})
      return kind(mininterval=mininterval, miniters=0, **what)
  return Redrawn(
    file=file, position=position, mininterval=mininterval, miniters=0, dynamic_ncols=True, **what
  )
