# SPDX-License-Identifier: Apache-2.0
"""Sinks over libraries: each file is read back by its own library."""

from __future__ import annotations

import importlib
import json
import zipfile
from unittest import mock

import numpy as np
import pytest
from sink_records import EXPECTED, TIME, C, W, grads, losses, record
from tracker_files import events_of, history_of
from waiting import until

from callgate import sinks


def test_zarr_has_an_array_for_each_leaf(tmp_path):
  zarr = pytest.importorskip("zarr")
  with sinks.Zarr(tmp_path / "a.zarr") as sink:
    sink.write(losses(4) + grads(3))
    sink.write(losses(2, start=4) + grads(6)[3:])
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    np.testing.assert_array_equal(root["loss/value"][:], EXPECTED)  # while it is written
  np.testing.assert_array_equal(root["loss/seq"][:], np.arange(6))
  np.testing.assert_array_equal(root["loss/time_ns"][:], TIME + np.arange(6) * 10**9)
  np.testing.assert_array_equal(root["grad/device"][:], np.arange(6) % 2)
  np.testing.assert_array_equal(root["grad/value/w/0"][:], W)
  np.testing.assert_array_equal(root["grad/value/c"][:], C)


def test_hdf5_has_a_dataset_for_each_leaf(tmp_path):
  h5py = pytest.importorskip("h5py")
  with sinks.HDF5(tmp_path / "new" / "a.h5") as sink:
    sink.write(losses(6) + grads(6))
    sink.write([record("v", np.float16(i), i, lane=(i, 1)) for i in range(2)])
    sink.write([record("big", np.zeros((0, 5)), 0)])
  with h5py.File(tmp_path / "new" / "a.h5") as file:
    np.testing.assert_array_equal(file["loss/value"][:], EXPECTED)
    np.testing.assert_array_equal(file["loss/seq"][:], np.arange(6))
    np.testing.assert_array_equal(file["grad/value/w/0"][:], W)
    np.testing.assert_array_equal(file["grad/value/c"][:], C)
    np.testing.assert_array_equal(file["v/lane"][:], [[0, 1], [1, 1]])
    assert file["v/value"].dtype == np.float16
    assert file["big/value"].shape == (1, 0, 5)


def test_parquet_has_a_table_for_each_tap(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  with sinks.Parquet(tmp_path / "{name}.parquet") as sink:
    sink.write(losses(3))
    sink.flush()
    sink.write(losses(3, start=3) + grads(6))
    assert not (tmp_path / "loss.parquet").exists()  # not yet readable, so not yet there
  table = parquet.read_table(tmp_path / "loss.parquet")
  np.testing.assert_array_equal(table["value"].to_numpy(), EXPECTED)
  np.testing.assert_array_equal(table["seq"].to_numpy(), np.arange(6))
  table = parquet.read_table(tmp_path / "grad.parquet")
  np.testing.assert_array_equal(np.array(table["w/0"].to_pylist()), W)
  assert table["c"].to_pylist()[3] == {"re": 3.0, "im": 2.0}
  assert sorted(p.name for p in tmp_path.iterdir()) == ["grad.parquet", "loss.parquet"]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2), (2, 3, 4), (1, 1)])
def test_parquet_holds_arrays_of_any_shape(shape, tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  values = [np.full(shape, i, np.int16) for i in range(3)]
  with sinks.Parquet(tmp_path / "a.parquet") as sink:
    sink.write([record("x", value, i) for i, value in enumerate(values)])
  found = parquet.read_table(tmp_path / "a.parquet")["value"].to_pylist()
  assert found == [value.tolist() for value in values]


def test_parquet_of_two_taps_needs_their_names_in_the_path(tmp_path):
  pytest.importorskip("pyarrow")
  with sinks.Parquet(tmp_path / "a.parquet") as sink:
    sink.write(losses(1))
    with pytest.raises(sinks.SinkError, match=r"expected only the tap 'loss' in .*\{name\}"):
      sink.write(grads(1))


def test_tensorboard_has_scalars_and_histograms(tmp_path):
  pytest.importorskip("tensorboardX")
  with sinks.TensorBoard(tmp_path / "run") as sink:
    sink.write(losses(6) + grads(6))
    sink.write([record("v", np.array([1.0, np.nan, 2.0]), lane=(3,))])
  events = events_of(tmp_path / "run")
  assert [step for step, _, _ in events["loss"]] == list(range(6))
  assert [value.simple_value for _, _, value in events["loss"]] == EXPECTED.tolist()
  assert events["loss"][2][1] == pytest.approx(TIME * 1e-9 + 2)
  assert [value.simple_value for _, _, value in events["grad/c/im"]] == [2.0] * 6
  assert events["grad/w/0"][4][2].histo.num == 6
  assert events["grad/w/0"][4][2].histo.max == 4.0
  assert events["v/lane_3"][0][2].histo.num == 2  # the finite ones


def test_tensorboard_files_of_one_second_are_apart(tmp_path):
  pytest.importorskip("tensorboardX")
  sink, other = sinks.TensorBoard(tmp_path), sinks.TensorBoard(tmp_path)
  for start in range(3):  # opened anew each time
    with sink:
      sink.write(losses(1, start=start))
  with sink, other:
    sink.write(losses(1, start=3))
    other.write(losses(1, start=4))
  assert sorted(step for step, _, _ in events_of(tmp_path)["loss"]) == [0, 1, 2, 3, 4]


def test_tensorboard_takes_the_step_from_a_leaf(tmp_path):
  pytest.importorskip("tensorboardX")
  with sinks.TensorBoard(tmp_path, step="step") as sink:
    sink.write([record("t", {"step": np.int32(100), "loss": 0.5})])
    with pytest.raises(sinks.SinkError, match="expected a leaf 'step' for the step, got t/loss"):
      sink.write([record("t", {"loss": 0.5})])
    with pytest.raises(sinks.SinkError, match=r"expected the step 't/step' to be an integer"):
      sink.write([record("t", {"step": 0.5, "loss": 0.5})])
  events = events_of(tmp_path)
  assert list(events) == ["t/loss"]
  assert events["t/loss"][0][0] == 100


def test_mlflow_has_metrics(tmp_path, monkeypatch):
  pytest.importorskip("mlflow")
  sink = sinks.MLflow("experiment", tracking_uri=tmp_path / "store", run_name="first")
  with sink:
    sink.write(losses(6))
    sink.write([record("odd, name", np.complex64(1 + 2j), lane=(1, 0))])
    sink.write([record("v", np.array([1.0, np.nan, 3.0]), 4), record("none", np.full(2, np.inf))])
  with sink:
    sink.write([record("loss", np.nan, 6)])
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
  client = importlib.import_module("mlflow.tracking").MlflowClient((tmp_path / "store").as_uri())
  experiment = client.get_experiment_by_name("experiment")
  (run,) = client.search_runs([experiment.experiment_id])
  assert run.info.run_id == sink.run_id
  assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
  history = sorted(client.get_metric_history(sink.run_id, "loss"), key=lambda metric: metric.step)
  np.testing.assert_array_equal([metric.value for metric in history], [*EXPECTED, np.nan])
  assert history[2].timestamp == TIME // 10**6 + 2000
  assert run.data.metrics["odd_ name/lane_1.0/im"] == 2.0
  found = {
    name: value for name, value in run.data.metrics.items() if name.startswith(("v/", "none"))
  }
  assert found == {
    "v/min": 1, "v/mean": 2, "v/max": 3, "v/std": 1, "v/nonfinite": 1, "none/nonfinite": 2,
  }  # fmt: skip


def test_wandb_has_a_run_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is asked
  sink = sinks.WandB("project", folder=tmp_path / "new", run_name="first")
  with sink:
    sink.write([*losses(6), record("h", np.array([*range(100), np.inf]), 7, lane=(2,))])
  (folder,) = (tmp_path / "new" / "wandb").glob(f"offline-run-*-{sink.run_id}")
  file = folder / f"run-{sink.run_id}.wandb"
  until(lambda: len(history_of(file)) == 7, "written by wandb's own process, a little later")
  rows = history_of(file)
  found = [(row["callgate/step"], row["loss"]) for row in rows if "loss" in row]
  assert found == [(i, pytest.approx(value)) for i, value in enumerate(EXPECTED)]
  (row,) = [row for row in rows if "h/lane_2._type" in row]
  assert row["h/lane_2._type"] == "histogram"
  counts, edges = np.histogram(np.arange(100), 64)
  assert row["h/lane_2.values"] == counts.tolist()
  np.testing.assert_allclose(row["h/lane_2.bins"], edges)
  assert not list(folder.rglob("requirements.txt"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its libraries among each other
@pytest.mark.filterwarnings("ignore:os.fork")  # it forks, for a short program
def test_clearml_has_a_task_offline(tmp_path, monkeypatch):
  clearml = pytest.importorskip("clearml")
  monkeypatch.setenv("CLEARML_API_HOST", "http://127.0.0.1:9")  # nobody is asked
  sink = sinks.ClearML("project", folder=tmp_path / "new", run_name="first", step="i")
  rows = [record("t", {"i": np.int32(10 + i), "x": np.float32(x)}) for i, x in enumerate(EXPECTED)]
  with sink:
    sink.write([*rows, record("h", {"i": np.int32(7), "y": np.array([*range(100), np.inf])})])
    with pytest.raises(sinks.SinkError, match="expected a leaf 'i' for the step"):
      sink.write(losses(1))
  with zipfile.ZipFile(tmp_path / "new" / "offline" / f"{sink.task_id}.zip") as archive:
    about = json.loads(archive.read("task.json"))
    text = archive.read("metrics.jsonl").decode()
  assert [about["name"], about["project_name"]] == ["first", "project"]
  assert "script" not in about  # the program's code and packages
  events = [event for line in text.splitlines() for event in json.loads(line)]
  found = [(e["iter"], e["value"]) for e in events if e["metric"] == "t/x"]
  assert found == [(10 + i, pytest.approx(value)) for i, value in enumerate(EXPECTED)]
  (plot,) = [json.loads(e["plot_str"]) for e in events if e["metric"] == "h/y"]
  assert plot["data"][0]["y"] == np.histogram(np.arange(100), 64)[0].tolist()
  assert clearml.Task.current_task() is None
  own = mock.Mock(id="own")  # a task of the program's: it gets what is written, and stays open
  monkeypatch.setattr(clearml.Task, "current_task", lambda: own)
  with sinks.ClearML("project") as sink:
    sink.write(losses(2))
  assert sink.task_id == "own"
  found = [call.args for call in own.get_logger().report_scalar.call_args_list]
  assert found == [("loss", "loss", pytest.approx(EXPECTED[i]), i) for i in range(2)]
  own.close.assert_not_called()
  own.flush.assert_called_once_with(wait_for_uploads=True)


def test_plot_draws_a_picture_that_its_library_reads(tmp_path):
  image = pytest.importorskip("matplotlib.image")
  with sinks.Plot(tmp_path / "new" / "p.png", title="x", size=(4, 3)) as sink:
    sink.write(losses(6) + grads(6))
  picture = image.imread(tmp_path / "new" / "p.png")
  assert picture.shape[:2] == (300, 400)
  assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20
  assert [p.name for p in (tmp_path / "new").iterdir()] == ["p.png"]


def test_plot_names_its_curves(tmp_path):
  pytest.importorskip("matplotlib")
  import matplotlib as mpl

  with mpl.rc_context({"svg.fonttype": "none"}), sinks.Plot(tmp_path / "p.svg", log=True) as sink:
    sink.write(losses(6) + grads(6))
    sink.write([record("_v$1", 1.0, lane=(2,))])
  text = (tmp_path / "p.svg").read_text()
  for name in ("loss", "grad/c", "grad/n", "_v$1[2]"):
    assert f">{name}<" in text
  assert "grad/w/0" not in text  # an array


def test_plot_redraws_when_time_has_passed_and_at_close(tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  now = 100.0
  monkeypatch.setattr("callgate.sinks._plot.time.monotonic", lambda: now)
  drawn: list[int] = []

  def save(figure, path, **_):
    drawn.append(len(figure.axes[0].lines))
    path.touch()

  monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
  sink = sinks.Plot(tmp_path / "p.png", every_seconds=10)
  sink.write(losses(1))
  sink.write(losses(1, start=1))
  assert drawn == [1]
  now = 111.0
  sink.write(grads(1))
  assert drawn == [1, 3]
  sink.close()
  assert drawn == [1, 3]  # nothing new
  sink.write(losses(1))
  sink.close()
  assert drawn == [1, 3, 3]


def test_curves_take_bounded_memory_and_keep_their_ends():
  from callgate.sinks._plot import _Curve

  curve = _Curve(100)
  for step in range(12345):
    curve.add(step, step * 0.5)
  steps, values = curve.line
  assert 50 <= len(steps) <= 101
  assert (steps[0], steps[-1]) == (0, 12344)
  np.testing.assert_array_equal(values, steps * 0.5)
  assert np.ptp(np.diff(steps[:-1])) == 0
