# SPDX-License-Identifier: Apache-2.0
"""Streams as `open_stream` reads them.

The bytes come from `stream_bytes`, an encoder that shares nothing with callgate's own; what the
native sink writes is held to the same reader in tests/cpp.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stream_bytes as sb
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

import callgate as cg
from callgate.__main__ import main


@pytest.fixture
def losses(tmp_path: Path) -> Path:
  path = tmp_path / "losses.cgs"
  path.write_bytes(sb.losses([3.0, 2.0, 1.0]) + sb.end(3))
  return path


def seqs(where, **options) -> list[int]:
  with cg.open_stream(where, **options) as stream:
    return [record.seq for record in stream]


def test_a_record_has_every_field_that_was_written(tmp_path):
  path = tmp_path / "all.cgs"
  w, b = np.arange(6, dtype=np.int16).reshape(2, 3), np.array([1 + 2j], np.complex64)
  path.write_bytes(
    sb.session()
    + sb.source(0, "grad", [("['w']", "int16", (2, 3)), ("['b']", "complex64", (1,))], role=2,
                description='{"transforms": ["jvp", "transpose"]}')
    + sb.record(0, [w, b], seq=2**40, time_ns=-5, run=77, device=3, flags=1)
  )  # fmt: skip
  with cg.open_stream(path) as stream:
    (record,) = stream
  assert (record.name, record.seq, record.time_ns) == ("grad", 2**40, -5)
  assert (record.device, record.run, record.lane) == (3, 77, 0)
  assert (record.role, record.repeated) == ("cotangent", True)
  assert record.description == {"transforms": ["jvp", "transpose"]}
  np.testing.assert_array_equal(record.leaves["['w']"], w)
  np.testing.assert_array_equal(record.leaves["['b']"], b)
  with pytest.raises(AttributeError):
    record.seq = 1


@pytest.mark.parametrize("dtype", [d for d, (_, bits) in sb.CODES.items() if bits >= 8])
def test_every_dtype_comes_back_as_it_was(tmp_path, dtype):
  want = np.array([0, 1, 1, 0, 1], dtype=getattr(ml_dtypes, dtype, None) or dtype)
  path = tmp_path / "dtype.cgs"
  path.write_bytes(sb.session() + sb.source(0, "x", [("", dtype, (5,))]) + sb.record(0, [want]))
  (record,) = cg.open_stream(path)
  assert record.leaves[""].dtype == want.dtype
  np.testing.assert_array_equal(record.leaves[""], want)


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("uint4", 4), ("int2", 2)])
def test_packed_dtypes_are_unpacked(tmp_path, dtype, bits):
  lowest = 0 if dtype.startswith("u") else -(2 ** (bits - 1))
  want = np.array([lowest, 0, 1, lowest + 2**bits - 1, 1], np.int8).reshape(1, 5)
  number = sum((int(v) & (2**bits - 1)) << (bits * i) for i, v in enumerate(want.flat))
  stored = number.to_bytes((5 * bits + 7) // 8, "little")
  path = tmp_path / "packed.cgs"
  path.write_bytes(sb.session() + sb.source(0, "x", [("", dtype, (1, 5))]) + sb.record(0, [stored]))
  (record,) = cg.open_stream(path)
  assert record.leaves[""].dtype == getattr(ml_dtypes, dtype)
  np.testing.assert_array_equal(record.leaves[""].astype(np.int8), want)


def test_lanes_are_split_and_those_not_sent_are_left_out(tmp_path):
  # Two levels, 2 by 3: `x` has both, `y` the inner one alone, `where` both.
  x = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
  y = np.arange(3, dtype=np.int32)
  where = np.array([[1, 0, 1], [0, 1, 1]], bool)
  leaves = [("x", "float32", (2, 3, 4)), ("y", "int32", (3,)), ("", "bool", (2, 3))]
  path = tmp_path / "lanes.cgs"
  path.write_bytes(
    sb.session()
    + sb.source(0, "v", leaves, lanes="2:101;3:111", has_where=True)
    + sb.record(0, [x, y, where])
  )
  records = list(cg.open_stream(path))
  expected = [(i, j) for i, j in itertools.product(range(2), range(3)) if where[i, j]]
  assert [r.lane for r in records] == [3 * i + j for i, j in expected]
  for record, (i, j) in zip(records, expected, strict=True):
    np.testing.assert_array_equal(record.leaves["x"], x[i, j])
    np.testing.assert_array_equal(record.leaves["y"], y[j])
    assert record.leaves["y"].shape == ()


def test_columns_are_what_iterating_gives(losses):
  with cg.open_stream(losses) as stream:
    next(stream)
    columns = stream.columns()
    assert stream.columns("loss").keys() == columns.keys()
    assert [record.seq for record in stream] == [1, 2]  # the iteration stands where it stood
  np.testing.assert_array_equal(columns["value"], np.float32([3, 2, 1]))
  np.testing.assert_array_equal(columns["seq"], [0, 1, 2])
  np.testing.assert_array_equal(columns["time_ns"], [0, 1000, 2000])
  assert columns["device"].dtype == np.int32
  assert list(columns["lane"]) == [0, 0, 0]


def test_columns_of_several_taps_ask_for_a_name(tmp_path):
  path = tmp_path / "two.cgs"
  body = sb.session() + sb.source(0, "a", sb.LOSS) + sb.source(1, "b", sb.LOSS)
  path.write_bytes(body + sb.record(0, [np.float32(1)]) + sb.record(1, [np.float32(2)], seq=1))
  stream = cg.open_stream(path)
  assert stream.names() == ["a", "b"]
  with pytest.raises(ValueError, match=r"expected one tap; pass one of \['a', 'b'\]"):
    stream.columns()
  assert stream.columns("b")["value"] == [2]
  with pytest.raises(ValueError, match=r"tap 'c' is not in .*\['a', 'b'\]"):
    stream.columns("c")


def test_columns_of_differing_shapes_say_which(tmp_path):
  path = tmp_path / "shapes.cgs"
  path.write_bytes(
    sb.session()
    + sb.source(0, "x", [("g", "float32", (2,))])
    + sb.source(1, "x", [("g", "float32", (3,))])
    + sb.record(0, [np.zeros(2, np.float32)])
    + sb.record(1, [np.zeros(3, np.float32)])
  )
  with pytest.raises(ValueError, match=r"leaf 'g' of tap 'x'.*float32\[2\], float32\[3\]"):
    cg.open_stream(path).columns()


def test_a_table_is_what_arrow_has_of_the_columns(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  path = tmp_path / "table.cgs"
  values = np.arange(12, dtype=np.float64).reshape(2, 2, 3)
  leaves = [("m", "float64", (2, 3)), ("none", "int32", (0,))]
  body = sb.session() + sb.source(0, "m", leaves)
  for seq, value in enumerate(values):
    body += sb.record(0, [value, np.zeros(0, np.int32)], seq=seq)
  path.write_bytes(body)
  table = cg.open_stream(path).table("m")
  assert isinstance(table, pyarrow.Table)
  assert table.column("m").to_pylist() == values.tolist()
  assert table.column("none").to_pylist() == [[], []]
  assert table.column("seq").to_pylist() == [0, 1]


def test_a_table_without_pyarrow_says_what_to_install(losses, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ImportError, match=r"pip install 'callgate\[arrow\]'"):
    cg.open_stream(losses).table()


def test_a_dtype_that_arrow_lacks_is_named(tmp_path):
  pytest.importorskip("pyarrow")
  path = tmp_path / "bf16.cgs"
  one = np.array(1, ml_dtypes.bfloat16)
  path.write_bytes(sb.session() + sb.source(0, "x", [("", "bfloat16", ())]) + sb.record(0, [one]))
  with pytest.raises(ValueError, match="column 'value', bfloat16"):
    cg.open_stream(path).table()


@examples(10)
@given(
  st.lists(
    st.tuples(
      st.sampled_from([d for d, (_, bits) in sb.CODES.items() if bits >= 8]),
      st.lists(st.integers(0, 3), max_size=4).map(tuple),
      st.text(max_size=5),
    ),
    unique_by=lambda leaf: leaf[2],
    max_size=5,
  ),
  st.text(max_size=20),
  st.integers(0, 2**64 - 1),
)
def test_any_pytree_comes_back(tmp_path_factory, leaves, name, seq):
  random = np.random.default_rng(seq)
  arrays = [
    random.integers(0, 2, dims).astype(getattr(ml_dtypes, dtype, None) or dtype)
    for dtype, dims, _ in leaves
  ]
  path = tmp_path_factory.mktemp("any") / "any.cgs"
  path.write_bytes(
    sb.session()
    + sb.source(0, name, [(text, dtype, dims) for dtype, dims, text in leaves])
    + sb.record(0, arrays, seq=seq)
  )
  (record,) = cg.open_stream(path)
  assert (record.name, record.seq) == (name, seq)
  assert list(record.leaves) == [text for _, _, text in leaves]
  for got, want in zip(record.leaves.values(), arrays, strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_a_file_cut_at_any_byte_gives_its_whole_records(tmp_path):
  whole = sb.losses([1.0, 2.0])
  record_bytes = len(sb.record(0, [np.float32(0)]))
  path = tmp_path / "cut.cgs"
  for cut in range(len(whole) + 1):
    path.write_bytes(whole[:cut])
    kept = max(0, 2 - -(-(len(whole) - cut) // record_bytes))
    assert seqs(path) == list(range(kept)), cut


@pytest.mark.parametrize("dims", [(0, 2**62), (2**62, 0, 2**62), (1,) * 65, (-1,), (2**40,) * 2])
def test_dims_that_no_array_has_are_refused(dims, tmp_path):
  path = tmp_path / "dims.cgs"
  body = sb.session() + sb.source(0, "x", [("", "float32", dims)]) + sb.record(0, [b""])
  path.write_bytes(body)
  with cg.open_stream(path) as stream, pytest.raises(ValueError, match=r"at byte .* a leaf with "):
    list(stream)


@pytest.mark.parametrize("timeout", ["1", -1, math.nan])
def test_a_wait_that_is_no_time_is_refused(timeout, losses):
  with cg.open_stream(losses) as stream, pytest.raises(TypeError, match="timeout: expected 0"):
    stream.read(timeout)


def test_every_damaged_byte_is_found_and_its_place_said(tmp_path):
  whole = sb.losses([1.0, 2.0]) + sb.end()
  path = tmp_path / "damaged.cgs"
  for at in range(len(whole)):
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"damaged\.cgs': at byte (\d+): ") as caught:
      seqs(path)
    offset = int(str(caught.value).split("at byte ")[1].split(":")[0])
    assert offset <= at


def test_a_newer_version_and_what_is_no_stream_are_refused(tmp_path):
  path = tmp_path / "new.cgs"
  path.write_bytes(sb.session(version=2))
  with pytest.raises(ValueError, match="version 2"):
    seqs(path)
  path.write_bytes(b"a diary, and no stream at all")
  with pytest.raises(ValueError, match="not a stream"):
    seqs(path)
  with pytest.raises(FileNotFoundError, match=r"none\.cgs"):
    cg.open_stream(tmp_path / "none.cgs")
  with pytest.raises(FileNotFoundError, match="matches no file"):
    cg.open_stream(str(tmp_path / "*.none"))
  with pytest.raises(ValueError, match="at least one"):
    cg.open_stream([])


def test_several_files_are_merged_by_time(tmp_path):
  for begin in (0, 1):
    body = sb.session() + sb.source(0, "loss", sb.LOSS)
    for step in range(begin, 10, 2):
      body += sb.record(0, [np.float32(step)], seq=step, time_ns=step, device=begin)
    (tmp_path / f"process{begin}.cgs").write_bytes(body)
  for where in (str(tmp_path / "*.cgs"), sorted(tmp_path.glob("*.cgs"))):
    assert seqs(where) == list(range(10))
    assert list(cg.open_stream(where).columns()["device"]) == [0, 1] * 5


def write_processes(folder, schedule):
  """A file for each process, with records at the times of its schedule, in that order."""
  for index, times in schedule.items():
    body = sb.session(index=index) + sb.source(0, "loss", sb.LOSS)
    for seq, time in enumerate(times):
      body += sb.record(0, [np.float32(time)], seq=seq, time_ns=time, device=10 * index)
    (folder / f"run-{index}.cgs").write_bytes(body + sb.end(len(times)))


def test_each_record_knows_its_process_and_old_streams_have_process_0(tmp_path, losses):
  write_processes(tmp_path, {0: [5], 7: [3]})
  records = list(cg.open_stream(str(tmp_path / "run-*.cgs")))
  assert [(r.process, r.device, r.time_ns) for r in records] == [(7, 70, 3), (0, 0, 5)]
  columns = cg.open_stream(str(tmp_path / "run-*.cgs")).columns("loss")
  assert columns["process"].tolist() == [7, 0]
  assert columns["process"].dtype == np.int32
  assert {r.process for r in cg.open_stream(losses)} == {0}


def test_a_file_that_two_processes_wrote_in_turn_tells_them_apart(tmp_path):
  write_processes(tmp_path, {1: [1, 2], 2: [3]})
  both = tmp_path / "both.cgs"
  both.write_bytes(b"".join((tmp_path / f"run-{i}.cgs").read_bytes() for i in (1, 2)))
  assert [r.process for r in cg.open_stream(both)] == [1, 1, 2]


def test_the_writer_s_name_with_its_placeholder_opens_all_files(tmp_path):
  folder = tmp_path / "odd [x]"
  folder.mkdir()
  write_processes(folder, {0: [0, 2], 1: [1], 10: [3]})
  (folder / "run-all.cgs").write_bytes(b"no number, so not one of them")
  records = list(cg.open_stream(str(folder / "run-{process}.cgs")))
  assert [r.process for r in records] == [0, 1, 0, 10]
  with pytest.raises(FileNotFoundError, match="matches no file"):
    cg.open_stream(str(folder / "other-{process}.cgs"))


@examples(14)
@given(st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 6), max_size=6), min_size=1))
def test_merged_streams_are_in_order_of_time_and_then_of_process(tmp_path_factory, schedule):
  folder = tmp_path_factory.mktemp("merge")
  schedule = {index: sorted(times) for index, times in schedule.items()}
  write_processes(folder, schedule)
  found = [(r.time_ns, r.process, r.seq) for r in cg.open_stream(str(folder / "run-*.cgs"))]
  assert found == sorted((t, i, n) for i, times in schedule.items() for n, t in enumerate(times))


def test_a_clock_that_steps_back_does_not_reorder_the_records_of_a_device(tmp_path):
  write_processes(tmp_path, {0: [5, 1, 6], 1: [2, 7]})
  found = [(r.process, r.seq) for r in cg.open_stream(str(tmp_path / "run-*.cgs"))]
  assert found == [(1, 0), (0, 0), (0, 1), (0, 2), (1, 1)]


@pytest.mark.parametrize("arguments", [[], ["-n", "2"], ["-f"], ["--json"]])
def test_tail_shows_what_comes_before_a_damaged_place(tmp_path, capsys, arguments):
  path = tmp_path / "damaged.cgs"
  data = bytearray(sb.losses([1.0, 2.0, 3.0]) + sb.end(3))
  good = len(sb.losses([1.0, 2.0, 3.0]))
  data[good - 6] ^= 1  # in the third record
  path.write_bytes(bytes(data))
  assert main(["tail", *arguments, str(path)]) != 0
  shown = capsys.readouterr()
  assert len([line for line in shown.out.splitlines() if "loss" in line]) == 2
  assert "damaged.cgs" in shown.err


def test_tail_shows_the_process_of_each_record_but_of_process_0(tmp_path, capsys):
  write_processes(tmp_path, {0: [1], 2: [0]})
  assert main(["tail", str(tmp_path / "run-*.cgs")]) == 0
  second, first = capsys.readouterr().out.splitlines()
  assert " process 2 device 20 loss #0 " in second
  assert " device 0 loss #0 " in first
  assert "process" not in first


# Lanes that cost a reader time and memory, in files that hold none of their values.
MANY_LANES = {
  "no leaf has them": ("1000000000:0", [("x", "float32", ())]),
  "the leaf is empty": ("1000000000:1", [("x", "float32", (1_000_000_000, 0))]),
  "levels multiply": (
    ";".join(f"1000:{'0' * i}1{'0' * (5 - i)}" for i in range(6)),
    [(f"x{i}", "int8", (1000,)) for i in range(6)],
  ),
}


@pytest.mark.parametrize(("lanes", "leaves"), MANY_LANES.values(), ids=MANY_LANES)
def test_more_lanes_than_values_are_refused(tmp_path, lanes, leaves):
  path = tmp_path / "lanes.cgs"
  arrays = [np.zeros(dims, dtype) for _, dtype, dims in leaves]
  path.write_bytes(sb.session() + sb.source(0, "t", leaves, lanes=lanes) + sb.record(0, arrays))
  with pytest.raises(ValueError, match="lanes"):
    list(cg.open_stream(path))


@pytest.mark.parametrize(
  "shards",
  ["[1]", '{"lanes": [[0]], "leaves": 5}', '{"leaves": [{"shape": [4], "counts": [0]}]}', "1" * 5],
)
def test_a_description_that_no_tap_makes_is_a_clear_error(tmp_path, shards):
  path = tmp_path / "shards.cgs"
  described = f'{{"shards": {shards}}}'
  leaves = [("x", "float32", (2,))]
  path.write_bytes(
    sb.session()
    + sb.source(0, "t", leaves, description=described)
    + sb.record(0, [np.zeros(2, np.float32)], flags=3 << 8)
  )
  with pytest.raises(ValueError, match="tap 't': expected its shards"):
    list(cg.open_stream(path))


def test_a_folder_is_refused_with_the_pattern_of_its_streams(tmp_path):
  with pytest.raises(IsADirectoryError, match=r"got the folder.*\*\.cgs"):
    cg.open_stream(tmp_path)
