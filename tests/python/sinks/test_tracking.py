# SPDX-License-Identifier: Apache-2.0
"""Trackers within a run: its config, results and alerts, and images and texts of taps."""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sink_records import losses
from tracker_files import events_of, history_of
from waiting import until

import callgate as cg
from callgate import sinks

CONFIG = {"rate": 0.1, "model": {"width": 3, "kinds": ["a", "b"]}}
PIXELS = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)


def train(folder: Path, sink: Any) -> Any:
  """A run with all that trackers log; the sink is made in its block."""

  @jax.jit
  def step(x: Any) -> Any:
    cg.tap(x, "t", name="loss")
    cg.tap(PIXELS, "t", name="picture", kind="image")
    cg.tap(jnp.full((2, 4, 6), x / 10), "t", name="grey", kind="image")
    cg.tap(("x is {:.0f}", x), "t", name="words", kind="text")
    cg.alert(x > 1, "large: {x}", x=x)
    return x

  with cg.run("tracked", folder=folder, config=CONFIG, notes="a note", tags=["one", "two"]) as run:
    run.summary["size"] = 8
    made = sink()
    with cg.channel("t", to=made):
      step(1.0)
      step(2.0)
      cg.barrier()
      run.summary["accuracy"] = 0.97
    run.summary["best"] = "second"
    cg.alert(True, "after the channel")
  cg.alert(True, "after the run")  # to nobody here
  return run, made


def test_tensorboard_has_them(tmp_path):
  pytest.importorskip("tensorboardX")
  images = pytest.importorskip("PIL.Image")
  run, _ = train(tmp_path, lambda: sinks.TensorBoard("board"))
  events = events_of(run.folder / "board")

  def texts(tag: str) -> list[str]:
    found = [value for _, _, value in events[f"{tag}/text_summary"]]
    return [value.tensor.string_val[0].decode() for value in found]

  assert json.loads(texts("config")[0].removeprefix("```json\n").removesuffix("\n```")) == CONFIG
  assert (texts("notes"), texts("tags")) == (["a note"], ["one, two"])
  assert texts("words") == ["x is 1", "x is 2"]
  assert texts("alerts") == ["large: 2.0", "after the channel"]
  assert texts("summary/best") == ["second"]
  assert events["summary/accuracy"][0][2].simple_value == pytest.approx(0.97)
  assert events["summary/size"][0][2].simple_value == 8
  assert [value.simple_value for _, _, value in events["loss"]] == [1, 2]
  for tag, want in (("picture", PIXELS), ("grey/1", np.full((4, 6), 51))):
    encoded = events[tag][-1][2].image.encoded_image_string
    np.testing.assert_array_equal(np.asarray(images.open(io.BytesIO(encoded))), want)
  assert any(tag.startswith("_hparams_") for tag in events)


def test_mlflow_has_them(tmp_path, monkeypatch):
  pytest.importorskip("mlflow")
  run, sink = train(tmp_path, sinks.MLflow)
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
  client = importlib.import_module("mlflow.tracking").MlflowClient((run.folder / "mlruns").as_uri())
  found = client.get_run(sink.run_id)
  assert found.info.run_name == "tracked"
  assert found.data.params == {"rate": "0.1", "model.width": "3", "model.kinds": "['a', 'b']"}
  tags = found.data.tags
  assert (tags["mlflow.note.content"], tags["one"], tags["two"]) == ("a note", "true", "true")
  assert (found.data.metrics["loss"], found.data.metrics["summary/accuracy"]) == (2, 0.97)
  assert found.data.metrics["summary/size"] == 8
  assert found.info.status == "FINISHED"
  assert tags["summary/best"] == "second"
  artifacts = run.folder / "mlruns" / found.info.experiment_id / sink.run_id / "artifacts"
  assert (artifacts / "alerts.txt").read_text() == "large: 2.0\nafter the channel\n"
  texts = sorted((artifacts / "texts" / "words").iterdir())
  assert [path.read_text() for path in texts] == ["x is 1", "x is 2"]
  pictures = [*(artifacts / "images").rglob("*.png")]
  assert len(pictures) == 6
  assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_wandb_has_them(tmp_path, monkeypatch):
  wandb = pytest.importorskip("wandb")
  pytest.importorskip("PIL")
  monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is asked
  init = mock.Mock(wraps=wandb.init)
  monkeypatch.setattr(wandb, "init", init)
  run, sink = train(tmp_path, sinks.WandB)
  given = init.call_args.kwargs
  assert (given["config"], given["notes"], given["tags"]) == (CONFIG, "a note", ["one", "two"])
  assert given["name"] == "tracked"
  (folder,) = (run.folder / "wandb").glob(f"offline-run-*-{sink.run_id}")
  file = folder / f"run-{sink.run_id}.wandb"
  until(lambda: sum("words._type" in row for row in history_of(file)) == 2)
  rows = history_of(file)
  kinds = [row["picture._type"] for row in rows if "picture._type" in row]
  assert kinds == ["image-file"] * 2
  assert b"large: 2.0" in file.read_bytes()
  assert b"accuracy" in file.read_bytes()
  until(lambda: b"after the channel" in file.read_bytes())
  assert b"second" in file.read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its libraries among each other
@pytest.mark.filterwarnings("ignore:os.fork")  # it forks, for a short program
def test_clearml_has_them(tmp_path, monkeypatch):
  pytest.importorskip("clearml")
  monkeypatch.setenv("CLEARML_API_HOST", "http://127.0.0.1:9")  # nobody is asked
  run, sink = train(tmp_path, sinks.ClearML)
  archive = run.folder / "clearml" / "offline" / f"{sink.task_id}.zip"
  with zipfile.ZipFile(archive) as file:
    about = json.loads(file.read("task.json"))
    names = file.namelist()
    texts = file.read("log.jsonl").decode()
    metrics = file.read("metrics.jsonl").decode()
  assert (about["name"], about["comment"]) == ("tracked", "a note")
  assert {"one", "two"} <= set(about["tags"])
  given = about["hyperparams"]["config"]
  assert given["rate"]["value"] == "0.1"
  assert given["model/width"]["value"] == "3"
  assert "words #" in texts
  assert "x is 2" in texts
  assert "alert: large: 2.0" in texts
  assert "alert: after the channel" in texts
  assert "after the run" not in texts
  assert "summary best: second" in texts
  assert "accuracy" in metrics
  assert sum("picture" in name and name.endswith(".jpeg") for name in names) == 2


class Failing(sinks.TensorBoard):
  def _log_alert(self, alert: Any) -> None:
    raise OSError("no room")


def test_an_alert_that_can_not_be_logged_is_the_barriers_error(tmp_path):
  pytest.importorskip("tensorboardX")
  seen: list[str] = []
  with cg.on_alert(seen.append), cg.channel("t", to=Failing(tmp_path)):
    cg.tap(1.0, "t")
    cg.barrier()
    cg.alert(True, "look")
    with pytest.raises(sinks.SinkError, match="cannot log the alert 'look': OSError: no room"):
      cg.barrier()
  assert seen == ["look"]  # the others are told


def test_a_flush_of_tensorboard_leaves_nothing_to_a_thread(tmp_path):
  pytest.importorskip("tensorboardX")
  sink = sinks.TensorBoard(tmp_path)
  for last in range(50, 501, 50):
    sink.write(losses(50, start=last - 50))
    sink.flush()
    assert [step for step, _, _ in events_of(tmp_path)["loss"]] == list(range(last))
  sink.close()


def test_a_histogram_has_all_finite_values(tmp_path):
  pytest.importorskip("tensorboardX")
  values = np.array([-1e300, -1.0, 0.0, 1e-20, 2.0, 1e30, np.inf, np.nan])
  with cg.channel("t", to=sinks.TensorBoard(tmp_path)), jax.enable_x64(True):
    cg.tap(values, "t")
  ((_, _, value),) = events_of(tmp_path)["t"]
  assert (value.histo.num, sum(value.histo.bucket)) == (6, 6)
  assert (value.histo.min, value.histo.max) == (-1e300, 1e30)


def test_a_tracker_goes_on_to_the_runs_end_over_several_channels(tmp_path):
  pytest.importorskip("tensorboardX")
  with cg.run("r", folder=tmp_path) as run:
    board = sinks.TensorBoard("board")
    for value in (1.0, 2.0):
      with cg.channel("t", to=board):
        cg.tap(value, "t")
      (file,) = (run.folder / "board").iterdir()
    assert len(events_of(run.folder / "board")["t"]) == 2  # there, though it goes on
    run.summary["best"] = 2
  assert [one.name for one in (run.folder / "board").iterdir()] == [file.name]
  assert len(events_of(run.folder / "board")["summary/best"]) == 1
  with cg.channel("t", to=board):  # opened anew
    cg.tap(3.0, "t")
  assert len(list((run.folder / "board").iterdir())) == 2


def test_a_tracker_that_can_not_end_fails_its_run(tmp_path):
  pytest.importorskip("tensorboardX")

  class Endless(sinks.TensorBoard):
    def _stop(self) -> None:
      super()._stop()
      raise OSError("no room")

  with (
    pytest.raises(sinks.SinkError, match="cannot be closed properly: OSError: no room"),
    cg.run("r", folder=tmp_path) as run,
    cg.channel("t", to=[Endless("a"), Endless("b")]),
  ):
    cg.tap(1.0, "t")
  assert run.state == "crashed"
  assert len(events_of(run.folder / "b")["t"]) == 1


def test_outside_of_a_run_alerts_come_as_well_and_names_are_the_trackers(tmp_path):
  pytest.importorskip("tensorboardX")
  with cg.channel("t", to=sinks.TensorBoard(tmp_path)):
    cg.tap(1.0, "t")
    cg.barrier()
    cg.alert(True, "look")
    cg.barrier()
  cg.alert(True, "closed")
  cg.barrier()
  events = events_of(tmp_path)
  assert "config/text_summary" not in events
  assert len(events["alerts/text_summary"]) == 1
