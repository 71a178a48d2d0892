# SPDX-License-Identifier: Apache-2.0
"""Files that two processes write to, and disks that are full: nothing breaks, all is counted."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from interpreters import Process, run, run_python, start
from sink_records import floats, record

import callgate as cg
from callgate import sinks

# A process that writes to a sink, and has it open until told to end.
WRITER = """
import sys
import numpy as np
from callgate import sinks

path = sys.argv[2]
sink = eval(sys.argv[1])
sink.open("t")
sink.write([sinks.Record(np.int64(0), sinks.TapInfo("x", 0, time_ns=0))])
print("ready", flush=True)
open(sys.argv[3]).read()
"""

SINKS = {
  "JSONL": "sinks.JSONL(path)",
  "JSONL, append": "sinks.JSONL(path, append=True)",
  "Npy": "sinks.Npy(path)",
  "Npy, append": "sinks.Npy(path, append=True)",
  "CSV": "sinks.CSV(path)",
  "CSV, append": "sinks.CSV(path, append=True)",
  "Stream": "sinks.Stream(path)",
  "HDF5": "sinks.HDF5(path)",
  "Parquet": "sinks.Parquet(path)",
  "Zarr": "sinks.Zarr(path)",
}
LIBRARIES = {"HDF5": "h5py", "Parquet": "pyarrow", "Zarr": "zarr"}


@pytest.mark.parametrize("name", SINKS)
def test_a_file_that_another_process_writes_to_is_an_error_that_names_it(name, tmp_path, request):
  if name in LIBRARIES:
    pytest.importorskip(LIBRARIES[name])
  path = str(tmp_path / "file")
  make = eval("lambda path: " + SINKS[name])
  go_on = tmp_path / "go on"
  os.mkfifo(go_on)
  other = start(WRITER, SINKS[name], path, go_on)
  request.addfinalizer(other.kill)
  assert line_of(other) == "ready\n"
  before = contents(path)
  if name == "JSONL, append":
    with make(path) as sink:
      sink.write(floats(0, 1))
    assert contents(path).startswith(before)
    assert len(pathlib.Path(path).read_text(encoding="utf-8").splitlines()) == 2
    make = sinks.JSONL  # without `append` it is refused
    before = contents(path)
  with pytest.raises(sinks.SinkError, match=f"process {other.pid} "):  # noqa: PT012
    sink = make(path)
    sink.open("t")
    sink.write(floats(0, 1))
  with (
    pytest.raises(sinks.SinkError, match=f"process {other.pid} "),
    cg.channel("of the second", to=make(path)),
  ):
    cg.tap(np.int64(1), "of the second", name="x")
  assert contents(path) == before
  go_on.write_text("")
  assert other.communicate(timeout=60)[1] == ""
  with eval("lambda path: " + SINKS[name])(path) as sink:  # it is free now
    sink.write([sinks.Record(np.int64(7), sinks.TapInfo("x", 1, time_ns=0))])


@pytest.mark.parametrize("name", ["CSV", "CSV of names", "Npy", "Npy of names", "Parquet"])
def test_a_sink_that_was_refused_never_begins_the_others_file_anew(name, tmp_path):
  kind, _, of_names = name.partition(" ")
  if kind in LIBRARIES:
    pytest.importorskip(LIBRARIES[kind])
  make = lambda path: getattr(sinks, kind)(path.with_name("{name}") if of_names else path)
  path = tmp_path / "loss"
  first, second = make(path), make(path)  # both idle
  first.open("t")
  first.write(floats(0, 2))
  for _ in range(2):  # refused while the first writes, and when it has closed
    with pytest.raises(sinks.SinkError):  # noqa: PT012
      second.open("t")
      second.write(floats(2, 3))
    first.close()
    whole = contents(str(path))
  with pytest.raises(sinks.SinkError):
    second.write(floats(2, 3))
  assert contents(str(path)) == whole
  second.close()
  assert contents(str(path)) == whole
  with make(path) as third:  # a new one begins anew, as ever
    third.write(floats(5, 6))
  assert contents(str(path)) != whole


def line_of(process: Process) -> str:
  assert process.stdout is not None
  return process.stdout.readline()


def contents(path: str) -> bytes:
  file = pathlib.Path(path)
  if file.is_dir():
    return b"".join(one.read_bytes() for one in sorted(file.rglob("*")) if one.is_file())
  return file.read_bytes() if file.exists() else b""


APPENDER = """
import sys
import jax, jax.numpy as jnp
import callgate as cg

path, name, go_on, elements, count = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])

@jax.jit
def program(n):
  def body(i, carry):
    cg.tap(jnp.full(elements, i), "t", name=name)
    return carry
  return jax.lax.fori_loop(0, n, body, 0)

with cg.channel("t", to=cg.sinks.JSONL(path, append=True)):
  print("ready", flush=True)
  open(go_on).read()
  jax.block_until_ready(program(count))
"""


@pytest.mark.parametrize(("elements", "count"), [(1, 4000), (60_000, 60)])
def test_lines_of_two_processes_are_whole_and_all_there(elements, count, tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"torn": ')  # as a process leaves it that was killed
  both: dict[pathlib.Path, Process] = {}
  for name in "ab":
    go_on = tmp_path / f"go on {name}"
    os.mkfifo(go_on)
    both[go_on] = start(APPENDER, path, name, go_on, elements, count)
  for one in both.values():
    assert line_of(one) == "ready\n"
  for go_on in both:
    go_on.write_text("")
  for one in both.values():
    assert one.communicate(timeout=90)[1] == ""
    assert one.returncode == 0
  seen: dict[str, list[int]] = {"a": [], "b": []}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    assert record["value"] == [record["value"][0]] * elements
    seen[record["name"]].append(record["value"][0])
  assert seen == {"a": list(range(count)), "b": list(range(count))}


def test_a_sink_that_was_closed_is_free_whatever_a_forks_child_holds(tmp_path):
  done = run_python(
    f"""
    import os, socket, warnings, numpy as np
    warnings.simplefilter("ignore")  # about forks of processes with threads
    from callgate import sinks
    ours, end = socket.socketpair()  # ends with this process
    record = lambda i: sinks.Record(np.int64(i), sinks.TapInfo("x", i, time_ns=0))
    for make in (sinks.JSONL, sinks.Npy, sinks.CSV, sinks.Stream):
      path = {str(tmp_path)!r} + "/" + make.__name__
      sink = make(path)
      sink.open("t")
      sink.write([record(0)])
      child = os.fork()
      if child == 0:
        try:
          if make is not sinks.Stream:
            sink.write([record(1)])
        except sinks.SinkError as error:
          os._exit(3 if "fork" in str(error) else 4)
        except BaseException:
          os._exit(5)
        os._exit(0 if make is sinks.Stream else 6)
      hold = os.fork()
      if hold == 0:
        ours.close(), os.close(1), os.close(2)  # which the test reads to their ends
        end.recv(1)
        os._exit(0)
      print(make.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
      sink.close()
      again = make(path)
      again.open("t")
      again.write([record(2)])
      again.close()
    """
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["JSONL", "3", "Npy", "3", "CSV", "3", "Stream", "0"]


# -- full disks ----------------------------------------------------------------------------------
FULL = """
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
from callgate import sinks

make, path, room = eval("lambda path: " + sys.argv[1]), sys.argv[2], int(sys.argv[3])

@jax.jit
def program(first, n):
  def body(i, carry):
    cg.tap(first + i, "t")
    return carry
  return jax.lax.fori_loop(0, n, body, 0)

sys.dont_write_bytecode = True  # of what is imported from here on, which the limit would cut

def limit(bytes):
  resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))

sink = make(path)
said = []
with cg.channel("t", to=sink) as channel:
  limit(room)
  jax.block_until_ready(program(0, 5000))
  try:
    channel.flush()
  except BaseException as error:
    said = [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
  lost = channel.stats()["lost"]
  limit(resource.RLIM_INFINITY)
  jax.block_until_ready(program(5000, 10))
  channel.flush()
  stats = channel.stats()
print(json.dumps({"lost": lost, "stats": stats, "said": said}))
"""


def values_of(name: str, path: str) -> list[int]:
  match name:
    case "JSONL" | "JSONL, append":
      return [
        json.loads(line)["value"]
        for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()
      ]
    case "Npy":
      return np.load(path).tolist()
    case "CSV":
      lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
      assert lines[0] == "seq,time_ns,device,lane,t"
      return [int(line.rpartition(",")[2]) for line in lines[1:]]
    case _:
      with cg.open_stream(path) as stream:
        return [int(r.leaves[""]) for r in stream]


@pytest.mark.parametrize("name", ["JSONL", "JSONL, append", "Npy", "CSV", "Stream"])
def test_records_that_fit_on_a_full_disk_are_written_and_the_rest_counted(name, tmp_path):
  path = str(tmp_path / "file")
  done = run_python(f"import sys; sys.argv = ['', {SINKS[name]!r}, {path!r}, '20011']\n" + FULL)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  values = values_of(name, path)
  kept = values[:-10]
  lost = found["lost"]
  assert values[-10:] == list(range(5000, 5010))  # there is room again
  assert len(kept) + lost == 5000
  assert kept == sorted(set(kept))
  assert kept[:50] == list(range(50))
  assert len(kept) >= (20011 - 600) // {"JSONL": 130, "Npy": 8, "CSV": 60}.get(
    name[:5].strip(","), 130
  )
  assert found["stats"]["lost"] == lost
  assert found["stats"]["delivered"] == 5010
  text = " ".join(found["said"])
  assert "File too large" in text
  assert path in text
  assert f"{lost} record(s) lost so far" in text


def test_a_header_that_found_no_room_comes_with_the_next_row(tmp_path):
  done = run(
    """
    import pathlib, resource, signal, sys
    import numpy as np
    from callgate import sinks
    path = pathlib.Path("a.csv")
    rows = [sinks.Record(np.float32(i), sinks.TapInfo("x", i, time_ns=0)) for i in range(3)]
    sys.dont_write_bytecode = True  # of what is imported from here on, which the limit would cut
    limit = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sink = sinks.CSV(path)
    sink.open("t")
    limit(10)
    try:
      sink.write(rows[:2])
    except sinks.SinkError as error:
      print(error.lost)
    limit(resource.RLIM_INFINITY)
    sink.write(rows[2:])
    sink.close()
    print(*path.read_text().split())
    """,
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["2", "seq,time_ns,device,lane,x", "2,0,0,,2.0"]


def test_a_full_disk_leaves_the_parquet_file_that_was_there(tmp_path):
  pytest.importorskip("pyarrow")
  done = run(
    """
    import resource, signal, sys
    import numpy as np
    from callgate import sinks
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # of what is imported from here on, which the limit would cut
    row = lambda i: sinks.Record(np.float64(i / 7), sinks.TapInfo("x", i, time_ns=i))
    with sinks.Parquet("a.parquet") as sink:
      sink.write([row(1), row(2)])
    sink = sinks.Parquet("a.parquet", append=True)
    sink.write([row(i) for i in range(3, 500)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
      sink.close()
    except sinks.SinkError as error:
      print("File too large" in str(error))
    import pyarrow.parquet
    print(pyarrow.parquet.read_table("a.parquet")["seq"].to_pylist())
    """,
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == ["True", "[1, 2]"]
  assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("make", [sinks.JSONL, sinks.Stream])
def test_a_native_sink_that_can_not_be_opened_raises_a_sink_error_that_is_a_value_error(
  make, tmp_path
):
  (tmp_path / "file").write_text("")
  with pytest.raises(sinks.SinkError, match="Not a directory") as caught:
    make(tmp_path / "file" / "a")
  assert isinstance(caught.value, ValueError)
  assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_parquet_replaces_nothing_but_files(tmp_path):
  pytest.importorskip("pyarrow")
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(sinks.SinkError, match="expected a regular file"):
    sinks.Parquet(tmp_path / "pipe").write(floats(0, 1))
  (tmp_path / "link").symlink_to(tmp_path / "file")
  with sinks.Parquet(tmp_path / "link") as sink:
    sink.write(floats(0, 1))
  assert (tmp_path / "link").is_symlink()
  assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("where", ["file", "unix:socket"])
def test_a_stream_that_was_closed_goes_on(where, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  sink = sinks.Stream(where)
  tap = jax.jit(lambda x: cg.tap(x, "again"))
  for i in range(3):
    with cg.channel("again", to=sink) as channel:
      reader = cg.open_stream(where) if where != "file" else None
      tap(float(i))
      cg.barrier()
      if reader is not None:
        while (found := reader.read(0.05)) is None:  # it is served from when it is accepted
          tap(float(i))
        assert float(found.leaves[""]) == i
    assert channel.stats()["lost"] == 0
  if where == "file":
    with cg.open_stream(where) as stream:
      assert [float(record.leaves[""]) for record in stream] == [0, 1, 2]


@pytest.mark.parametrize("make", [lambda path: sinks.JSONL(path / "a"), lambda _: sinks.Stats()])
def test_leaves_of_one_name_are_refused(make, tmp_path):
  channel = cg.channel("names", to=make(tmp_path))
  jax.jit(lambda x: cg.tap({"a/b": x, "a": {"b": 2 * x}}, channel))(1.0)
  with pytest.raises(cg.ConsumerError, match="leaves with different names, got two leaves 'a/b'"):
    channel.close()


@pytest.mark.parametrize("kind", ["Npy", "Stats"])
def test_leaves_of_two_taps_are_not_mixed(kind, tmp_path):
  stats = sinks.Stats()
  sink = stats if kind == "Stats" else sinks.Npy(tmp_path / "{name}")
  channel = cg.channel("names", to=sink)
  for i in range(2):
    jax.jit(lambda x: cg.tap({"b": x}, channel, name="a"))(np.float32(i))
    jax.jit(lambda x: cg.tap(x, channel, name="a/b"))(np.float32(i + 5))
  with pytest.raises(cg.ConsumerError, match="'a/b' of the tap 'a', got that of the tap 'a/b'"):
    channel.close()
  assert channel.stats()["lost"] == 2
  if kind == "Stats":
    assert stats.result()["a/b"]["records"] == 2
  else:
    assert np.load(tmp_path / "a_b").tolist() == [0, 1]


def test_a_record_that_a_file_cannot_hold_takes_no_other_along(tmp_path):
  records = [record("good", np.float32(0), 0), record("t\udc80", np.float32(1), 1)]
  table = sinks.CSV(tmp_path / "a.csv", columns=["good"])
  with pytest.raises(sinks.SinkError, match=r"surrogates not allowed; 1 record\(s\) lost so far"):
    table.write(records)
  table.close()
  assert len((tmp_path / "a.csv").read_text().splitlines()) == 2
  with (
    open(tmp_path / "b", "w", encoding="ascii") as file,
    pytest.raises(sinks.SinkError, match=r"can't encode .* 1 record\(s\) lost so far"),
  ):
    sinks.Print(file).write([record("é", np.float32(0), 0), records[0]])
  assert (tmp_path / "b").read_text() == "good #0: 0.0\n"


@pytest.mark.parametrize("kind", [sinks.CSV, sinks.JSONL])
def test_lines_go_to_devices_and_pipes_as_well(kind, tmp_path):
  sink = kind("/dev/full")
  with pytest.raises(sinks.SinkError, match="No space left on device") as caught:
    sink.write(floats(0, 2))
  assert kind is sinks.JSONL or caught.value.lost == 2
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as reader:
    with kind(pipe) as sink:
      sink.write(floats(0, 2))
    assert len(reader.readlines()) == 2 + (kind is sinks.CSV)  # which has a header


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A disk of 64 KiB."""
  disk = tmp_path / "disk"
  disk.mkdir()
  mounted = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
  )
  if mounted.returncode != 0:
    pytest.skip(f"mounting a small disk takes rights: {mounted.stderr.decode()}")
  try:
    yield disk
  finally:
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["JSONL", "JSONL, append", "Npy", "CSV", "Stream"])
def test_a_disk_that_is_full_and_has_room_again(name, small_disk):
  path = str(small_disk / "file")
  other = small_disk / "other"
  other.write_bytes(bytes(56_000))
  make = eval("lambda path: " + SINKS[name])

  @jax.jit
  def program(first, n):
    def body(i, carry):
      cg.tap(first + i, "t")
      return carry

    return jax.lax.fori_loop(0, n, body, 0)

  with cg.channel("t", to=make(path)) as channel:
    jax.block_until_ready(program(0, 5000))
    with pytest.raises((sinks.SinkError, cg.ConsumerError), match="No space left"):
      channel.flush()
    lost = channel.stats()["lost"]
    other.unlink()
    jax.block_until_ready(program(5000, 10))
    channel.flush()
    assert channel.stats()["lost"] == lost
  values = values_of(name, path)
  assert values[-10:] == list(range(5000, 5010))
  assert len(values) == 5010 - lost
  assert values == sorted(set(values))


def test_files_of_one_tap_have_rows_in_step_on_a_full_disk(tmp_path):
  path = str(tmp_path / "{name}.npy")
  done = run_python(
    f"""
    import resource, sys, numpy as np
    from callgate import sinks
    import jax, callgate as cg
    sys.dont_write_bytecode = True  # of what is imported from here on, which the limit would cut

    @jax.jit
    def program(n):
      def body(i, carry):
        cg.tap({{"a": i, "wide": i + np.zeros(7, np.int32)}}, "t")
        return carry
      return jax.lax.fori_loop(0, n, body, 0)

    with cg.channel("t", to=sinks.Npy({path!r})) as channel:
      resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
      jax.block_until_ready(program(500))
      try:
        channel.flush()
      except cg.ConsumerError:
        print(channel.stats()["lost"])
    """
  )
  assert done.returncode == 0, done.stderr
  a, wide = np.load(path.format(name="t_a")), np.load(path.format(name="t_wide"))
  assert a.tolist() == wide[:, 0].tolist()
  assert len(a) == 500 - int(done.stdout)
  assert len(a) > 90
