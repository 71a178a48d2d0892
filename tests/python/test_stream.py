"""Streams as `open_stream` and `python -m callgate tail` read them.

The bytes come from `stream_bytes`, an encoder that shares nothing with callgate's own; what the
native sink writes is held to the same reader in tests/cpp.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stream_bytes as sb
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import run_python

import callgate as cg
from callgate import __main__ as cli
from callgate import _callgate

FOLDER = Path(__file__).parent


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
  with pytest.raises(ValueError, match=r"by its name: expected one of \['a', 'b'\]"):
    stream.columns()
  assert stream.columns("b")["value"] == [2]
  with pytest.raises(ValueError, match=r"no tap 'c'.*\['a', 'b'\]"):
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
  with pytest.raises(ImportError, match=r"pip install callgate\[arrow\]"):
    cg.open_stream(losses).table()


def test_a_dtype_that_arrow_lacks_is_named(tmp_path):
  pytest.importorskip("pyarrow")
  path = tmp_path / "bf16.cgs"
  one = np.array(1, ml_dtypes.bfloat16)
  path.write_bytes(sb.session() + sb.source(0, "x", [("", "bfloat16", ())]) + sb.record(0, [one]))
  with pytest.raises(ValueError, match="column 'value', bfloat16"):
    cg.open_stream(path).table()


@settings(max_examples=30, deadline=None)
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
  with pytest.raises(FileNotFoundError, match="no file matches"):
    cg.open_stream(str(tmp_path / "*.none"))
  with pytest.raises(ValueError, match="at least one"):
    cg.open_stream([])


def test_the_native_sink_appends_behind_what_a_killed_writer_left(tmp_path):
  path = tmp_path / "torn.cgs"
  torn = sb.losses([1.0]) + sb.record(0, [np.float32(2)])[:-3]
  path.write_bytes(torn)
  sink = _callgate.stream_sink(str(path))
  assert str(path) in repr(sink)
  with pytest.raises(ValueError, match="another writer"):
    _callgate.stream_sink(str(path))
  del sink
  with path.open("ab") as file:
    file.write(sb.losses([5.0], begin=7))
  assert seqs(path) == [0, 7]
  assert path.read_bytes().startswith(sb.losses([1.0]) + b"cgsS")


def test_a_writer_killed_at_any_time_leaves_its_whole_records(tmp_path):
  """The child writes without end; the parent kills it once some records are there."""
  path = tmp_path / "killed.cgs"
  writer = f"""
import sys; sys.path.insert(0, {str(FOLDER)!r})
import numpy as np, stream_bytes as sb
with open({str(path)!r}, "wb", buffering=0) as file:
  file.write(sb.session() + sb.source(0, "x", [("", "int64", (9,))]))
  for step in range(10**9):
    whole = sb.record(0, [np.full(9, step, np.int64)], seq=step)
    file.write(whole[:50])
    file.write(whole[50:])
"""
  path.touch()
  child = subprocess.Popen([sys.executable, "-c", writer])
  try:
    with cg.open_stream(path, follow=True) as stream:
      for step in range(20):
        assert stream.read(timeout=100).seq == step
      child.send_signal(signal.SIGKILL)
      assert child.wait(timeout=100) == -signal.SIGKILL
  finally:
    child.kill()
    child.wait()
  records = list(cg.open_stream(path))
  assert [r.seq for r in records] == list(range(len(records)))
  assert all((r.leaves[""] == r.seq).all() for r in records)
  assert len(records) >= 20
  _callgate.stream_sink(str(path))  # cuts what is torn, begins and ends a session
  assert seqs(path) == list(range(len(records)))


def test_following_a_file_waits_for_records_and_for_its_writer_to_close(tmp_path):
  path = tmp_path / "live.cgs"
  path.write_bytes(sb.losses([1.0]))
  got: list[int] = []
  seen = [threading.Event() for _ in range(2)]

  def follow():
    with cg.open_stream(path, follow=True) as stream:
      for record in stream:
        got.append(record.seq)
        seen[record.seq].set()

  reader = threading.Thread(target=follow)
  reader.start()
  assert seen[0].wait(100)
  late = sb.record(0, [np.float32(2)], seq=1)
  with path.open("ab", buffering=0) as file:
    file.write(late[:30])
    file.write(late[30:])
    assert seen[1].wait(100)
    file.write(sb.end(2))
  reader.join(100)
  assert not reader.is_alive()
  assert got == [0, 1]


def test_reading_without_waiting_says_that_none_is_there(tmp_path):
  path = tmp_path / "live.cgs"
  path.write_bytes(sb.losses([1.0]))
  with cg.open_stream(path, follow=True) as stream:
    assert stream.read(0).seq == 0
    assert stream.read(0) is None
    assert stream.read(0.01) is None
  with pytest.raises(ValueError, match="closed"):
    stream.read(0)


def test_closing_ends_the_wait_of_another_thread(losses):
  losses.write_bytes(sb.losses([1.0]))  # not closed by its writer
  stream = cg.open_stream(losses, follow=True)
  waits, ended = threading.Event(), []

  def follow():
    next(stream)
    waits.set()
    with pytest.raises(ValueError, match="has been closed"):
      next(stream)
    ended.append(True)

  reader = threading.Thread(target=follow)
  reader.start()
  assert waits.wait(100)
  stream.close()
  reader.join(100)
  assert ended == [True]


def test_a_process_ends_while_a_daemon_thread_waits_for_records(tmp_path):
  path = tmp_path / "live.cgs"
  path.write_bytes(sb.losses([1.0]))
  done = run_python(
    f"""
    import threading
    import callgate as cg

    stream, waits = cg.open_stream({str(path)!r}, follow=True), threading.Event()

    def follow():
      for record in stream:
        waits.set()

    threading.Thread(target=follow, daemon=True).start()
    assert waits.wait(100)

    class Last:  # goes late in the interpreter's end, which takes longer than a slice of the wait
      def __init__(self):
        import time
        self.sleep = time.sleep

      def __del__(self):
        self.sleep(0.3)

    threading.last = Last()
    """
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_several_files_are_merged_by_time(tmp_path):
  for begin in (0, 1):
    body = sb.session() + sb.source(0, "loss", sb.LOSS)
    for step in range(begin, 10, 2):
      body += sb.record(0, [np.float32(step)], seq=step, time_ns=step, device=begin)
    (tmp_path / f"process{begin}.cgs").write_bytes(body)
  for where in (str(tmp_path / "*.cgs"), sorted(tmp_path.glob("*.cgs"))):
    assert seqs(where) == list(range(10))
    assert list(cg.open_stream(where).columns()["device"]) == [0, 1] * 5


def serve(listener: socket.socket, data: bytes) -> threading.Thread:
  def run():
    connection, _ = listener.accept()
    with connection:
      for start in range(0, len(data), 7):
        connection.sendall(data[start : start + 7])

  thread = threading.Thread(target=run)
  thread.start()
  return thread


@pytest.fixture(params=["unix", "tcp"])
def listener(request, tmp_path):
  """A listening socket and its address."""
  if request.param == "unix":
    with socket.socket(socket.AF_UNIX) as listener:
      listener.bind(str(tmp_path / "s"))
      listener.listen()
      yield listener, f"unix:{tmp_path / 's'}"
  else:
    with socket.create_server(("127.0.0.1", 0)) as listener:
      yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_is_read_until_the_stream_ends(listener):
  server = serve(listener[0], sb.losses([1.0, 2.0, 3.0]) + sb.end(3))
  assert seqs(listener[1]) == [0, 1, 2]
  server.join(100)
  server = serve(listener[0], sb.losses([1.0, 2.0, 3.0]) + sb.end(3))
  with cg.open_stream(listener[1]) as stream:
    assert list(stream.columns()["value"]) == [1, 2, 3]
    assert stream.names() == ["loss"]
  server.join(100)


def test_a_connection_that_breaks_off_is_an_error_after_its_records(listener):
  server = serve(listener[0], sb.losses([1.0]) + sb.record(0, [np.float32(2)])[:40])
  with cg.open_stream(listener[1]) as stream:
    assert next(stream).seq == 0
    with pytest.raises(ConnectionError, match="ended before the stream did"):
      next(stream)
  server.join(100)


def test_the_native_sink_serves_sockets(tmp_path):
  for wanted in ("tcp://127.0.0.1:0", "tcp://:0", f"unix:{tmp_path / 'native'}"):
    sink = _callgate.stream_sink(wanted)
    address = sink.address
    assert not address.endswith(":0")
    with pytest.raises(ValueError, match=address):
      _callgate.stream_sink(address)
    with cg.open_stream(address) as stream:
      assert stream.read(0.01) is None
      first = stream._inputs[0].native
      while first.process == 0:  # the server has taken this reader in
        assert stream.read(0.05) is None
      assert first.process == os.getpid()
      del sink
      assert list(stream) == []
    with pytest.raises(ValueError, match="connecting"):
      cg.open_stream(address)


def tail(capsys, *arguments: str) -> list[str]:
  assert cli.main(["tail", *map(str, arguments)]) == 0
  return capsys.readouterr().out.splitlines()


def test_tail_prints_the_last_records(losses, capsys):
  lines = tail(capsys, losses, "-n", "2")
  assert len(lines) == 2
  assert "device 0 loss #1 2." in lines[0]
  assert "device 0 loss #2 1." in lines[1]
  assert tail(capsys, losses, "-n", "0") == []
  assert tail(capsys, losses, "--name", "other") == []
  assert len(tail(capsys, losses, "--follow")) == 3


def test_tail_prints_json_that_reads_back(tmp_path, capsys):
  path = tmp_path / "json.cgs"
  leaves = [("c", "complex64", (1,)), ("h", "bfloat16", ()), ("b", "bool", (2,))]
  values = [np.complex64([1 - 2j]), np.array(0.5, ml_dtypes.bfloat16), np.array([True, False])]
  path.write_bytes(sb.session() + sb.source(0, "x", leaves, role=1) + sb.record(0, values, seq=4))
  (line,) = tail(capsys, path, "--json")
  read = json.loads(line)
  assert read["leaves"] == {"c": [[1, -2]], "h": 0.5, "b": [True, False]}
  assert (read["name"], read["seq"], read["role"]) == ("x", 4, "tangent")


def test_tail_sums_large_arrays_up(tmp_path, capsys):
  path = tmp_path / "large.cgs"
  values = np.arange(100, dtype=np.float32).reshape(10, 10)
  body = sb.session() + sb.source(0, "w", [("['w']", "float32", (10, 10))], lanes="10:1")
  path.write_bytes(body + sb.record(0, [values], flags=1))
  assert len(tail(capsys, path, "-n", "100")) == 10
  (line,) = tail(capsys, path, "-n", "1")
  assert "w[9] #0 (repeated) ['w']=float32[10] min 90 mean 94.5 max 99" in line


def test_tail_reads_connections_to_their_end(listener, capsys):
  server = serve(listener[0], sb.losses([1.0, 2.0]) + sb.end(2))
  assert len(tail(capsys, listener[1], "-n", "1")) == 2
  server.join(100)


def test_tail_reports_errors_without_a_traceback(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "callgate", "tail", str(tmp_path / "none.cgs")],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert done.returncode == 1
  assert done.stdout == ""
  assert done.stderr.startswith("python -m callgate tail: ")
  assert "Traceback" not in done.stderr
