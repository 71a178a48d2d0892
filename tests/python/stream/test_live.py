# SPDX-License-Identifier: Apache-2.0
"""Streams that are still being written, killed writers, sockets, and `python -m callgate tail`.

The bytes come from `stream_bytes`, as in stream/test_reader.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stream_bytes as sb
from interpreters import FOLDER, Module, run, run_python

import callgate as cg
from callgate import __main__ as cli
from callgate import _callgate


@pytest.fixture
def losses(tmp_path: Path) -> Path:
  path = tmp_path / "losses.cgs"
  path.write_bytes(sb.losses([3.0, 2.0, 1.0]) + sb.end(3))
  return path


def seqs(where, **options) -> list[int]:
  with cg.open_stream(where, **options) as stream:
    return [record.seq for record in stream]


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
    with pytest.raises(ConnectionError, match="ended before the stream"):
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


def test_a_reader_too_many_is_a_connection_error_that_says_how_many_there_may_be(tmp_path):
  sink = cg.sinks.Stream(f"unix:{tmp_path / 'socket'}")
  most = min(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
  with ExitStack() as stack, cg.channel("crowded", to=sink):
    for _ in range(most):
      stack.enter_context(cg.open_stream(sink.address))
    late = stack.enter_context(cg.open_stream(sink.address))
    said = rf"refused the connection: there are already {most} readers, of at most {most}"
    with pytest.raises(ConnectionError, match=said):
      late.read(60)


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
  assert len(tail(capsys, losses, "-f", losses)) == 6  # paths on both sides of an option
  with pytest.raises(SystemExit):
    tail(capsys, losses, "-x", losses)


def test_tail_prints_json_that_reads_back(tmp_path, capsys):
  path = tmp_path / "json.cgs"
  leaves = [("c", "complex64", (1,)), ("h", "bfloat16", ()), ("b", "bool", (2,))]
  values = [np.complex64([1 - 2j]), np.array(0.5, ml_dtypes.bfloat16), np.array([True, False])]
  path.write_bytes(sb.session() + sb.source(0, "x", leaves, role=1) + sb.record(0, values, seq=4))
  (line,) = tail(capsys, path, "--json")
  read = json.loads(line)
  assert read["leaves"] == {"c": [[1, -2]], "h": 0.5, "b": [True, False]}
  assert (read["name"], read["seq"], read["role"]) == ("x", 4, "tangent")


STEERING = "\x1b]0;title\x07\x1b[31m \x9b2J \r\n\t\b\x00\x7f \u202e\u2028\u200b ~"


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["text", "json"])
def test_tail_prints_no_character_that_steers_a_terminal(tmp_path, capsys, json):
  path = tmp_path / "steering.cgs"
  leaves = [(f"['{STEERING}']", "float32", ())]
  path.write_bytes(
    sb.session()
    + sb.source(0, f"größe {STEERING}", leaves, description=f'"{STEERING}"', role=2)
    + sb.record(0, [np.float32(1)])
  )
  (line,) = tail(capsys, path, *json)
  assert line.isprintable()
  assert line.count("~") == 2  # the name and the path are there to their ends
  assert line.count(r"\u001b[31m" if json else r"\x1b[31m \x9b2J \r\n\t\x08\x00\x7f \u202e") == 2
  assert json or "größe" in line


def test_tail_prints_names_that_the_terminal_has_no_characters_for(tmp_path):
  path = tmp_path / "names.cgs"
  path.write_bytes(sb.losses([1.0], name="größe"))
  ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
  done = run(Module("callgate"), "tail", path, environment=ascii_only, timeout=100)
  assert (done.returncode, done.stderr) == (0, "")
  assert r"gr\xf6\xdfe" in done.stdout


def test_errors_of_commands_hold_no_character_that_steers_a_terminal(tmp_path, capsys):
  assert cli.main(["tail", str(tmp_path / f"none{STEERING}")]) == 1
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err.removesuffix("\n").isprintable()
  assert r"\x1b[31m" in captured.err


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
  done = run(Module("callgate"), "tail", tmp_path / "none.cgs", timeout=100)
  assert done.returncode == 1
  assert done.stdout == ""
  assert done.stderr.startswith("python -m callgate tail: ")
  assert "Traceback" not in done.stderr
