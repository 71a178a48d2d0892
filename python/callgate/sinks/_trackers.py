# SPDX-License-Identifier: Apache-2.0
"""Sinks into experiment trackers that live in a folder: TensorBoard, MLflow, W&B, ClearML."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any, Literal, Unpack

import numpy as np

from callgate._core import options
from callgate._tap.records import Record, columns
from callgate.sinks._base import ChoiceOptions, LibrarySink, StrPath, plain, resolved


def _curves(record: Record, leaf: str | None) -> tuple[int, list[tuple[str, np.ndarray]]]:
  """The step, of the record or a column; the other columns, by lanes and complex parts."""
  named = {name: plain(value) for name, value in columns(record).items()}
  step, lane = record.info.seq, record.info.lane
  if leaf is not None:
    name = next((name for name in named if leaf in (name, name.partition("/")[2])), None)
    if name is None:
      raise ValueError(f"expected a leaf {leaf!r} for the step, got {', '.join(named) or 'none'}")
    array = named.pop(name)
    if array.ndim != 0 or array.dtype.kind not in "iu":
      got = f"{array.dtype}{list(array.shape)}"
      raise ValueError(f"expected the step {name!r} to be an integer, got {got}")
    step = int(array)
  suffix = f"/lane_{'.'.join(map(str, lane))}" if lane else ""
  curves: list[tuple[str, np.ndarray]] = []
  for name, array in named.items():
    complex_parts = {"/re": np.real(array), "/im": np.imag(array)}
    parts = complex_parts if array.dtype.kind == "c" else {"": array}
    curves += [(f"{name}{suffix}{part}", x) for part, x in parts.items()]
  return step, curves


def _summary(array: np.ndarray) -> dict[str, float]:
  """The numbers of an array for a tracker, by endings of its name: of finite elements."""
  values = np.asarray(array, np.float64)
  values = values[np.isfinite(values)]
  if not values.size:
    return {"/nonfinite": float(array.size)}
  found = {"/min": values.min(), "/mean": values.mean(), "/max": values.max(), "/std": values.std()}
  found["/nonfinite"] = array.size - values.size
  return {name: float(value) for name, value in found.items()}


class TensorBoard(LibrarySink):
  """Event files for TensorBoard, by tensorboardX: curves of scalars, histograms of arrays.

  Args:
    logdir: the run's folder; each opening of the sink adds a file.
    step: path of an integer leaf that holds the step, as "step" of `{"step": i, "loss": x}`; None
      for the record's `seq`.
  """

  _extra, _needs = "tensorboard", ("tensorboardX",)

  def __init__(
    self, logdir: StrPath, *, step: str | None = None, **choice: Unpack[ChoiceOptions]
  ) -> None:
    super().__init__(resolved(options.path("sinks.TensorBoard", "logdir", logdir)), **choice)
    options.optional_texts("sinks.TensorBoard", step=step)
    self._step = step

  def _start(self) -> None:
    self._writer: Any = self._module.SummaryWriter(self._target)

  def _take(self, record: Record) -> None:
    step, curves = _curves(record, self._step)
    seconds = record.info.time_ns * 1e-9
    for tag, array in curves:
      values = np.asarray(array, np.float64)
      values = values[np.isfinite(values)]  # bins have no place for the others
      if array.ndim == 0:
        self._writer.add_scalar(tag, float(array), step, walltime=seconds)
      elif values.size:
        self._writer.add_histogram(tag, values, step, walltime=seconds)

  def _flush(self) -> None:
    self._writer.flush()

  def _stop(self) -> None:
    self._writer.close()


class MLflow(LibrarySink):
  """Metrics of an MLflow run, in a local folder: `mlflow ui --backend-store-uri PATH` shows them.

  An array is five metrics, of its finite elements `/min`, `/mean`, `/max` and `/std`, and
  `/nonfinite`, how many are not.

  Args:
    experiment: the experiment's name; made where it does not exist.
    tracking_uri: the folder of the store, or a URI that MLflow takes.
    run_name: the run's name; None for one that MLflow makes up.
    step: path of an integer leaf that holds the step; None for the record's `seq`.

  Attributes:
    run_id: MLflow's id of the run; None before the sink is opened.
  """

  _BATCH = 1000  # the most metrics that MLflow takes at once
  _extra, _needs = "mlflow", ("mlflow.entities", "mlflow.tracking", "mlflow")

  def __init__(
    self, experiment: str = "callgate", *, tracking_uri: StrPath = "mlruns",
    run_name: str | None = None, step: str | None = None, **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    options.path("sinks.MLflow", "tracking_uri", tracking_uri)
    options.optional_texts("sinks.MLflow", run_name=run_name, step=step)
    # Read at import: a sink writes where it is told to and reports to nobody, unless one wants it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    super().__init__(options.text("sinks.MLflow", "experiment", experiment), **choice)
    uri = str(tracking_uri)
    if "://" not in uri:
      uri = pathlib.Path(uri).absolute().as_uri()
    # MLflow opens a store in a folder, which the sink is for, only where this is asked for.
    before = os.environ.get("MLFLOW_ALLOW_FILE_STORE")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
      self._client: Any = self._module.tracking.MlflowClient(tracking_uri=uri)
    finally:
      del os.environ["MLFLOW_ALLOW_FILE_STORE"]
      if before is not None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = before
    self._run_name, self._step = run_name, step
    self._waiting: list[Any] = []
    self.run_id: str | None = None

  def _start(self) -> None:
    if self.run_id is not None:
      self._client.update_run(self.run_id, status="RUNNING")
      return
    found = self._client.get_experiment_by_name(self._target)
    experiment = found.experiment_id if found else self._client.create_experiment(self._target)
    self.run_id = self._client.create_run(experiment, run_name=self._run_name).info.run_id

  def _take(self, record: Record) -> None:
    step, curves = _curves(record, self._step)
    milliseconds = record.info.time_ns // 1_000_000
    metrics: list[Any] = []
    for tag, array in curves:
      name = re.sub(r"[^\w\-. :/]", "_", tag)  # MLflow's hold letters, digits and these marks
      numbers = {"": float(array)} if array.ndim == 0 else _summary(array)
      for part, value in numbers.items():
        metrics.append(self._module.entities.Metric(name + part, value, milliseconds, step))
    self._waiting += metrics

  def _commit(self) -> None:
    waiting, self._waiting = self._waiting, []
    for start in range(0, len(waiting), self._BATCH):
      self._client.log_batch(self.run_id, metrics=waiting[start : start + self._BATCH])

  def _stop(self) -> None:
    self._client.set_terminated(self.run_id)


class WandB(LibrarySink):
  """A run of Weights & Biases, in a local folder unless told otherwise.

  Numbers are curves over the step, arrays are histograms of their finite elements, 64 counts each.
  A process of wandb's own writes the files, a moment after the sink has been closed, too.

  Args:
    project: the project's name.
    folder: in which wandb makes its own folder, `wandb`, with one for each run.
    run_name: the run's name; None for one that wandb makes up.
    mode: "offline": `wandb sync` sends the folder later; "online": to wandb's server at once.
    step: path of an integer leaf that holds the step; None for the record's `seq`.

  Attributes:
    run_id: wandb's id of the run; None before the sink is opened. Opened anew, it goes on.
  """

  _BINS = 64
  _STEP = "callgate/step"
  _extra, _needs = "wandb", ("wandb",)

  def __init__(
    self, project: str = "callgate", *, folder: StrPath = ".", run_name: str | None = None,
    mode: Literal["offline", "online"] = "offline", step: str | None = None,
    **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    label = "sinks.WandB"
    self._folder = resolved(options.path(label, "folder", folder))
    options.optional_texts(label, run_name=run_name, step=step)
    self._mode = options.choice(label, "mode", mode, ("offline", "online"))
    super().__init__(options.text(label, "project", project), **choice)
    self._run_name, self._step = run_name, step
    self._rows: list[dict[str, Any]] = []
    self.run_id: str | None = None

  def _start(self) -> None:
    pathlib.Path(self._folder).mkdir(parents=True, exist_ok=True)
    # Nothing but what is logged: not the program's output and code, nor what the machine is.
    settings = self._module.Settings(
      console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True,
      x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    self._run: Any = self._module.init(
      project=self._target, dir=self._folder, name=self._run_name, id=self.run_id, mode=self._mode,
      reinit="create_new", settings=settings,
    )  # fmt: skip
    self.run_id = str(self._run.id)
    self._run.define_metric("*", step_metric=self._STEP)

  def _take(self, record: Record) -> None:
    step, curves = _curves(record, self._step)
    row: dict[str, Any] = {self._STEP: step}
    for tag, array in curves:
      if array.ndim == 0:
        row[tag] = float(array)
        continue
      values = np.asarray(array, np.float64)
      if (values := values[np.isfinite(values)]).size:
        row[tag] = self._module.Histogram(np_histogram=np.histogram(values, self._BINS))
    self._rows.append(row)

  def _commit(self) -> None:
    rows, self._rows = self._rows, []
    for row in rows:
      self._run.log(row)

  def _stop(self) -> None:
    self._run.finish()


class ClearML(LibrarySink):
  """A task of ClearML, in a local folder unless told otherwise.

  Numbers are curves over the step, arrays are histograms of their finite elements, 64 counts each.
  ClearML has one task at a time in a process: where the program has made one, the records go there,
  and it stays open. Opened anew, the sink begins another one. After an offline one ClearML stays
  offline in this process until `clearml.Task.set_offline(False)`, which needs its configuration.

  Args:
    project: the project's name.
    folder: in which an offline task is `offline/ID.zip` once the sink is closed.
    run_name: the task's name.
    mode: "offline": `clearml.Task.import_offline_session(zip)` sends it later; "online": to
      ClearML's server at once.
    step: path of an integer leaf that holds the step; None for the record's `seq`.

  Attributes:
    task_id: ClearML's id of the task; None before the sink is opened.
  """

  _BINS = 64
  # Nothing but what is logged: ClearML watches what other libraries log, and the program's code.
  _WATCHED = (
    "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm",
    "hydra", "detect_repository", "tfdefines", "joblib", "megengine", "catboost", "gradio",
  )  # fmt: skip
  _extra, _needs = "clearml", ("clearml",)

  def __init__(
    self, project: str = "callgate", *, folder: StrPath = "clearml", run_name: str = "callgate",
    mode: Literal["offline", "online"] = "offline", step: str | None = None,
    **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    label = "sinks.ClearML"
    self._folder = resolved(options.path(label, "folder", folder))
    self._run_name = options.text(label, "run_name", run_name)
    options.optional_texts(label, step=step)
    self._mode = options.choice(label, "mode", mode, ("offline", "online"))
    super().__init__(options.text(label, "project", project), **choice)
    self._step = step
    self._own = False  # whether the task is this sink's
    self.task_id: str | None = None

  def _start(self) -> None:
    kind: Any = self._module.Task
    self._task: Any = kind.current_task()
    self._own = self._task is None
    if self._own:
      self._task = self._made(kind)
    self.task_id = str(self._task.id)

  def _made(self, kind: Any) -> Any:
    before = os.environ.get("CLEARML_CACHE_DIR")
    os.environ["CLEARML_CACHE_DIR"] = str(pathlib.Path(self._folder).absolute())
    try:
      kind.set_offline(self._mode == "offline")
      return kind.init(
        project_name=self._target, task_name=self._run_name, reuse_last_task_id=False,
        auto_connect_arg_parser=False, auto_connect_streams=False, auto_resource_monitoring=False,
        auto_connect_frameworks=dict.fromkeys(self._WATCHED, False),
      )  # fmt: skip
    finally:
      del os.environ["CLEARML_CACHE_DIR"]
      if before is not None:
        os.environ["CLEARML_CACHE_DIR"] = before

  def _take(self, record: Record) -> None:
    step, curves = _curves(record, self._step)
    log = self._task.get_logger()
    for tag, array in curves:
      if array.ndim == 0:
        log.report_scalar(tag, tag, float(array), step)
        continue
      values = np.asarray(array, np.float64)
      if (values := values[np.isfinite(values)]).size:
        counts, edges = np.histogram(values, self._BINS)
        log.report_histogram(tag, tag, counts, step, xlabels=[f"{x:.6g}" for x in edges[:-1]])

  def _flush(self) -> None:
    self._task.flush(wait_for_uploads=True)

  def _stop(self) -> None:
    if self._own:
      self._task.close()
    else:
      self._flush()
