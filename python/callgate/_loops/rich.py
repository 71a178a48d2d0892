# SPDX-License-Identifier: Apache-2.0
"""Bars drawn by Rich; all bars of one file share a display.

Only the drawing thread uses it and redraws; Rich's own thread isn't started.
"""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
  BarColumn,
  Progress,
  TaskProgressColumn,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)

from callgate._loops.bars import Counted

# By id() of the file, which the display keeps. One thread: that of `_loops/draw.py`; emptied by the
# end of a file's last bar.
_displays: dict[int, Progress] = {}


def _display_of(file: TextIO) -> Progress:
  if id(file) not in _displays:
    _displays[id(file)] = Progress(
      TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
      TextColumn("{task.fields[where]}", style="none", markup=False),
      TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[values]}"),
      console=Console(file=file), auto_refresh=False,
    )  # fmt: skip
    _displays[id(file)].start()
  return _displays[id(file)]


class RichBar(Counted):
  """A bar that Rich draws."""

  def __init__(self, file: TextIO, **options: Any) -> None:
    super().__init__(**options)
    self._key, self._progress = id(file), _display_of(file)
    self._task = self._progress.add_task(self.desc, total=self.total, where="", values="")

  def refresh(self, *_: Any, **__: Any) -> None:
    """Shows the steps, or the value of a bar by value, and the values behind the bar."""
    (task,) = (it for it in self._progress.tasks if it.id == self._task)
    task.start_time = self._progress.get_time() - max(self.format_dict["elapsed"], 0.0)
    total = "" if self.total is None else f"/{int(self.total)}"
    where = f"{int(self.n)}{total}" if self.where is None else self.where
    shown: dict[str, Any] = {"where": where, "values": self.postfix or ""}
    self._progress.update(self._task, completed=self.n, refresh=True, **shown)

  def reset(self, total: float | None = None) -> None:
    self._progress.reset(self._task, total=total)
    super().reset(total)

  def close(self) -> None:
    """Keeps or removes the bar; the display ends with its last bar."""
    if self.disable:
      return
    super().close()
    if self.leave:
      self._progress.stop_task(self._task)
    else:
      self._progress.remove_task(self._task)
    self._progress.refresh()
    if all(task.stop_time is not None for task in self._progress.tasks):
      self._progress.stop()
      _displays.pop(self._key, None)
