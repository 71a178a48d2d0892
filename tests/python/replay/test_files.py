# SPDX-License-Identifier: Apache-2.0
"""Calls that differ, exceptions, files that are damaged, and options."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import run_python, succeed

import callgate as cg
from callgate import _callgate
from callgate._core.dtypes import value_of
from callgate._replay import raised


def failing_with(error: str | None, program: Any, *args: Any, kind: Any = cg.ReplayError) -> None:
  with pytest.raises(kind, match=error), cg.errors():
    jax.block_until_ready(program(*args))


@pytest.fixture
def path(tmp_path: Path) -> Path:
  return tmp_path / "calls.cgr"


@cg.gate(out=lambda x, y: x, effect="io", name="replay.add")
def add(x: Any, y: Any) -> Any:
  return x + y


program = jax.jit(lambda x: add(x, 2.0))


@pytest.mark.parametrize("operands", ["arrays", "digest"])
def test_a_call_that_differs_shows_where(path: Path, operands: Any) -> None:
  x = jnp.arange(6.0).reshape(2, 3)
  with cg.record(path, operands=operands):
    program(x).block_until_ready()
  shown = (
    r"argument 'x': expected float32\[2,3\] with 5.0 at \[1, 2\], got 7.0 \(1 of 6 elements"
    if operands == "arrays"
    else r"argument 'x': expected float32\[2,3\] with digest [0-9a-f]{32}, got one with digest"
  )
  with cg.replay(path):
    failing_with(rf"calls.cgr': gate 'replay.add', called at File .* line \d+.*{shown}",
                 program, x.at[1, 2].set(7.0))  # fmt: skip
    failing_with(r"argument 'x': expected float32\[2,3\], got float32\[2\]", program, x[0, :2])
    np.testing.assert_array_equal(program(x), x + 2)
    failing_with("expected only the 1 recorded calls, got one more", program, x)
  other = cg.gate(lambda x: x, out=lambda x: x, name=f"replay.other.{operands}")
  with cg.replay(path):
    failing_with("expected a gate of the recording", jax.jit(other), x)
  with cg.replay(path, partial=True) as replay:
    assert program(x)[0, 0] == 2
    assert program(x + 1)[0, 0] == 3
    assert jax.jit(other)(x)[0, 1] == 1
  assert (replay.answered, replay.called, replay.left) == (1, 2, 0)


def test_operands_within_a_tolerance(path: Path) -> None:
  x = jnp.array([1.0, 2.0, jnp.nan])
  with cg.record(path):
    program(x).block_until_ready()
  with cg.replay(path, rtol=1e-3):
    assert program(x * 1.0001)[0] == 3
  with cg.replay(path, atol=1e-3):
    failing_with("differs from call 0", program, x + 1)


def test_ordered_calls_keep_their_order(path: Path) -> None:
  ordered = cg.gate(lambda x: x + 1, out=lambda x: x, effect="ordered", name="replay.ordered")
  io = cg.gate(lambda x: x + 1, out=lambda x: x, effect="io", name="replay.io")
  ordered_of, io_of = jax.jit(ordered), jax.jit(io)
  with cg.record(path):
    for x in (1.0, 2.0):
      jax.block_until_ready([ordered_of(x), io_of(x)])
  with cg.replay(path) as replay:
    assert [io_of(2.0), io_of(1.0)] == [3, 2]
    failing_with("argument 'x': expected float32.* with 1.0, got 2.0", ordered_of, 2.0)
    assert [ordered_of(1.0), ordered_of(2.0)] == [2, 3]
  assert replay.left == 0


class Odd(Exception):
  def __init__(self, code: int, text: str) -> None:
    super().__init__(code, text)


def test_exceptions_are_raised_again(path: Path, engine: str) -> None:
  errors = [
    KeyError("no such key"), OSError(2, "no such file"), cg.EndOfFeed("at an end"),
    np.linalg.LinAlgError("singular"), Odd(3, "strange"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), FileNotFoundError(2, "none here", "a.txt"),
    KeyError(("a", 1)), ValueError(1.5, None, b"b", [1, (2j,)]), ImportError("gone", name="gone"),
    ExceptionGroup("two", [ValueError(1), OSError(2, "none here", "b")]),
  ]  # fmt: skip
  errors[0].add_note("a note")

  @cg.gate(out=lambda i: i, effect="io", name=f"replay.fail.{engine}")
  def fail(i: Any) -> Any:
    raise errors[int(i)]

  run = jax.jit(fail)
  with cg.record(path) as recording:
    for i, error in enumerate(errors):
      failing_with(None, run, i, kind=type(error))
  assert recording.count == len(errors)
  with cg.replay(path):
    failing_with("no such key", run, 0, kind=KeyError)
    assert "a note" in cg.last_error().__notes__  # pyright: ignore[reportOptionalMemberAccess]
    failing_with("no such file", run, 1, kind=FileNotFoundError)
    failing_with("at an end", run, 2, kind=cg.EndOfFeed)
    for i, kind in ((3, "numpy.linalg.LinAlgError"), (4, f"{__name__}.Odd")):
      failing_with(f"{kind}: ", run, i, kind=cg.RecordedError)
      error: Any = cg.last_error()
      assert (error.kind, error.message) == (kind, str(errors[i]))
    for i, known in list(enumerate(errors))[5:]:
      failing_with(".", run, i, kind=type(known))
      error = cg.last_error()
      assert (repr(error), vars(error) | {"__notes__": None}) == (
        repr(known), vars(known) | {"__notes__": None}
      )  # fmt: skip
      assert getattr(error, "filename", None) == getattr(known, "filename", None)
      assert getattr(error, "name", None) == getattr(known, "name", None)
  with cg.replay(path, trust=True):
    failing_with("singular", run, 3, kind=np.linalg.LinAlgError)
    failing_with("strange", run, 4, kind=Odd)


class Bomb:
  """An object that a hostile file would hold instead of an exception."""

  def __reduce__(self) -> Any:
    return exec, ("raise SystemExit('unpickled')",)


def test_nothing_is_unpickled_from_a_file_without_the_users_word(
  path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  fail = cg.gate(lambda x: 1 / 0, out=lambda x: x, effect="io", name="replay.bomb")
  monkeypatch.setattr(raised, "pickle_of", lambda _: pickle.dumps(Bomb()))
  with cg.record(path):
    failing_with(None, jax.jit(fail), 1.0, kind=ZeroDivisionError)
  assert b"unpickled" in path.read_bytes()
  with cg.replay(path):
    failing_with("division by zero", jax.jit(fail), 1.0, kind=ZeroDivisionError)


# -- files -----------------------------------------------------------------------------------------
def test_a_killed_process_leaves_its_whole_calls(path: Path) -> None:
  code = f"""
    import os, signal
    import jax, numpy as np
    import callgate as cg

    gate = cg.gate(lambda x: x + 1, out=lambda x: x, effect="io", name="replay.killed")
    run = jax.jit(gate)
    with cg.record({str(path)!r}):
      for i in range(5):
        run(np.float32(i)).block_until_ready()
      print("killed", flush=True)
      os.kill(os.getpid(), signal.SIGKILL)
  """
  done = run_python(code)
  assert (done.returncode, done.stdout.strip()) == (-9, "killed"), done.stderr
  whole = path.read_bytes()
  gate = cg.gate(lambda x: x + 1, out=lambda x: x, effect="io", name="replay.killed")
  run = jax.jit(gate)
  for cut in (0, 1, 30):
    path.write_bytes(whole[: len(whole) - cut])
    with cg.replay(path) as replay:
      left = 5 - (cut > 0)
      assert replay.left == left
      assert [float(run(np.float32(i))) for i in range(left)] == [1, 2, 3, 4, 5][:left]
      if cut:
        failing_with("expected only the 4", run, np.float32(4))


def test_files_that_are_no_recordings_are_refused_at_once(path: Path, tmp_path: Path) -> None:
  with cg.record(path):
    program(jnp.ones(3)).block_until_ready()
  whole = bytearray(path.read_bytes())
  damaged = tmp_path / "damaged.cgr"
  whole[len(whole) // 2] ^= 1
  damaged.write_bytes(whole)
  text = tmp_path / "text.cgr"
  text.write_text("no stream at all, but a text of some length")
  stream = tmp_path / "taps.cgs"
  with cg.channel("replay.tap", to=cg.sinks.Stream(stream)):
    jax.jit(lambda x: cg.tap(x, "replay.tap"))(1.0)
  later, short = tmp_path / "later.cgr", tmp_path / "short.cgr"
  short.write_text("hi")
  (tmp_path / "empty.cgr").touch()
  cases = {
    short: "expected a recording, got a file of 2 bytes", tmp_path / "empty.cgr": "of 0 bytes",
    damaged: "damaged frame", text: "not a stream of callgate",
    stream: "expected a recording, got a stream with records of tap 'replay.tap'",
    tmp_path / "none.cgr": "got the missing file",
  }  # fmt: skip
  _write(later, {"callgate_recording": 2}, {"at": np.zeros(2, np.int64)})
  cases[later] = "expected version 1 of a recording, got 2"
  about = {"callgate_recording": 1, "site": "", "effect": "io", "operands": [["x", 99, [1]]]}
  for number, (held, leaves) in enumerate([
    ({**about, "digests": False}, {"at": np.zeros(2, np.int64)}),
    ({**about, "operands": [], "digests": False}, {"at": np.zeros(3, np.int64)}),
    ({**about, "operands": 3, "digests": False}, {"at": np.zeros(2, np.int64)}),
    ({"callgate_recording": 1}, {}),
  ]):  # fmt: skip
    hostile = tmp_path / f"hostile{number}.cgr"
    _write(hostile, held, leaves)
    cases[hostile] = "expected a call that callgate.record wrote"
  for file, said in cases.items():
    kind = FileNotFoundError if "missing file" in said else cg.ReplayError
    with pytest.raises(kind, match=said), cg.replay(file):
      raise AssertionError("entered")
  with cg.replay(path) as replay:  # nothing of these is left open
    assert replay.left == 1


def _write(path: Path, description: Any, leaves: Any) -> None:
  writer = _callgate.RecordWriter(_callgate.stream_sink(str(path)))
  given = [(name, *value_of(array)) for name, array in leaves.items()]
  writer.write(
    name="x", role=0, leaves=[(n, c, list(s), d) for n, c, s, d in given],
    description=json.dumps(description), seq=0, time_ns=0, run=0, device=0, repeated=False,
    lane=[],
  )  # fmt: skip
  writer.close()


def test_a_full_disk_fails_the_program_and_the_block(path: Path) -> None:
  x = jnp.zeros(2000)
  program(x).block_until_ready()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

  def run(recording: Any) -> None:
    with recording:
      program(x).block_until_ready()
      resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, limits[1]))
      try:
        failing_with("was not recorded", program, x + 1, kind=cg.GateError)
      finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
      assert recording.count == 1
      program(x + 2).block_until_ready()

  recording = cg.record(path)
  with pytest.raises(cg.GateError, match=r"call 1 of 'replay.add' was not recorded"):
    run(recording)
  assert recording.count == 2
  with cg.replay(path) as replay:
    assert (program(x + 2)[0], program(x)[0], replay.left) == (4, 2, 0)


def test_a_recording_replaces_nothing_but_recordings(path: Path, tmp_path: Path) -> None:
  with cg.record(path):
    program(jnp.ones(2)).block_until_ready()
  with pytest.raises(FileExistsError, match="overwrite=True to replace"), cg.record(path):
    pass
  with cg.record(path, overwrite=True) as recording:
    pass
  assert recording.count == 0
  with cg.replay(path) as replay:
    assert replay.left == 0
  other = tmp_path / "diary.txt"
  other.write_text("mine")
  with pytest.raises(FileExistsError, match="another file"), cg.record(other, overwrite=True):
    pass
  assert other.read_text() == "mine"
  stream = tmp_path / "run.cgs"
  with cg.channel("replay.taps", to=cg.sinks.Stream(stream)):
    jax.jit(lambda x: cg.tap(x, "replay.taps"))(1.0)
    cg.barrier()
  size = stream.stat().st_size
  with pytest.raises(FileExistsError, match="another file"), cg.record(stream, overwrite=True):
    pass
  assert stream.stat().st_size == size


def test_a_recording_that_is_being_written_is_not_replaced(path: Path) -> None:
  code = """
    import sys
    import callgate as cg
    try:
      with cg.record(sys.argv[1], overwrite=True):
        print("open")
    except FileExistsError as error:
      print(error)
  """
  with cg.record(path) as recording:
    said = succeed(code, str(path))
    assert "a file without another writer" in said
    assert f"process {os.getpid()}" in said
    program(jnp.ones(2)).block_until_ready()
  assert recording.count > 0
  with cg.replay(path) as replay:
    assert replay.left == recording.count
  assert succeed(code, str(path)) == "open\n"


def test_a_started_call_is_one_call(path: Path) -> None:
  gate = cg.gate(lambda x: 2 * x, out=lambda x: x, name="replay.once")
  start = jax.jit(lambda x: gate.start(x).result() + 1)
  with cg.record(path) as recording:
    for i in range(3):
      start(np.float32(i)).block_until_ready()
  assert recording.count == 3
  with cg.replay(path) as replay:
    assert replay.left == 3
    assert start(np.float32(2)) == 5
    assert (replay.left, replay.answered, replay.called) == (2, 1, 0)


def test_one_block_at_a_time(path: Path, tmp_path: Path) -> None:
  with cg.record(path):
    with pytest.raises(cg.GateError, match=r"replay: .*callgate.record\('.*calls.cgr'\)"):
      cg.replay(path).__enter__()
    program(jnp.ones(2)).block_until_ready()
  with cg.replay(path) as replay:
    with pytest.raises(cg.GateError, match=r"record: expected no other .* callgate.replay"):
      cg.record(tmp_path / "other.cgr").__enter__()
    program(jnp.ones(2)).block_until_ready()
  with pytest.raises(cg.GateError, match="a block can be entered once"):
    replay.__enter__()
  assert not (tmp_path / "other.cgr").exists()


def test_a_recording_is_a_stream(path: Path) -> None:
  with cg.record(path):
    jax.block_until_ready(jax.jit(jax.vmap(add, (0, None)))(jnp.arange(2.0), 5.0))
  with cg.open_stream(path) as stream:
    records = list(stream)
  assert [record.name for record in records] == ["replay.add"] * 2
  assert [float(record.leaves["results[0]"]) for record in records] == [5, 6]
  assert [record.leaves["at"].tolist() for record in records] == [[0, -1], [1, -1]]


def test_results_that_the_gate_no_longer_declares_are_refused(path: Path) -> None:
  make = lambda dtype: cg.gate(
    lambda x: np.zeros(2, dtype), out=jax.ShapeDtypeStruct((2,), dtype), name="replay.types"
  )
  with cg.record(path):
    jax.block_until_ready(jax.jit(make(np.float32))(1.0))
  with cg.replay(path):
    failing_with(
      r"expected results of the gate's declared types, \(int32\[2\]\), got \(float32\[2\]\)",
      jax.jit(make(np.int32)), 1.0,
    )  # fmt: skip


def test_programs_that_still_run_at_the_end_are_waited_for(path: Path) -> None:
  go, begun = threading.Event(), threading.Event()

  def wait(x: Any) -> Any:
    begun.set()
    go.wait()
    return x

  late = cg.gate(wait, out=lambda x: x, effect="io", thread="own", name="replay.late")
  run = jax.jit(lambda x: late((x @ x)[0, 0]))  # too long to run inline
  with cg.record(path) as recording:
    result = run(jnp.ones((600, 600)))
    assert begun.wait(60)
    threading.Timer(0.05, go.set).start()
  assert recording.count == 1
  assert result == 600
