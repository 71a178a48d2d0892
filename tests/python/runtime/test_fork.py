# SPDX-License-Identifier: Apache-2.0
"""A fork's child with the parent's objects: it is told, or nothing happens; the parent goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from interpreters import output_of

# Each kind of object, how a process uses it, and what is then to be seen of it.
PRELUDE = """
import atexit, gc, itertools, json, multiprocessing, os, pathlib, signal, sys, threading, warnings
warnings.simplefilter("ignore")  # Python and JAX warn of forks in a process with threads
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
parent = os.getpid()
# In a child: after callgate's own exit, before JAX's, which crashes there without callgate, too.
atexit.register(lambda: os.getpid() == parent or os._exit(7))
import callgate as cg

folder = pathlib.Path(sys.argv[1])
kinds = {}

def send(name):
  jax.block_until_ready(jax.jit(lambda x: cg.tap(x, name))(np.float32(1)))

def print_nothing(value):
  pass

class OfChannel:
  def __init__(self, name, sink):
    self.sink = sink
    self.channel = cg.channel(name, to=sink)
  def use(self):
    send(self.channel.name)
    self.channel.flush()
  def close(self):
    self.channel.close()
    if hasattr(self.sink, "close"):
      self.sink.close()
  def __enter__(self):
    self.channel.__enter__()
  def __exit__(self, *error):
    self.channel.__exit__(*error)

class OfGate:
  def __init__(self, **options):
    self.program = jax.jit(cg.gate(lambda x: x + 1, out=lambda x: x, **options))
    self.use()
  def use(self):
    with cg.errors():
      jax.block_until_ready(self.program(np.float32(1)))

class OfFeed:
  def __init__(self):
    self.feed = cg.feed(map(float, itertools.count()))
  def use(self):
    self.feed.next()
  def close(self):
    assert self.feed.close()

class OfReader:
  def __init__(self, address):
    self.reader = cg.open_stream(address)
  def use(self):
    self.reader.read(0.01)
  def close(self):
    self.reader.close()

class OfRecords:
  def __init__(self):
    self.channel = cg.channel("records")
    self.records = self.channel.records()
    send("records")
    next(self.records)
  def use(self):
    send("records")
    next(self.records)

class OfProgram:
  def __init__(self, function):
    self.program = jax.jit(function)
    self.use()
  def use(self):
    jax.block_until_ready(self.program(np.float32(1)))

add = cg.cpp(
  "void add(cg::In<float> x, cg::Out<float> y) { y[0] = x[0] + 1; }", out=lambda x: x
)
socket = f"unix:{folder}/socket"
kinds["channel"] = OfChannel("plain", lambda value: None)
kinds["jsonl"] = OfChannel("jsonl", cg.sinks.JSONL(folder / "a.jsonl"))
kinds["csv"] = OfChannel("csv", cg.sinks.CSV(folder / "a.csv"))
kinds["npy"] = OfChannel("npy", cg.sinks.Npy(folder / "a.npy"))
kinds["stream"] = OfChannel("stream", cg.sinks.Stream(folder / "a.cgs"))
kinds["socket"] = OfChannel("socket", cg.sinks.Stream(socket))
kinds["barrier"] = OfProgram(lambda x: x)
kinds["barrier"].use = lambda: cg.barrier()
kinds["flush"] = OfChannel("flushed", lambda value: None)
kinds["flush"].use = kinds["flush"].channel.flush
kinds["eager tap"] = OfProgram(lambda x: x)
kinds["eager tap"].use = lambda: cg.tap(1.0, print_nothing)
kinds["records"] = OfRecords()
kinds["reader"] = OfReader(socket)
kinds["feed"] = OfFeed()
kinds["gate"] = OfGate()
kinds["own thread"] = OfGate(thread="own")
kinds["timeout"] = OfGate(timeout=60)
kinds["check"] = OfProgram(lambda x: (cg.check(x > 0, "below"), x)[1])
kinds["kernel"] = OfProgram(add)
kinds["tap"] = OfProgram(lambda x: cg.tap(x, "unopened"))
kinds["bar"] = OfProgram(
  lambda x: cg.fori_loop(0, 10, lambda i, c: c + 1, x, progress="p")
)
kinds["sink of csv"] = OfChannel("csv 2", cg.sinks.CSV(folder / "b.csv"))
kinds["sink of csv"].use = lambda: kinds["sink of csv"].sink.write([])
kinds["sink of a stream"] = OfChannel("stream 2", cg.sinks.Stream(folder / "b.cgs"))
kinds["sink of a stream"].use = lambda: kinds["sink of a stream"].sink.write([])
for kind in kinds.values():
  kind.use()

def in_child(act):
  read, write = os.pipe()
  child = os.fork()
  if child == 0:
    os.close(read)
    signal.alarm(20)  # a hang is the signal's number
    try:
      said = act()
    except Exception as error:
      said = f"{type(error).__name__}: {error}"
    os.write(write, str(said).encode())
    os._exit(0)
  os.close(write)
  with os.fdopen(read, "rb") as file:
    said = file.read().decode()
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
"""

# Children that use the parent's objects, close or drop them, leave their blocks and end, and those
# of multiprocessing.
CHILDREN = """
told = {n: in_child(kind.use) for n, kind in kinds.items()}

def close(kind):
  if hasattr(kind, "close"):
    kind.close()

def drop(name):
  kinds.pop(name)
  gc.collect()

closed = {n: in_child(lambda: close(kind)) for n, kind in kinds.items()}
closed |= {f"{n}, dropped": in_child(lambda: drop(n)) for n in list(kinds)}

def leave():
  with kinds[n]:
    pass

def leave_by_exit():
  with kinds[n]:
    sys.exit(3)

def end():
  try:
    leave_by_exit()
  except SystemExit as error:
    return error.code

left = {}
for n in ("channel", "jsonl", "stream", "socket"):
  left[n] = in_child(leave)
  left[f"{n}, by exit"] = in_child(end)
child = os.fork()
if child == 0:
  signal.alarm(20)
  with kinds["stream"]:
    sys.exit(3)
left["was interrupted"] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "None"]

context = multiprocessing.get_context("fork")
answers = context.SimpleQueue()

def work(kind):
  signal.alarm(20)
  try:
    kinds[kind].use()
  except Exception as error:
    answers.put(str(error))

by_fork = {}
for kind in ("channel", "stream", "own thread"):
  worker = context.Process(target=work, args=(kind,))
  worker.start()
  worker.join()
  by_fork[kind] = [worker.exitcode, answers.get() if worker.exitcode == 0 else ""]
"""

END = """
for kind in kinds.values():
  kind.use()  # the parent's are as they were
kept = cg.open_stream(folder / "a.cgs")
whole = [int(record.seq) for record in kept] + [kept.ended]
count = len((folder / "a.jsonl").read_text().splitlines())
served = (folder / "socket").exists() and cg.open_stream(socket).read(0.0) is None
print(json.dumps([told, closed, left, by_fork, whole, count, served]))
"""

# The message of each in a child; None where it simply works, as far as JAX does.
SAYS: dict[str, str | None] = {
  "channel": "forked from",
  "jsonl": "forked from",
  "csv": "forked from",
  "npy": "forked from",
  "stream": "forked from",
  "socket": "forked from",
  "barrier": "forked from",
  "flush": "forked from",
  "eager tap": "forked from",
  "records": "forked from",
  "reader": "forked from",
  "feed": "forked process",
  "gate": None,
  "own thread": "forked from",
  "timeout": "forked from",
  "check": None,
  "kernel": None,
  "tap": "tap 'unopened': this process was forked from",
  "bar": None,
  "sink of csv": "forked from",
  "sink of a stream": "forked from",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  folder = tmp_path_factory.mktemp("fork")
  source = PRELUDE.replace("sys.argv[1]", repr(str(folder))) + CHILDREN + END
  *answers, whole, count, served = json.loads(output_of(source).splitlines()[-1])
  assert whole == [0, 1, False], "a child has written to the parent's stream"
  assert count == 2
  assert served, "a child has taken the parent's socket away"
  return dict(zip(("told", "closed", "left", "by_fork"), answers, strict=True))


def test_a_child_that_uses_the_parents_objects_is_told(answers: dict[str, Any]) -> None:
  assert answers["told"].keys() == SAYS.keys()
  for kind, (status, said) in answers["told"].items():
    assert status == 0, f"{kind}: {said}"
    expected = SAYS[kind]
    assert said == "None" if expected is None else expected in said, f"{kind}: {said}"


def test_a_child_that_closes_or_drops_the_parents_objects_leaves_them_alone(
  answers: dict[str, Any],
) -> None:
  assert {name: one for name, one in answers["closed"].items() if one != [0, "None"]} == {}


def test_a_child_of_a_channels_block_ends(answers: dict[str, Any]) -> None:
  for name, one in answers["left"].items():
    expected = (
      [7, "None"] if name == "was interrupted" else [0, "3" if "by exit" in name else "None"]
    )
    assert one == expected, name


def test_a_child_of_multiprocessings_fork_is_told_and_ends(answers: dict[str, Any]) -> None:
  assert len(answers["by_fork"]) == 3
  for kind, (status, said) in answers["by_fork"].items():
    assert status == 0, kind
    assert "forked from" in said, kind
