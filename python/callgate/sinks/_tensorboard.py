# SPDX-License-Identifier: Apache-2.0
"""The sink into TensorBoard's event files."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Unpack

import numpy as np

from callgate._core import opened, options
from callgate._core.opened import OpenRun, resolved
from callgate._core.png import png
from callgate._tap.alert import Alert
from callgate.sinks._base import ChoiceOptions, StrPath
from callgate.sinks._tracking import At, Tracker, is_number


class TensorBoard(Tracker):
  """Writes TensorBoard event files by tensorboardX: curves of scalars, histograms of arrays.

  Args:
    logdir: the run's folder. Each opening of the sink adds a file.
    step: the path of an integer leaf with the step, such as "step" for `{"step": i, "loss": x}`.
      Default: the record's `seq`.
  """

  _extra = "tensorboard"
  _needs = ("tensorboardX.event_file_writer", "tensorboardX.proto.event_pb2", "tensorboardX")
  # The edges of TensorBoard's own bins, from 1e-12 to 1e20; the outermost bins take larger values.
  _EDGES = np.append(1e-12 * 1.1 ** np.arange(774), np.finfo(np.float64).max)
  _alerts = 0

  def __init__(
    self, logdir: StrPath, *, step: str | None = None, **choice: Unpack[ChoiceOptions]
  ) -> None:
    super().__init__(resolved(options.path("sinks.TensorBoard", "logdir", logdir)), step, **choice)

  def _start(self) -> None:
    # A SummaryWriter hands its events to a thread, and its flush doesn't wait for them.
    suffix = f".{os.getpid()}.{time.monotonic_ns()}"  # two of one second would be one file
    prefix = os.path.join(self._target, "events")
    self._module.record_writer.directory_check(self._target)  # makes the folder
    self._events: Any = self._module.event_file_writer.EventsWriter(prefix, suffix)

  def _log(self, summary: Any, step: int | None = None, time_ns: int | None = None) -> None:
    seconds = 1e-9 * (time.time_ns() if time_ns is None else time_ns)
    kind = self._module.proto.event_pb2.Event
    self._events.write_event(kind(summary=summary, step=step, wall_time=seconds))

  def _log_config(self, run: OpenRun) -> None:
    text = self._module.summary.text
    self._log(text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```"), 0)
    if run.notes:
      self._log(text("notes", run.notes), 0)
    if run.tags:
      self._log(text("tags", ", ".join(run.tags)), 0)
    flat = opened.flat(run.config)
    if flat:  # the page of hyperparameters
      simple = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flat.items()}
      for part in self._module.summary.hparams(simple, {}):
        self._log(part)

  def _log_numbers(self, curves: list[tuple[str, np.ndarray]], at: At) -> None:
    for tag, array in curves:
      values = np.asarray(array, np.float64)
      values = values[np.isfinite(values)]  # bins have no place for the others
      if array.ndim == 0:
        self._log(self._module.summary.scalar(tag, float(array)), *at)
      elif values.size:
        edges = np.concatenate([-self._EDGES[::-1], [0], self._EDGES])
        with np.errstate(over="ignore"):  # in the sum of squares
          self._log(self._module.summary.histogram(tag, values, edges), *at)

  def _log_image(self, tag: str, pixels: np.ndarray, at: At) -> None:
    kind = self._module.proto.summary_pb2.Summary
    height, width, channels = pixels.shape
    image = kind.Image(
      height=height, width=width, colorspace=channels, encoded_image_string=png(pixels)
    )
    self._log(kind(value=[kind.Value(tag=tag, image=image)]), *at)

  def _log_text(self, tag: str, text: str, at: At) -> None:
    self._log(self._module.summary.text(tag, text), *at)

  def _log_result(self, name: str, value: Any) -> None:
    kind, tag = self._module.summary, f"summary/{name}"
    self._log(kind.scalar(tag, value) if is_number(value) else kind.text(tag, str(value)))

  def _log_alert(self, alert: Alert) -> None:
    self._log(self._module.summary.text("alerts", str(alert)), self._alerts, alert.time_ns)
    self._alerts += 1

  def _flush(self) -> None:
    self._events.flush()

  def _stop(self) -> None:
    self._events.close()
