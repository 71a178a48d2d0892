# SPDX-License-Identifier: Apache-2.0
"""Native sinks: what Python reads back from what C++ has written or counted."""

from __future__ import annotations

import math
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sink_records import EXPECTED, TIME, C, W, grads, lines_of, losses, record

import callgate as cg
from callgate import sinks
from callgate._tap.records import leaf_paths
from callgate.sinks._base import plain


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


@given(st.lists(st.floats(width=64), min_size=1, max_size=8))
def test_jsonl_floats_round_trip(tmp_path_factory, values):
  expected = np.array(values)
  path = tmp_path_factory.getbasetemp() / "floats.jsonl"
  with sinks.JSONL(path) as sink:
    sink.write([record("x", expected)])
  got = [float(v) for v in lines_of(path)[0]["value"]]
  np.testing.assert_array_equal(got, expected)


keys = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5)


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
  with pytest.raises(ValueError, match="at least two increasing edges"):
    sinks.Stats(bins=[1, 1])
  with pytest.raises(ValueError, match="got an empty sequence"):
    sinks.Stats(bins=[])


def test_native_sinks_are_consumers_and_say_what_they_are(tmp_path):
  for sink in (sinks.JSONL(tmp_path / "a"), sinks.Npy(tmp_path / "b"), sinks.Stats()):
    assert isinstance(sink.native, cg._callgate.Consumer)
    assert type(sink).__name__ in repr(sink.native)


def test_native_sinks_refuse_what_is_no_record_of_jax():
  stats = sinks.Stats()
  with pytest.raises(sinks.SinkError, match="expected a dtype of JAX, got <U1"):
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
