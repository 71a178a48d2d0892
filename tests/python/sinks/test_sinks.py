# SPDX-License-Identifier: Apache-2.0
"""Sinks: columns, text, and what holds for all of them, on files that their libraries read back."""

from __future__ import annotations

import datetime
import importlib
import io
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sink_records import TIME, floats, lines_of, losses, record, table_of

import callgate as cg
from callgate import sinks
from callgate._process import group


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
  with pytest.raises(
    sinks.SinkError, match=r"Print\('stdout'\): tap 'loss', record 0 .*AttributeErr"
  ):
    sinks.Print(format="{value.nothing}").write(losses(1))


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


def test_a_path_may_hold_the_index_of_the_process(file_sink, tmp_path, monkeypatch):
  # Stands for process 3 of several, which process/test_group.py starts.
  monkeypatch.setattr(group.jax, "process_index", lambda: 3)
  with FILES[file_sink](tmp_path / "run-{process}") as sink:
    sink.write(floats(0, 2))
  assert values_in(file_sink, tmp_path / "run-3") == [0, 1]
  assert [one.name for one in tmp_path.iterdir()] == ["run-3"]
  assert "run-3" in repr(sink)


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
  monkeypatch.setitem(sys.modules, module, None)
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


NATIVE = {
  "JSONL": lambda folder: sinks.JSONL(folder / "a.jsonl"),
  "Npy": lambda folder: sinks.Npy(folder / "a"),
  "Stats": lambda folder: sinks.Stats(),
  "Stream": lambda folder: sinks.Stream(folder / "a.cgs"),
}


@pytest.mark.parametrize("kind", NATIVE)
def test_a_native_sink_serves_one_channel_at_a_time(kind, tmp_path):
  sink = NATIVE[kind](tmp_path)
  with cg.channel("train", to=sink) as train:
    with pytest.raises(sinks.SinkError, match="got 'test' while 'train' has it open"):
      cg.channel("test", to=sink)
    with pytest.raises(sinks.SinkError, match="got 'train' while 'train' has it open"):
      train.add(sink)
    train.remove(sink)
    with cg.channel("test", to=sink):  # it is free
      jax.jit(lambda x: cg.tap(x, "test"))(jnp.float32(1)).block_until_ready()
  with (
    pytest.raises(sinks.SinkError, match="got 'twice' while 'twice' has it open"),
    cg.channel("twice", to=[sink, sink]),
  ):
    pass
  with cg.channel("again", to=sink):
    pass


def test_a_sink_whose_closing_fails_is_closed(tmp_path, monkeypatch):
  sink = sinks.CSV(tmp_path / "a.csv")
  sink.write(floats(0, 1))
  (table,) = sink._tables.values()
  file = table._file

  class Failing:
    def close(self) -> None:
      file.close()
      raise OSError("no space left")

  table._file = Failing()
  with pytest.raises(sinks.SinkError, match="cannot be closed properly: OSError: no space left"):
    sink.close()
  sink.close()
  with sinks.CSV(tmp_path / "a.csv", append=True):  # nobody has it open
    pass


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


@pytest.mark.parametrize("make", [sinks.JSONL, sinks.CSV])
def test_an_object_that_is_no_record_is_refused(make, tmp_path):
  with make(tmp_path / "a") as sink:
    for wrong in (3, sinks.Record(1.0, None)):
      with pytest.raises(sinks.SinkError, match="expected records, each a Record"):
        sink.write([wrong])


@pytest.mark.parametrize("wrong", [{"name": 3}, {"seq": -1}, {"name": "t\udc80"}, {"lane": "x"}])
def test_the_info_of_a_record_has_its_types(wrong, tmp_path):
  fields = {"name": "t", "seq": 0, "time_ns": 0, **wrong}
  with (
    sinks.JSONL(tmp_path / "a") as sink,
    pytest.raises(sinks.SinkError, match="a TapInfo with te"),
  ):
    sink.write([sinks.Record(np.float32(1), sinks.TapInfo(**fields))])
