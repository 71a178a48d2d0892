# SPDX-License-Identifier: Apache-2.0
"""The sink Plot: learning curves as a picture that is redrawn while they grow.

It needs no display, and leaves pyplot's state and the program's backend alone.
"""

from __future__ import annotations

import pathlib
import time
from typing import Unpack

import numpy as np

from callgate._core import options, paths
from callgate._core.opened import resolved
from callgate._tap.records import Record, columns
from callgate.sinks._base import ChoiceOptions, LibrarySink, StrPath, lane_suffix, plain


class Plot(LibrarySink):
  """Draws curves of all scalar taps against `seq`, in one picture.

  Arrays are skipped; a complex number is drawn by its absolute value. When a curve has more than
  `max_points` points, every second one is dropped.

  Args:
    path: the picture, with a suffix that matplotlib can write: .png, .svg, .pdf. Folders are made.
    every_seconds: the least seconds between two drawings. `flush` and `close` draw at once.
    title: the text above the curves.
    log: uses a logarithmic vertical axis.
    size: width and height in inches.
    max_points: the most points of each curve.
  """

  _extra, _needs = "plot", ("matplotlib.figure",)

  def __init__(
    self, path: StrPath, *, every_seconds: float = 5.0, title: str | None = None, log: bool = False,
    size: tuple[float, float] = (8.0, 5.0), max_points: int = 4000,
    **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    label = "sinks.Plot"
    super().__init__(resolved(options.path(label, "path", path)), **choice)
    self._max_points = options.count(label, "max_points", max_points, least=2)
    self._every_seconds = options.seconds(label, "every_seconds", every_seconds, zero=True)
    self._title = options.or_none(options.text, label, "title", title)
    self._log = options.boolean(label, "log", log)
    if not isinstance(size, (tuple, list)) or len(size) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
      options.refuse(label, "size", "a width and a height in inches", size)
    self._size = [options.number(label, "size", extent, above=0) for extent in size]
    self._curves: dict[str, _Curve] = {}
    self._changed, self._next_drawing = False, 0.0

  def _start(self) -> None:
    pathlib.Path(self._target).parent.mkdir(parents=True, exist_ok=True)

  def _take(self, record: Record) -> None:
    for name, leaf in columns(record).items():
      value = plain(leaf)
      if value.ndim == 0:
        name += lane_suffix(record.info.lane)
        number = abs(complex(value)) if value.dtype.kind == "c" else float(value)
        self._curves.setdefault(name, _Curve(self._max_points)).add(record.info.seq, number)
        self._changed = True

  def _commit(self) -> None:
    if time.monotonic() >= self._next_drawing:
      self._flush()

  def _flush(self) -> None:
    if not self._changed:
      return
    figure = self._module.Figure(figsize=self._size, layout="constrained")
    axes = figure.add_subplot(xlabel="record", title=self._title or "")
    if self._log:
      axes.set_yscale("log", nonpositive="mask")
    lines = [axes.plot(*curve.line, linewidth=1.2)[0] for curve in self._curves.values()]
    axes.grid(alpha=0.3)
    if 0 < len(self._curves) <= 20:
      names = [name.replace("$", r"\$") for name in self._curves]  # as text, not as formulas
      axes.legend(lines, names, loc="best", fontsize="small")
    path = pathlib.Path(self._target)
    with paths.replaced(path) as made:
      figure.savefig(made, format=path.suffix.removeprefix(".") or "png")
    self._changed = False
    self._next_drawing = time.monotonic() + self._every_seconds

  _stop = _flush


class _Curve:
  """Points of a curve in bounded memory: each `_stride`-th point, and the last one."""

  def __init__(self, max_points: int) -> None:
    self._max_points = max_points
    self._stride, self._count = 1, 0
    self._last = (0.0, 0.0)
    self._points: list[tuple[float, float]] = []

  def add(self, step: int, value: float) -> None:
    self._last = (step, value)
    if self._count % self._stride == 0 and len(self._points) >= self._max_points:
      del self._points[1::2]
      self._stride *= 2
    if self._count % self._stride == 0:
      self._points.append(self._last)
    self._count += 1

  @property
  def line(self) -> np.ndarray:
    """Returns the steps and their values."""
    return np.array([*self._points, self._last]).T
