"""Sinks into experiment trackers that live in a folder: TensorBoard and MLflow."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Generator
from typing import Any

import numpy as np

from callgate._core import options
from callgate._tap.records import Record, columns
from callgate.sinks._base import LibrarySink, StrPath, library, plain, scalar


def _step_and_columns(record: Record, leaf: str | None) -> tuple[int, dict[str, np.ndarray]]:
  """The record's columns, and its step: its number, or the column that says it, taken out."""
  named = {name: plain(value) for name, value in columns(record).items()}
  if leaf is None:
    return record.info.seq, named
  for name in named:
    if name == leaf or name.partition("/")[2] == leaf:
      array = named.pop(name)
      if array.ndim != 0 or array.dtype.kind not in "iu":
        raise ValueError(
          f"expected the step {name!r} to be an integer, got {array.dtype}{list(array.shape)}"
        )
      return int(array), named
  raise ValueError(f"expected a leaf {leaf!r} for the step, got {', '.join(named) or 'none'}")


def _curves(record: Record, name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
  """A column as real ones, two of a complex one, each by a name that tells lanes apart.

  The names' characters are such that both trackers take.
  """
  lane = record.info.lane
  name += f"/lane_{'.'.join(map(str, lane))}" if lane else ""
  if array.dtype.kind != "c":
    return [(name, array)]
  return [(f"{name}/re", np.real(array)), (f"{name}/im", np.imag(array))]


class TensorBoard(LibrarySink):
  """Event files for TensorBoard, by tensorboardX: curves of scalars, histograms of arrays.

  Args:
    logdir: the run's folder; each opening of the sink adds a file.
    step: path of an integer leaf that holds the step, as "step" of `{"step": i, "loss": x}`; None
      for the record's `seq`.
  """

  def __init__(self, logdir: StrPath, *, step: str | None = None) -> None:
    super().__init__(options.path("sinks.TensorBoard", "logdir", logdir))
    options.optional_texts("sinks.TensorBoard", step=step)
    self._library = library("tensorboardX", sink="TensorBoard", extra="tensorboard")
    self._step = step
    self._writer: Any = None

  def _start(self) -> None:
    self._writer = self._library.SummaryWriter(self._target)

  def _take(self, record: Record) -> None:
    step, named = _step_and_columns(record, self._step)
    seconds = record.info.time_ns * 1e-9
    for name, array in named.items():
      for tag, part in _curves(record, name, array):
        if part.ndim == 0:
          self._writer.add_scalar(tag, float(part), step, walltime=seconds)
          continue
        values = np.asarray(part, np.float64).reshape(-1)
        values = values[np.isfinite(values)]  # bins have no place for the others
        if values.size:
          self._writer.add_histogram(tag, values, step, walltime=seconds)

  def _flush(self) -> None:
    self._writer.flush()

  def _stop(self) -> None:
    writer, self._writer = self._writer, None
    writer.close()


class MLflow(LibrarySink):
  """Metrics of an MLflow run, in a local folder: `mlflow ui --backend-store-uri PATH` shows them.

  Args:
    experiment: the experiment's name; made where it does not exist.
    tracking_uri: the folder of the store, or a URI that MLflow takes.
    run_name: the run's name; None for one that MLflow makes up.
    step: path of an integer leaf that holds the step; None for the record's `seq`.

  Attributes:
    run_id: MLflow's id of the run; None before the sink is opened.
  """

  _BATCH = 1000  # the most metrics that MLflow takes at once

  def __init__(
    self,
    experiment: str = "callgate",
    *,
    tracking_uri: StrPath = "mlruns",
    run_name: str | None = None,
    step: str | None = None,
  ) -> None:
    super().__init__(options.text("sinks.MLflow", "experiment", experiment))
    options.path("sinks.MLflow", "tracking_uri", tracking_uri)
    options.optional_texts("sinks.MLflow", run_name=run_name, step=step)
    # Read at import: a sink writes where it is told to and reports to nobody, unless one wants it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    library("mlflow", sink="MLflow", extra="mlflow")
    tracking = library("mlflow.tracking", sink="MLflow", extra="mlflow")
    self._metric = library("mlflow.entities", sink="MLflow", extra="mlflow").Metric
    uri = str(tracking_uri)
    if "://" not in uri:
      uri = pathlib.Path(uri).absolute().as_uri()
    with _file_store_allowed():
      self._client: Any = tracking.MlflowClient(tracking_uri=uri)
    self._run_name = run_name
    self._step = step
    self._waiting: list[Any] = []
    self.run_id: str | None = None

  def _start(self) -> None:
    if self.run_id is not None:
      self._client.update_run(self.run_id, status="RUNNING")
      return
    found = self._client.get_experiment_by_name(self._target)
    experiment = found.experiment_id if found else self._client.create_experiment(self._target)
    run = self._client.create_run(experiment, run_name=self._run_name)
    self.run_id = run.info.run_id

  def _take(self, record: Record) -> None:
    step, named = _step_and_columns(record, self._step)
    milliseconds = record.info.time_ns // 1_000_000
    self._waiting += [
      # MLflow's names hold letters, digits and these marks.
      self._metric(re.sub(r"[^\w\-. :/]", "_", tag), float(part), milliseconds, step)
      for name, array in named.items()
      for tag, part in _curves(record, name, scalar(name, array))
    ]

  def _commit(self) -> None:
    waiting, self._waiting = self._waiting, []
    for start in range(0, len(waiting), self._BATCH):
      self._client.log_batch(self.run_id, metrics=waiting[start : start + self._BATCH])

  def _stop(self) -> None:
    self._client.set_terminated(self.run_id)


@contextlib.contextmanager
def _file_store_allowed() -> Generator[None]:
  """MLflow opens a store in a folder, which the sink is for, only where this is asked for."""
  name = "MLFLOW_ALLOW_FILE_STORE"
  before = os.environ.get(name)
  os.environ[name] = "true"
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before
