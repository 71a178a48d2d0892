# SPDX-License-Identifier: Apache-2.0
"""Sinks into experiment trackers with a local folder: MLflow, W&B, ClearML.

Each logs the curves, images and texts of records, and the open run's config, results and alerts.
"""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from typing import Any, Literal, Unpack

import numpy as np

from callgate._core import opened, options
from callgate._core.opened import OpenRun, based, resolved
from callgate._core.png import png
from callgate._tap.alert import Alert
from callgate.sinks._base import ChoiceOptions, StrPath
from callgate.sinks._tracking import At, Tracker, is_number, mlflow_name, name_of_run, summary


class MLflow(Tracker):
  """Logs metrics to an MLflow run in a local folder.

  `mlflow ui --backend-store-uri PATH` shows them. An array gives five metrics: `/min`, `/mean`,
  `/max` and `/std` of its finite elements, and `/nonfinite`, the number of the others.

  Args:
    experiment: the experiment's name; it is made if it doesn't exist.
    tracking_uri: the store's folder, or a URI for MLflow.
    run_name: the run's name. Default: that of the open `run`, else a name that MLflow chooses.
    step: the path of an integer leaf with the step. Default: the record's `seq`.

  Attributes:
    run_id: MLflow's id of the run; None before the sink is opened.
  """

  _BATCH, _PARAMS = 1000, 100  # the most metrics and parameters in one call of MLflow
  _LONGEST = 500  # the most characters of a parameter, in every version
  _extra, _needs = "mlflow", ("mlflow.entities", "mlflow.tracking", "mlflow")

  def __init__(
    self, experiment: str = "callgate", *, tracking_uri: StrPath = "mlruns",
    run_name: str | None = None, step: str | None = None, **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    options.path("sinks.MLflow", "tracking_uri", tracking_uri)
    options.optional_texts("sinks.MLflow", run_name=run_name)
    # MLflow reads this at import. The sink writes only to its target, unless the user sets this.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    super().__init__(options.text("sinks.MLflow", "experiment", experiment), step, **choice)
    uri = str(tracking_uri)
    if "://" not in uri:
      uri = pathlib.Path(based(uri)).absolute().as_uri()
    # MLflow stores runs in a folder, as this sink needs, only if this is set.
    before = os.environ.get("MLFLOW_ALLOW_FILE_STORE")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
      self._client: Any = self._module.tracking.MlflowClient(tracking_uri=uri)
    finally:
      del os.environ["MLFLOW_ALLOW_FILE_STORE"]
      if before is not None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = before
    self._run_name = run_name
    self._waiting: list[Any] = []
    self._alerts: list[str] = []
    self.run_id: str | None = None

  def _start(self) -> None:
    if self.run_id is not None:
      self._client.update_run(self.run_id, status="RUNNING")
      return
    found = self._client.get_experiment_by_name(self._target)
    experiment = found.experiment_id if found else self._client.create_experiment(self._target)
    name = name_of_run(self._run_name)
    self.run_id = self._client.create_run(experiment, run_name=name).info.run_id

  def _log_config(self, run: OpenRun) -> None:
    kinds = self._module.entities
    flat = opened.flat(run.config).items()
    params = [kinds.Param(mlflow_name(key), str(value)[: self._LONGEST]) for key, value in flat]
    for start in range(0, len(params), self._PARAMS):
      self._client.log_batch(self.run_id, params=params[start : start + self._PARAMS])
    for tag in run.tags:
      self._client.set_tag(self.run_id, mlflow_name(tag), "true")
    if run.notes:
      self._client.set_tag(self.run_id, "mlflow.note.content", run.notes)

  def _log_numbers(self, curves: list[tuple[str, np.ndarray]], at: At) -> None:
    milliseconds = at.time_ns // 1_000_000
    metrics: list[Any] = []
    for tag, array in curves:
      numbers = {"": float(array)} if array.ndim == 0 else summary(array)
      for part, value in numbers.items():
        name = mlflow_name(tag) + part
        metrics.append(self._module.entities.Metric(name, value, milliseconds, at.step))
    self._waiting += metrics

  def _log_image(self, tag: str, pixels: np.ndarray, at: At) -> None:
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / f"{at.step:08}.png"
      path.write_bytes(png(pixels))
      self._client.log_artifact(self.run_id, str(path), f"images/{mlflow_name(tag)}")

  def _log_text(self, tag: str, text: str, at: At) -> None:
    self._client.log_text(self.run_id, text, f"texts/{mlflow_name(tag)}/{at.step:08}.txt")

  def _log_result(self, name: str, value: Any) -> None:
    if is_number(value):
      self._client.log_metric(self.run_id, mlflow_name(f"summary/{name}"), value)
    else:
      self._client.set_tag(self.run_id, mlflow_name(f"summary/{name}"), str(value))

  def _log_alert(self, alert: Alert) -> None:
    self._alerts.append(str(alert))
    self._client.log_text(self.run_id, "\n".join(self._alerts) + "\n", "alerts.txt")

  def _commit(self) -> None:
    waiting, self._waiting = self._waiting, []
    for start in range(0, len(waiting), self._BATCH):
      self._client.log_batch(self.run_id, metrics=waiting[start : start + self._BATCH])

  def _stop(self) -> None:
    self._client.set_terminated(self.run_id)


class WandB(Tracker):
  """Logs to a run of Weights & Biases, by default in a local folder.

  Numbers are curves over the step. Arrays are histograms of their finite elements, with 64 bins. A
  process of wandb writes the files, and may finish a moment after the sink has been closed.

  Args:
    project: the project's name.
    folder: the folder in which wandb makes its own folder, `wandb`, with one folder for each run.
    run_name: the run's name. Default: that of the open `run`, else a name that wandb chooses.
    mode: "offline": `wandb sync` sends the folder later. "online": wandb sends records at once.
    step: the path of an integer leaf with the step. Default: the record's `seq`.

  Attributes:
    run_id: wandb's id of the run; None before the sink is opened. A reopened sink continues the
      run.
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
    options.optional_texts(label, run_name=run_name)
    self._mode = options.choice(label, "mode", mode, ("offline", "online"))
    super().__init__(options.text(label, "project", project), step, **choice)
    self._run_name = run_name
    self._rows: list[dict[str, Any]] = []
    self.run_id: str | None = None

  def _start(self) -> None:
    pathlib.Path(self._folder).mkdir(parents=True, exist_ok=True)
    # Only the values of the sink are logged: no output of the program, no code, no machine data.
    settings = self._module.Settings(
      console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True,
      x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    about: dict[str, Any] = {}
    if (run := opened.run()) is not None:
      about = {"config": run.config, "tags": list(run.tags) or None, "notes": run.notes or None}
    self._run: Any = self._module.init(
      project=self._target, dir=self._folder, name=name_of_run(self._run_name), id=self.run_id,
      mode=self._mode, reinit="create_new", settings=settings, **about,
    )  # fmt: skip
    self.run_id = str(self._run.id)
    self._run.define_metric("*", step_metric=self._STEP)

  def _log_image(self, tag: str, pixels: np.ndarray, at: At) -> None:
    shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    self._rows.append({self._STEP: at.step, tag: self._module.Image(shown)})

  def _log_text(self, tag: str, text: str, at: At) -> None:
    table = self._module.Table(columns=["step", "text"], data=[[at.step, text]])
    self._rows.append({self._STEP: at.step, tag: table})

  def _log_result(self, name: str, value: Any) -> None:
    self._run.summary[name] = value

  def _log_alert(self, alert: Alert) -> None:
    self._run.alert(title=alert.message[:64], text=str(alert))

  def _log_numbers(self, curves: list[tuple[str, np.ndarray]], at: At) -> None:
    row: dict[str, Any] = {self._STEP: at.step}
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


class ClearML(Tracker):
  """Logs to a ClearML task, by default in a local folder.

  Numbers are curves over the step. Arrays are histograms of their finite elements, with 64 bins.
  ClearML has one task at a time in a process. If your program has made one, the sink logs to it and
  leaves it open. A reopened sink begins a new task. After an offline task ClearML stays offline in
  this process until you call `clearml.Task.set_offline(False)`, which needs ClearML's
  configuration.

  Args:
    project: the project's name.
    folder: the folder in which an offline task is `offline/ID.zip` after the sink is closed.
    run_name: the task's name. Default: the name of the open `run`, else "callgate".
    mode: "offline": `clearml.Task.import_offline_session(zip)` sends the task later. "online":
      ClearML sends records to its server at once.
    step: the path of an integer leaf with the step. Default: the record's `seq`.

  Attributes:
    task_id: ClearML's id of the task; None before the sink is opened.
  """

  _BINS = 64
  # Only the values of the sink are logged; ClearML would watch other libraries and the code.
  _WATCHED = (
    "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm",
    "hydra", "detect_repository", "tfdefines", "joblib", "megengine", "catboost", "gradio",
  )  # fmt: skip
  _extra, _needs = "clearml", ("clearml",)

  def __init__(
    self, project: str = "callgate", *, folder: StrPath = "clearml", run_name: str | None = None,
    mode: Literal["offline", "online"] = "offline", step: str | None = None,
    **choice: Unpack[ChoiceOptions],
  ) -> None:  # fmt: skip
    label = "sinks.ClearML"
    self._folder = resolved(options.path(label, "folder", folder))
    options.optional_texts(label, run_name=run_name)
    self._run_name = run_name
    self._mode = options.choice(label, "mode", mode, ("offline", "online"))
    super().__init__(options.text(label, "project", project), step, **choice)
    self._own = False  # True if the sink made the task
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
        project_name=self._target, task_name=name_of_run(self._run_name) or "callgate",
        reuse_last_task_id=False,
        auto_connect_arg_parser=False, auto_connect_streams=False, auto_resource_monitoring=False,
        auto_connect_frameworks=dict.fromkeys(self._WATCHED, False),
      )  # fmt: skip
    finally:
      del os.environ["CLEARML_CACHE_DIR"]
      if before is not None:
        os.environ["CLEARML_CACHE_DIR"] = before

  def _log_config(self, run: OpenRun) -> None:
    self._task.connect(dict(run.config), name="config")
    if run.tags:
      self._task.add_tags(list(run.tags))
    if run.notes:
      self._task.set_comment(run.notes)

  def _log_image(self, tag: str, pixels: np.ndarray, at: At) -> None:
    shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    self._task.get_logger().report_image(tag, tag, at.step, image=shown)

  def _log_text(self, tag: str, text: str, at: At) -> None:
    self._task.get_logger().report_text(f"{tag} #{at.step}: {text}", print_console=False)

  def _log_result(self, name: str, value: Any) -> None:
    log = self._task.get_logger()
    if is_number(value):
      log.report_single_value(name, value)
    else:
      log.report_text(f"summary {name}: {value}", print_console=False)

  def _log_alert(self, alert: Alert) -> None:
    log = self._task.get_logger()
    log.report_text(f"alert: {alert}", level=logging.WARNING, print_console=False)

  def _log_numbers(self, curves: list[tuple[str, np.ndarray]], at: At) -> None:
    log = self._task.get_logger()
    for tag, array in curves:
      if array.ndim == 0:
        log.report_scalar(tag, tag, float(array), at.step)
        continue
      values = np.asarray(array, np.float64)
      if (values := values[np.isfinite(values)]).size:
        counts, edges = np.histogram(values, self._BINS)
        log.report_histogram(tag, tag, counts, at.step, xlabels=[f"{x:.6g}" for x in edges[:-1]])

  def _flush(self) -> None:
    self._task.flush(wait_for_uploads=True)

  def _stop(self) -> None:
    if self._own:
      self._task.close()
    else:
      self._flush()
