# SPDX-License-Identifier: Apache-2.0
"""Bars that Rich draws, all of one file in one display of its own.

Used by the drawing thread alone, which redraws; Rich's own thread is not started.
"""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
  BarColumn,
  Progress,
  ProgressColumn,
  Task,
  TaskProgressColumn,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)
from rich.text import Text

# By id() of the file, which the display keeps. One thread: that of `_loops/draw.py`; emptied by the
# end of a file's last bar.
_displays: dict[int, _Display] = {}


class _Done(ProgressColumn):
  """Steps, or the value that moves the bar."""

  def render(self, task: Task) -> Text:
    if (where := task.fields["where"]) is not None:
      return Text(where)
    if task.total is None:
      return Text(f"{int(task.completed)}")
    return Text(f"{int(task.completed)}/{int(task.total)}")


class _Display:
  """The bars of one file; it ends with the last of them."""

  def __init__(self, file: TextIO) -> None:
    self.file, self.count = file, 0
    self.progress = Progress(
      TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), _Done(),
      TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[values]}"),
      console=Console(file=file), auto_refresh=False,
    )  # fmt: skip


class RichBar:
  """A bar with tqdm's methods, as far as who draws calls them."""

  def __init__(self, *, file: TextIO, total: float | None, desc: str | None, leave: bool) -> None:
    self.n: float = 0
    self.where: str | None = None
    self.last_print_t = 0.0  # tqdm's, which who draws sets
    self._leave = leave
    self._display = _displays.setdefault(id(file), _Display(file))
    self._display.count += 1
    if self._display.count == 1:
      self._display.progress.start()
    self._task = self._display.progress.add_task(desc or "", total=total, where=None, values="")

  @property
  def start_t(self) -> float:
    """When its loop began."""
    return time.time()

  @start_t.setter
  def start_t(self, begun: float) -> None:
    progress = self._display.progress
    progress.tasks[progress.task_ids.index(self._task)].start_time = progress.get_time() - max(
      time.time() - begun, 0.0
    )

  def update(self, more: float) -> None:
    self.n += more
    self._display.progress.update(self._task, completed=self.n, where=self.where, refresh=True)

  def reset(self, total: float | None) -> None:
    self.n = 0
    self._display.progress.reset(self._task, total=total)

  def set_postfix(self, values: dict[str, str], refresh: bool) -> None:
    del refresh
    shown = ", ".join(f"{name}={text}" for name, text in values.items())
    self._display.progress.update(self._task, values=shown)

  def close(self) -> None:
    """The bar stays as it is, or goes; the display ends with its last bar."""
    display = self._display
    if self._leave:
      display.progress.stop_task(self._task)
    else:
      display.progress.remove_task(self._task)
    display.progress.refresh()
    display.count -= 1
    if not display.count:
      display.progress.stop()
      _displays.pop(id(display.file), None)
