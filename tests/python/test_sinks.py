"""Sinks: every file is read back by its own library and compared with the records."""

from __future__ import annotations

import csv
import datetime
import importlib
import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import callgate as cg
from callgate import sinks
from callgate._records import leaf_paths
from callgate.sinks._base import plain

TIME = 1_700_000_000_000_000_000


def record(name: str, value: Any, seq: int = 0, **info: Any) -> sinks.Record:
  return sinks.Record(value, sinks.TapInfo(name, seq, TIME + seq * 10**9, **info))


def losses(count: int, start: int = 0) -> list[sinks.Record]:
  return [record("loss", np.float32(1 / (i + 1)), i) for i in range(start, start + count)]


def grads(count: int) -> list[sinks.Record]:
  """A pytree of arrays of several dtypes, one of which NumPy lacks."""
  return [
    record(
      "grad",
      {"w": [np.full((2, 3), i, ml_dtypes.bfloat16)], "c": np.complex64(i + 2j), "n": np.int32(i)},
      i,
      device=i % 2,
    )
    for i in range(count)
  ]


EXPECTED = np.array([1 / (i + 1) for i in range(6)], np.float32)
W = np.arange(6, dtype=np.float32)[:, None, None] * np.ones((2, 3), np.float32)
C = np.arange(6).astype(np.complex64) + np.complex64(2j)


# --- Columns


def test_columns_name_a_lone_leaf_by_the_tap_and_others_by_their_paths():
  value = {"w": [np.ones(2), 3.0], "b": (np.int8(1),), "none": None}
  named = sinks.columns(record("loss", value))
  assert sorted(named) == ["loss/b/0", "loss/w/0", "loss/w/1"]
  np.testing.assert_array_equal(named["loss/w/0"], np.ones(2))
  assert list(sinks.columns(record("loss", np.ones(2)))) == ["loss"]
  assert list(sinks.columns(record("loss", 1.0, role="cotangent"))) == ["loss:cotangent"]
  assert sinks.columns(record("loss", ())) == {}


def test_columns_with_the_same_name_are_an_error():
  with pytest.raises(ValueError, match="two leaves 'a/b'"):
    sinks.columns(record("t", {"a": {"b": 1}, "a/b": 2}))


# --- Native sinks


def lines_of(path: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_has_a_line_for_each_record(tmp_path):
  with sinks.JSONL(tmp_path / "new" / "a.jsonl") as sink:
    sink.write(losses(6))
    sink.write(grads(1))
    sink.write([record("x", np.float32(1), lane=(2, 5), run=9, role="tangent", repeated=True)])
  lines = lines_of(tmp_path / "new" / "a.jsonl")
  assert [np.float32(line["value"]) for line in lines[:6]] == EXPECTED.tolist()
  assert lines[3] == {
    "name": "loss", "seq": 3, "time_ns": TIME + 3 * 10**9, "device": 0, "run": -1,
    "role": "primal", "value": 0.25,
  }  # fmt: skip
  assert lines[6]["value"] == {"c": [0.0, 2.0], "n": 0, "w/0": [[0.0] * 3] * 2}
  assert lines[7]["lane"] == [2, 5]
  assert lines[7]["repeated"] is True
  assert (lines[7]["role"], lines[7]["run"]) == ("tangent", 9)


def all_values(dtype: np.dtype) -> np.ndarray:
  """Every value of a dtype of at most 16 bits, packed ones included."""
  bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}.get(dtype.name)
  if bits is not None:
    raw = np.arange(1 << bits, dtype=np.uint8)
    if dtype.name.startswith("int"):
      raw = np.where(raw >> (bits - 1), raw | (0xFF << bits) & 0xFF, raw).astype(np.uint8)
    return raw.view(dtype)
  raw_type = np.uint8 if dtype.itemsize == 1 else np.uint16
  return np.arange(1 << (8 * dtype.itemsize)).astype(raw_type).view(dtype)


SMALL = [
  "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz",
  "float8_e4m3fnuz", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn",
  "int4", "uint4", "int2", "uint2", "int8", "uint8", "int16", "uint16",
]  # fmt: skip


def small_dtype(name: str) -> np.dtype:
  return np.dtype(getattr(ml_dtypes, name, None) or name)


@pytest.mark.parametrize("name", SMALL)
def test_jsonl_and_npy_hold_every_value_of_every_small_dtype(name, tmp_path):
  values = all_values(small_dtype(name))
  with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
    expected = values.astype(np.float32)
  with sinks.JSONL(tmp_path / "a.jsonl") as sink:
    sink.write([record("x", values)])
  got = np.array([float(v) for v in lines_of(tmp_path / "a.jsonl")[0]["value"]], np.float32)
  np.testing.assert_array_equal(got, expected)
  with sinks.Npy(tmp_path / "a.npy") as sink:
    sink.write([record("x", values)])
  np.testing.assert_array_equal(np.load(tmp_path / "a.npy")[0].astype(np.float32), expected)


@pytest.mark.parametrize("name", SMALL)
def test_the_dtypes_that_files_of_arrays_hold_are_exact(name):
  values = all_values(small_dtype(name))
  held = plain(values)
  assert held.dtype.isbuiltin == 1
  with np.errstate(invalid="ignore"):
    np.testing.assert_array_equal(held.astype(values.dtype).astype(np.float32), held)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint64", "float64", "complex64", "complex128"])
def test_npy_holds_numpys_dtypes_as_they_are(dtype, tmp_path):
  values = [np.array([[0, 1], [i, 2**40 % 97]]).astype(dtype) for i in range(3)]
  with sinks.Npy(tmp_path / "a.npy") as sink:
    sink.write([record("x", value, i) for i, value in enumerate(values)])
  loaded = np.load(tmp_path / "a.npy")
  assert loaded.dtype == np.dtype(dtype)
  np.testing.assert_array_equal(loaded, values)


@settings(deadline=None)
@given(st.lists(st.floats(width=64), min_size=1, max_size=8))
def test_jsonl_floats_round_trip(values):
  expected = np.array(values)
  path = Path(_scratch.name) / "floats.jsonl"
  with sinks.JSONL(path) as sink:
    sink.write([record("x", expected)])
  got = [float(v) for v in lines_of(path)[0]["value"]]
  np.testing.assert_array_equal(got, expected)


keys = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.dictionaries(keys, st.lists(st.integers(-5, 5), max_size=2), max_size=4))
def test_native_sinks_name_leaves_as_columns_does(tree):
  """Paths go to C++ as `keystr` writes them; both sides make the same names of them."""
  value = jax.tree.map(np.int32, tree)
  plain = [path for _, path in leaf_paths(jax.tree.structure(value))]
  stats = sinks.Stats()
  if len(set(plain)) != len(plain):
    return
  stats.write([record("t", value)])
  expected = sinks.columns(record("t", value))
  found = stats.result()
  # repr escapes what cannot be printed; such characters keep their escapes in C++.
  if all(key.isprintable() for key in tree):
    assert {name: int(f["last"]) for name, f in found.items()} == {
      name: int(leaf) for name, leaf in expected.items()
    }
  assert len(found) == len(expected)


def test_npy_is_loaded_at_any_time_and_a_change_of_shape_is_an_error(tmp_path):
  path = tmp_path / "x.npy"
  sink = sinks.Npy(path)
  for i in range(1, 4):
    sink.write([record("x", np.full(3, i), i)])
    sink.flush()
    np.testing.assert_array_equal(np.load(path), np.arange(1, i + 1)[:, None] * np.ones(3))
    np.testing.assert_array_equal(np.load(path, mmap_mode="r"), np.load(path))
  with pytest.raises(sinks.SinkError, match=r"tap 'x', record 9: .* got rows of <i8\[4\]"):
    sink.write([record("x", np.full(4, i), 9)])
  sink.close()
  assert np.load(path).shape == (3, 3)


def test_npy_makes_a_file_a_leaf(tmp_path):
  with sinks.Npy(tmp_path / "{name}.npy") as sink:
    sink.write(grads(6) + losses(6))
  np.testing.assert_array_equal(np.load(tmp_path / "grad_w_0.npy"), W)
  np.testing.assert_array_equal(np.load(tmp_path / "grad_c.npy"), C)
  np.testing.assert_array_equal(np.load(tmp_path / "loss.npy"), EXPECTED)


def test_npy_continues_a_file_that_numpy_wrote(tmp_path):
  np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
  with sinks.Npy(tmp_path / "x.npy", append=True) as sink:
    sink.write([record("x", np.array([6.0, 7.0]))])
  np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.arange(8.0).reshape(4, 2))


def test_stats_are_those_of_numpy():
  rng = np.random.default_rng(0)
  values = rng.normal(3, 2, (40, 5))
  edges = np.linspace(-2, 8, 11)
  given_bins, powers = sinks.Stats(bins=edges), sinks.Stats()
  for sink in (given_bins, powers):
    sink.write([record("x", value, i) for i, value in enumerate(values)])
  found = given_bins.result()["x"]
  assert found["records"] == 40
  assert found["count"] == values.size
  np.testing.assert_allclose(found["mean"], values.mean(), rtol=1e-12)
  np.testing.assert_allclose(found["variance"], values.var(), rtol=1e-12)
  assert (found["min"], found["max"]) == (values.min(), values.max())
  np.testing.assert_array_equal(found["last"], values[-1])
  counts, _ = np.histogram(values, edges)
  np.testing.assert_array_equal(found["histogram"]["counts"], counts)
  assert found["histogram"]["below"] == (values < edges[0]).sum()
  assert found["histogram"]["above"] == (values > edges[-1]).sum()
  histogram = powers.result()["x"]["histogram"]
  counts, _ = np.histogram(values, histogram["edges"])
  np.testing.assert_array_equal(histogram["counts"], counts)
  assert counts[0] > 0
  assert counts[-1] > 0
  powers.clear()
  assert powers.result() == {}


def test_stats_of_what_is_no_number():
  stats = sinks.Stats()
  stats.write([record("x", np.array([np.nan, np.inf, -np.inf, 1.0, 3.0]))])
  stats.write([record("none", np.zeros((0, 2)))])
  found = stats.result()
  assert (found["x"]["nan"], found["x"]["inf"], found["x"]["count"]) == (1, 2, 2)
  assert found["x"]["mean"] == 2.0
  assert math.isnan(found["none"]["mean"])
  assert math.isnan(found["none"]["max"])
  assert found["none"]["last"].shape == (0, 2)


def test_stats_refuse_bins_that_do_not_grow():
  with pytest.raises(ValueError, match="each greater than the one before"):
    sinks.Stats(bins=[1, 1])
  with pytest.raises(ValueError, match="got no edge"):
    sinks.Stats(bins=[])


def test_native_sinks_are_consumers_and_say_what_they_are(tmp_path):
  for sink in (sinks.JSONL(tmp_path / "a"), sinks.Npy(tmp_path / "b"), sinks.Stats()):
    assert isinstance(sink.native, cg._callgate.Consumer)
    assert type(sink).__name__ in repr(sink.native)


def test_native_sinks_refuse_what_is_no_record_of_jax():
  stats = sinks.Stats()
  with pytest.raises(sinks.SinkError, match="expected a dtype that JAX has, got <U1"):
    stats.write([record("x", np.array("a"))])
  with pytest.raises(sinks.SinkError, match="expected a role"):
    stats.write([record("x", 1.0, role="residual")])
  with pytest.raises(sinks.SinkError, match="indices from 0, got -1"):
    stats.write([record("x", 1.0, lane=(-1,))])
  assert stats.result() == {}


def test_several_threads_write_to_one_native_sink(tmp_path):
  sink = sinks.JSONL(tmp_path / "a.jsonl")
  threads = [threading.Thread(target=sink.write, args=[losses(200)]) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  sink.close()
  assert len(lines_of(tmp_path / "a.jsonl")) == 800


# --- Text


def test_print_shows_records():
  out = io.StringIO()
  with sinks.Print(out) as sink:
    sink.write([*losses(1), record("w", {"a": np.arange(3), "b": 0.5}, 4, lane=(1, 2))])
    sink.write([record("m", np.eye(2), role="tangent")])
  assert out.getvalue() == (
    "loss #0: 1.0\nw[1,2] #4: a=[0 1 2] b=0.5\nm:tangent #0:\n[[1. 0.]\n [0. 1.]]\n"
  )
  assert not out.closed


def test_print_formats_by_text_or_function(capsys):
  sinks.Print(format="{name} {seq} {value:.2f} {time:%S}").write(losses(2))
  sinks.Print(format=lambda r: f"<{r.info.name}>").write(losses(1))
  seconds = [f"{datetime.datetime.fromtimestamp(TIME * 1e-9 + i):%S}" for i in (0, 1)]
  assert capsys.readouterr().out == (
    f"loss 0 1.00 {seconds[0]}\nloss 1 0.50 {seconds[1]}\n<loss>\n"
  )
  with pytest.raises(sinks.SinkError, match=r"Print\('stdout'\): tap 'loss', record 0 .*KeyError"):
    sinks.Print(format="{nothing}").write(losses(1))


def table_of(path: Path) -> list[dict[str, str]]:
  with open(path, newline="", encoding="utf-8") as file:
    return list(csv.DictReader(file))


def test_csv_has_a_row_for_each_record(tmp_path):
  value = {"a": np.float32(0.1), "z": np.complex64(1 + 2j), "h": ml_dtypes.bfloat16(0.5)}
  with sinks.CSV(tmp_path / "t.csv") as sink:
    sink.write([record("t", value, i, lane=(i, 3), device=2) for i in range(3)])
  rows = table_of(tmp_path / "t.csv")
  assert list(rows[0]) == ["seq", "time_ns", "device", "lane", "t/a", "t/h", "t/z"]
  assert [np.float32(row["t/a"]) for row in rows] == [np.float32(0.1)] * 3
  assert complex(rows[0]["t/z"]) == 1 + 2j
  assert (rows[2]["seq"], rows[2]["lane"], rows[2]["device"]) == ("2", "2;3", "2")


def test_csv_names_a_column_that_comes_too_late_and_keeps_the_rest(tmp_path):
  with sinks.CSV(tmp_path / "t.csv") as sink:
    batch = [record("t", {"a": 1.0}), record("t", {"a": 2.0, "b": 3.0}, 1), record("t", {"a": 4.0})]
    with pytest.raises(sinks.SinkError, match=r"CSV\(.*tap 't', record 1 .*got 't/b'"):
      sink.write(batch)
    with pytest.raises(sinks.SinkError, match=r"expected scalars, got 't/a' of shape \(2,\)"):
      sink.write([record("t", {"a": np.ones(2)})])
  assert [row["t/a"] for row in table_of(tmp_path / "t.csv")] == ["1.0", "4.0"]


def test_csv_of_several_taps(tmp_path):
  records = [record("a", 1.0), record("b/c", 2.0)]
  with sinks.CSV(tmp_path / "all.csv", columns=["a", "b/c"]) as sink:
    sink.write(records)
  assert [(row["a"], row["b/c"]) for row in table_of(tmp_path / "all.csv")] == [
    ("1.0", ""), ("", "2.0"),
  ]  # fmt: skip
  with sinks.CSV(tmp_path / "{name}.csv") as sink:
    sink.write(records)
  assert table_of(tmp_path / "b_c.csv")[0]["b/c"] == "2.0"


def test_csv_cuts_off_a_torn_line(tmp_path):
  path = tmp_path / "t.csv"
  with sinks.CSV(path) as sink:
    sink.write(losses(2))
  path.write_text(path.read_text() + "2,17000")
  with sinks.CSV(path, append=True) as sink:
    sink.write(losses(1, start=2))
  assert [row["seq"] for row in table_of(path)] == ["0", "1", "2"]


# --- Libraries


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
    with pytest.raises(sinks.SinkError, match=r"expected the tap 'loss' alone in .*\{name\}"):
      sink.write(grads(1))


def events_of(folder: Path) -> dict[str, list[Any]]:
  """Summaries of all event files, by tag, as (step, wall time, value)."""
  from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401 - its protos are loaded
  from tensorboardX.proto import event_pb2

  found: dict[str, list[Any]] = {}
  for file in sorted(folder.iterdir()):
    data = file.read_bytes()
    while data:  # length, its checksum, the event, its checksum
      length = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      for value in event.summary.value:
        found.setdefault(value.tag, []).append((event.step, event.wall_time, value))
  return found


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
    with pytest.raises(sinks.SinkError, match="expected scalars"):
      sink.write([record("v", np.ones(2))])
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
  sink = sinks.Plot(tmp_path / "p.png", every_seconds=10)
  monkeypatch.setattr(sink, "_replace", lambda figure: drawn.append(len(figure.axes[0].lines)))
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
  assert 50 <= len(curve.steps) <= 101
  assert (curve.steps[0], curve.steps[-1]) == (0, 12344)
  np.testing.assert_array_equal(curve.values, curve.steps * 0.5)
  assert np.ptp(np.diff(curve.steps[:-1])) == 0


# --- All of them

FILES = {
  "JSONL": lambda path, **options: sinks.JSONL(path / "a.jsonl", **options),
  "Npy": lambda path, **options: sinks.Npy(path / "a.npy", **options),
  "CSV": lambda path, **options: sinks.CSV(path / "a.csv", **options),
  "Zarr": lambda path, **options: sinks.Zarr(path / "a.zarr", **options),
  "HDF5": lambda path, **options: sinks.HDF5(path / "a.h5", **options),
  "Parquet": lambda path, **options: sinks.Parquet(path / "a.parquet", **options),
}
LIBRARIES = {
  "Zarr": ("zarr", "zarr"),
  "HDF5": ("h5py", "hdf5"),
  "Parquet": ("pyarrow", "parquet"),
  "TensorBoard": ("tensorboardX", "tensorboard"),
  "MLflow": ("mlflow", "mlflow"),
  "Plot": ("matplotlib.figure", "plot"),
}


def values_in(name: str, path: Path) -> list[float]:
  """The values of the tap "loss", by the library of the sink."""
  match name:
    case "JSONL":
      return [line["value"] for line in lines_of(path / "a.jsonl")]
    case "Npy":
      return np.load(path / "a.npy").tolist()
    case "CSV":
      return [float(row["loss"]) for row in table_of(path / "a.csv")]
    case "Zarr":
      return importlib.import_module("zarr").open_group(path / "a.zarr")["loss/value"][:].tolist()
    case "HDF5":
      with importlib.import_module("h5py").File(path / "a.h5") as file:
        return file["loss/value"][:].tolist()
    case _:
      parquet = importlib.import_module("pyarrow.parquet")
      return parquet.read_table(path / "a.parquet")["value"].to_pylist()


@pytest.fixture(params=FILES)
def file_sink(request: pytest.FixtureRequest) -> str:
  if request.param in LIBRARIES:
    pytest.importorskip(LIBRARIES[request.param][0])
  return request.param


def floats(start: int, stop: int) -> list[sinks.Record]:
  return [record("loss", np.float64(i), i) for i in range(start, stop)]


def test_a_closed_sink_goes_on_and_a_new_one_appends_when_asked(file_sink, tmp_path):
  make = FILES[file_sink]
  sink = make(tmp_path)
  sink.write(floats(0, 2))
  sink.close()
  sink.close()
  assert values_in(file_sink, tmp_path) == [0, 1]
  sink.write(floats(2, 4))
  sink.close()
  assert values_in(file_sink, tmp_path) == [0, 1, 2, 3]
  with make(tmp_path, append=True) as appending:
    appending.write(floats(4, 5))
  assert values_in(file_sink, tmp_path) == [0, 1, 2, 3, 4]
  with make(tmp_path) as new:
    new.write(floats(7, 8))
  assert values_in(file_sink, tmp_path) == [7]


def test_a_record_that_cannot_be_written_leaves_the_others_and_the_file(file_sink, tmp_path):
  sink = FILES[file_sink](tmp_path)
  bad = record("loss", np.array(["text"]), 1)
  with pytest.raises(sinks.SinkError):
    sink.write([bad])
  with pytest.raises(
    sinks.SinkError, match=rf"callgate\.sinks\.{file_sink}\(.*tap 'loss', record 1"
  ):
    sink.write([*floats(0, 1), bad, *floats(2, 3)])
  sink.write(floats(3, 4))
  sink.close()
  assert values_in(file_sink, tmp_path) == [0, 2, 3]


def test_sinks_do_not_disturb_each_other(tmp_path):
  for name, (module, _) in LIBRARIES.items():
    if name in FILES:
      pytest.importorskip(module)
  made = {name: make(tmp_path) for name, make in FILES.items()}
  for i in range(3):
    for sink in made.values():
      sink.write(floats(i, i + 1))
  for sink in made.values():
    sink.close()
  for name in made:
    assert values_in(name, tmp_path) == [0, 1, 2]


def test_a_path_that_cannot_be_opened_is_an_error_that_names_the_sink(file_sink, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises((sinks.SinkError, ValueError)) as caught:  # noqa: SIM117
    with FILES[file_sink](tmp_path / "file" / "below") as sink:
      sink.write(floats(0, 1))
  assert file_sink in str(caught.value)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_an_error_that_says_what_to_install(name, monkeypatch):
  module, extra = LIBRARIES[name]
  monkeypatch.setitem(__import__("sys").modules, module, None)
  with pytest.raises(ImportError) as caught:
    getattr(sinks, name)("target")
  assert f"callgate.sinks.{name} needs {module.partition('.')[0]}" in str(caught.value)
  assert f"pip install 'callgate[{extra}]'" in str(caught.value)


def test_a_sink_over_a_library_serves_one_channel_at_a_time(tmp_path):
  sink = sinks.CSV(tmp_path / "a.csv")
  sink.open("train")
  with pytest.raises(sinks.SinkError, match="got 'test' while 'train' has it open"):
    sink.open("test")
  sink.close()
  sink.open("test")
  sink.close()


def test_a_sink_whose_closing_fails_is_closed(tmp_path, monkeypatch):
  sink = sinks.CSV(tmp_path / "a.csv")
  sink.write(floats(0, 1))
  (table,) = sink._tables.values()
  file = table.file

  class Failing:
    def close(self) -> None:
      file.close()
      raise OSError("no space left")

  table.file = Failing()
  with pytest.raises(sinks.SinkError, match="cannot be closed properly: OSError: no space left"):
    sink.close()
  sink.close()
  assert file.closed


def test_a_sink_of_ones_own_needs_only_write():
  class Count(sinks.Sink):
    count = 0

    def write(self, records):
      self.count += len(records)

  with Count() as sink:
    sink.write(losses(3))
    sink.flush()
  assert sink.count == 3
  assert repr(sink) == "Count()"
  with pytest.raises(NotImplementedError):
    sinks.Sink().write([])


@pytest.fixture(autouse=True, scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
  _scratch.name = str(tmp_path_factory.mktemp("scratch"))


class _scratch:
  """A folder for property tests, which run many times within one function-scoped folder."""

  name = ""
