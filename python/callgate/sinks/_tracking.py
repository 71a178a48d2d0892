# SPDX-License-Identifier: Apache-2.0
"""The common part of sinks into trackers: curves of records, and news of the open run.

Records arrive on the channel's thread, alerts and results on the thread that reports them. A lock
keeps the calls of the library apart. A tracker that was opened within a run stays open to the run's
end, also if its channel closes before: later results and alerts belong to it, too.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from callgate import _part
from callgate._core import failures, opened, options
from callgate._core.opened import OpenRun
from callgate._tap import kinds
from callgate._tap.alert import Alert
from callgate._tap.records import Record, columns
from callgate.sinks._base import ChoiceOptions, LibrarySink, plain


class At(NamedTuple):
  """The place of a record in a run."""

  step: int
  time_ns: int


class Tracker(LibrarySink):
  """A sink into a tracker: subclasses log each kind of value by the library's calls."""

  def __init__(self, target: str, step: str | None, **choice: Unpack[ChoiceOptions]) -> None:
    super().__init__(target, **choice)
    options.optional_texts(f"sinks.{type(self).__name__}", step=step)
    self._step = step
    self._lock = threading.RLock()  # guards the library's objects
    self._opened_in: OpenRun | None = None
    self._rests = False  # True if closed while its run continues

  # -- methods of subclasses ---------------------------------------------------------------------
  def _log_config(self, run: OpenRun) -> None: ...
  def _log_numbers(self, curves: list[tuple[str, np.ndarray]], at: At) -> None: ...
  def _log_image(self, tag: str, pixels: np.ndarray, at: At) -> None: ...  # [height, width, n]
  def _log_text(self, tag: str, text: str, at: At) -> None: ...
  def _log_result(self, name: str, value: Any) -> None: ...  # a result of the run's summary
  def _log_alert(self, alert: Alert) -> None: ...

  # -- of the channel ----------------------------------------------------------------------------
  def _begin(self) -> None:
    with self._lock:
      goes_on, self._rests = self._rests and os.getpid() == self._process, False
      if not goes_on:
        super()._begin()
        self._opened_in = run = opened.run()
        if run is not None:
          with self._naming("cannot log the run's config"):
            self._log_config(run)
            for name, value in run.results().items():
              self._log_result(name, value)
    _part.on("alert", self._hear_alert)
    _part.on("summary", self._hear_result)

  def write(self, records: Sequence[Record]) -> None:
    with self._lock:
      super().write(records)

  def flush(self) -> None:
    with self._lock:
      super().flush()

  def close(self) -> None:
    with self._lock:
      in_run = self._opened_in is not None and self._opened_in is opened.run()
      if self._channel is not None and in_run and os.getpid() == self._process:
        self._channel, self._rests = None, True
        _part.on("run ends", self._end)
        with self._naming("cannot flush"):
          self._flush()
      if not self._rests:
        self._stop_hearing()
        super().close()

  def _end(self) -> None:
    """The run ends: closes the sink, unless a channel still has it."""
    _part.off("run ends", self._end)
    with self._lock:
      if self._rests:
        self._rests, self._channel = False, ""
        self._stop_hearing()
        super().close()

  def _stop_hearing(self) -> None:
    _part.off("alert", self._hear_alert)
    _part.off("summary", self._hear_result)

  def _take(self, record: Record) -> None:
    info = record.info
    suffix = lane_tag(info.lane)
    if info.kind is None or info.role != "primal":
      step, curves = _curves(record, self._step)
      self._log_numbers(curves, At(step, info.time_ns))
      return
    at = At(info.seq, info.time_ns)
    if info.kind == "text":
      self._log_text(info.name + suffix, record.value, at)
      return
    for name, leaf in columns(record).items():
      batch = kinds.images(leaf)
      for index, pixels in enumerate(batch):
        self._log_image(f"{name}{suffix}" + (f"/{index}" if len(batch) > 1 else ""), pixels, at)

  # -- of the run --------------------------------------------------------------------------------
  def _hear_alert(self, alert: Alert) -> None:
    self._hear(lambda: self._log_alert(alert), f"cannot log the alert {str(alert)!r}")

  def _hear_result(self, name: str, value: Any) -> None:
    self._hear(lambda: self._log_result(name, value), f"cannot log the result {name!r}")

  def _hear(self, log: Any, problem: str) -> None:
    """Logs news of the run unless the sink is closed; the next barrier raises an error."""
    with self._lock:
      is_open = self._channel is not None or self._rests
      if not is_open or os.getpid() != self._process:
        return
      try:
        with self._naming(problem):
          log()
      except Exception as error:  # noqa: BLE001 - the other sinks still hear of it
        failures.keep_consumer_error(error, f"callgate: raised in consumer {self!r}")


def lane_tag(lane: tuple[int, ...]) -> str:
  """Returns a suffix that distinguishes lanes in the names of curves."""
  return f"/lane_{'.'.join(map(str, lane))}" if lane else ""


def is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _curves(record: Record, leaf: str | None) -> tuple[int, list[tuple[str, np.ndarray]]]:
  """Returns the step and the curves by name: the other columns, by lane.

  A complex column has two curves, "/re" and "/im".
  """
  named = {name: plain(value) for name, value in columns(record).items()}
  step = record.info.seq
  if leaf is not None:
    name = next((name for name in named if leaf in (name, name.partition("/")[2])), None)
    if name is None:
      raise ValueError(f"expected a leaf {leaf!r} for the step, got {', '.join(named) or 'none'}")
    array = named.pop(name)
    if array.ndim != 0 or array.dtype.kind not in "iu":
      got = f"{array.dtype}{list(array.shape)}"
      raise ValueError(f"expected the step {name!r} to be an integer, got {got}")
    step = int(array)
  suffix = lane_tag(record.info.lane)
  curves: list[tuple[str, np.ndarray]] = []
  for name, array in named.items():
    complex_parts = {"/re": np.real(array), "/im": np.imag(array)}
    parts = complex_parts if array.dtype.kind == "c" else {"": array}
    curves += [(f"{name}{suffix}{part}", x) for part, x in parts.items()]
  return step, curves


def summary(array: np.ndarray) -> dict[str, float]:
  """Returns the numbers of an array's finite elements for a tracker, by suffixes of its name."""
  values = np.asarray(array, np.float64)
  values = values[np.isfinite(values)]
  if not values.size:
    return {"/nonfinite": float(array.size)}
  found = {"/min": values.min(), "/mean": values.mean(), "/max": values.max(), "/std": values.std()}
  found["/nonfinite"] = array.size - values.size
  return {name: float(value) for name, value in found.items()}


def name_of_run(given: str | None) -> str | None:
  """Returns the name for a tracker's run: the given one, else that of the open run."""
  run = opened.run()
  return given if given is not None or run is None else run.name


def mlflow_name(name: str) -> str:
  """Replaces characters that MLflow's names can't have."""
  return re.sub(r"[^\w\-. :/]", "_", name)
