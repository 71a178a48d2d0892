# SPDX-License-Identifier: Apache-2.0
"""The files of a tap in a program over several devices say which part each record is of."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import callgate as cg
from callgate import sinks

# They have no wheels for some Pythons.
h5py = pytest.importorskip("h5py")
parquet = pytest.importorskip("pyarrow.parquet")
zarr = pytest.importorskip("zarr")

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
Y = np.arange(8, dtype=np.int32)


def of_json(path: Path) -> list[Any]:
  return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_parquet(path: Path) -> list[Any]:
  return parquet.read_table(path).to_pylist()


def of_group(arrays: dict[str, Any]) -> list[Any]:
  count = len(arrays["seq"])
  return [{name: array[i] for name, array in arrays.items()} for i in range(count)]


def of_zarr(path: Path) -> list[Any]:
  arrays: dict[str, Any] = {}
  group: Any = zarr.open_group(str(path), mode="r")["shards"]
  for name, member in group.members(max_depth=None):
    if hasattr(member, "shape"):
      arrays[name] = member[:]
  return of_group(arrays)


def of_hdf5(path: Path) -> list[Any]:
  arrays: dict[str, Any] = {}
  with h5py.File(path) as file:
    take = lambda name, x: arrays.update({name: x[:]}) if isinstance(x, h5py.Dataset) else None
    file["shards"].visititems(take)
  return of_group(arrays)


FILES: dict[str, tuple[Callable[[Path], sinks.Sink], Callable[[Path], list[Any]]]] = {
  "JSONL": (sinks.JSONL, of_json),
  "Parquet": (sinks.Parquet, of_parquet),
  "Zarr": (sinks.Zarr, of_zarr),
  "HDF5": (sinks.HDF5, of_hdf5),
}
CHOSEN = {"native": {}, "through Python": {"where": lambda record: record.info.seq >= 0}}


@pytest.fixture(scope="module")
def program() -> Callable[..., Any]:
  mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
  split = {
    "x": NamedSharding(mesh, jax.P("b", "a")), "y": NamedSharding(mesh, jax.P("a")),
    "s": NamedSharding(mesh, jax.P()),
  }  # fmt: skip
  lone = jax.jit(lambda x: cg.tap(x, "shards"))
  tree = jax.jit(lambda x, y: cg.tap({"x": x, "d": [y]}, "shards"))
  scalar = jax.jit(lambda x: cg.tap(jnp.sum(x), "shards", replicas="all"))

  def run(what: str, add: float) -> None:
    x = jax.device_put(X + np.float32(add), split["x"])
    if what == "lone":
      lone(x)
    elif what == "scalar":
      scalar(x)
    else:
      tree(x, jax.device_put(Y + np.int32(add), split["y"]))

  return run


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("kind", FILES)
def test_whole_arrays_come_from_the_rows(
  tmp_path: Path, program: Any, kind: str, chosen: str
) -> None:
  make, read = FILES[kind]
  for what in ("lone", "tree"):
    path = tmp_path / f"{what}.out"
    with cg.channel("shards", to=make(path, **CHOSEN[chosen])):
      for add in (0.0, 100.0):
        program(what, add)
      cg.barrier()
    rows = read(path)
    runs = sorted({int(row["run"]) for row in rows})
    assert len(runs) == 2
    assert {int(row["process"]) for row in rows} == {0}
    assert {int(row["device"]) for row in rows} == {0, 1, 2, 3}
    for run, add in zip(runs, (0, 100), strict=True):
      whole = cg.assemble(row for row in rows if row["run"] == run)
      if what == "lone":
        np.testing.assert_array_equal(whole, X + add)
      else:
        np.testing.assert_array_equal(whole["x"], X + add)
        np.testing.assert_array_equal(whole["d/0"], Y + add)
    with pytest.raises(ValueError, match=r"expected one record of each device"):
      cg.assemble(rows)
    with pytest.raises(ValueError, match=r"expected shards that cover"):
      cg.assemble(row for row in rows if row["run"] == runs[0] and row["device"])


@pytest.mark.parametrize("chosen", CHOSEN)
def test_npy_has_a_file_of_shards_beside_each(tmp_path: Path, program: Any, chosen: str) -> None:
  with cg.channel("shards", to=sinks.Npy(tmp_path / "{name}.npy", **CHOSEN[chosen])):
    program("tree", 0)
    cg.barrier()
  with cg.channel("shards", to=sinks.Npy(tmp_path / "{name}.npy", append=True, **CHOSEN[chosen])):
    program("tree", 100)
    cg.barrier()
  names = {f"shards_{leaf}{of}.npy" for leaf in ("x", "d_0") for of in ("", ".shard")}
  assert {path.name for path in tmp_path.iterdir()} == names
  for leaf, want in (("x", X), ("d_0", Y)):
    values, about = (
      np.load(tmp_path / f"shards_{leaf}.npy"),
      np.load(tmp_path / f"shards_{leaf}.shard.npy"),
    )
    rows = [
      {"value": value, **dict(zip(about.dtype.names, one, strict=True))}
      for value, one in zip(values, about, strict=True)
    ]
    first, second = sorted(set(about["run"].tolist()))
    np.testing.assert_array_equal(cg.assemble(r for r in rows if r["run"] == first), want)
    np.testing.assert_array_equal(cg.assemble(r for r in rows if r["run"] == second), want + 100)


def test_a_table_of_csv_says_run_and_shard(tmp_path: Path, program: Any) -> None:
  path = tmp_path / "s.csv"
  old = "seq,time_ns,device,lane,shards\n1,2,3,,4.0\n"
  (tmp_path / "old.csv").write_text(old)
  both = [sinks.CSV(path), sinks.CSV(tmp_path / "old.csv", append=True)]
  with cg.channel("shards", to=both):
    program("scalar", 0)
    cg.barrier()
  with path.open() as file:
    rows = list(csv.DictReader(file))
  assert {int(row["device"]) for row in rows} == {0, 1, 2, 3}
  assert {(row["process"], row["shard"], row["global_shape"]) for row in rows} == {
    ("0", "[]", "[]")
  }
  assert cg.assemble(rows) == X.sum()
  appended = (tmp_path / "old.csv").read_text()
  assert appended.startswith(old)
  assert len(appended.splitlines()) == 6


def test_programs_on_one_device_write_what_they_did(tmp_path: Path) -> None:
  names = ("JSONL", "Parquet")
  with cg.channel("alone", to=[FILES[name][0](tmp_path / name) for name in names]):
    jax.jit(lambda x: cg.tap(x, "alone"))(X)
    cg.barrier()
  for name in names:
    (row,) = FILES[name][1](tmp_path / name)
    assert not {"shard", "global_shape"} & set(row)
    np.testing.assert_array_equal(cg.assemble([row]), X)


def test_rows_of_other_files_are_refused() -> None:
  with pytest.raises(ValueError, match="expected a row of a sink's file"):
    cg.assemble([{"shard": [[0, 1]], "global_shape": [1]}])


def test_relative_paths_are_of_the_folder_where_a_sink_was_made(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  for name in ("made", "later"):
    (tmp_path / name).mkdir()
  monkeypatch.chdir(tmp_path / "made")
  to = [
    sinks.JSONL("a.jsonl"), sinks.Npy("a.npy"), sinks.CSV("a.csv"), sinks.Stream("a.cgs"),
    sinks.Parquet("a.parquet"), sinks.Zarr("a.zarr"), sinks.HDF5("a.h5"), sinks.Plot("a.png"),
  ]  # fmt: skip
  record = sinks.Record(np.float32(1), sinks.TapInfo("loss", 0, time_ns=1))
  monkeypatch.chdir(tmp_path / "later")
  for sink in to:
    with sink:
      sink.write([record])
  for sink in to[:2]:
    with sink:  # opened anew
      sink.write([record])
  assert not list((tmp_path / "later").iterdir())
  endings = {path.name for path in (tmp_path / "made").iterdir()}
  assert endings == {
    "a.jsonl", "a.npy", "a.csv", "a.cgs", "a.parquet", "a.zarr", "a.h5", "a.png"
  }  # fmt: skip
