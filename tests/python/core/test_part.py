# SPDX-License-Identifier: Apache-2.0
"""The interface between the core and its parts: what a part is called for, and events."""

from __future__ import annotations

import itertools
import pathlib
import re
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
from interpreters import output_of, run_python
from meanwhile import Meanwhile

import callgate as cg
from callgate import _part
from callgate._core.public import core
from callgate._runtime import lifecycle


@pytest.fixture
def heard() -> Generator[list[object]]:
  """The values that the test's listeners heard; the listeners are taken back."""
  before = list(_part._listeners["object dropped"])
  yield []
  _part._listeners["object dropped"][:] = before


def test_threads_share_what_is_made_once() -> None:
  made: list[object] = []

  @_part.once
  def make() -> object:
    made.append(object())
    time.sleep(0.02)  # the other threads come meanwhile
    if len(made) == 1:
      raise ValueError("not yet")
    return made[-1]

  found: list[object] = []

  def ask() -> None:
    try:
      found.append(make())
    except ValueError as error:
      found.append(str(error))

  threads = [threading.Thread(target=ask) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(found, key=str) == [made[1]] * 3 + ["not yet"]


def test_an_event_is_told_to_its_listeners_in_their_order(heard: list[object]) -> None:
  first, second = (lambda value: heard.append((1, value))), (lambda value: heard.append((2, value)))
  for function in (first, second, first):  # the third changes nothing
    _part.on("object dropped", function)
  knob = object()
  _part.tell("object dropped", knob)
  assert heard == [(1, knob), (2, knob)]
  _part.off("object dropped", first)
  _part.off("object dropped", first)  # neither does this
  _part.tell("object dropped", knob)
  assert heard[2:] == [(2, knob)]


def test_a_listener_may_take_itself_back(heard: list[object]) -> None:
  def once(value: object) -> None:
    heard.append(value)
    _part.off("object dropped", once)

  _part.on("object dropped", once)
  _part.on("object dropped", heard.append)
  _part.tell("object dropped", 1)
  _part.tell("object dropped", 2)
  assert heard == [1, 1, 2]


def test_a_part_that_overrides_nothing_is_in_nobodys_way() -> None:
  part = _part.Part()
  assert part.define("name") is None
  assert part.settle(_part.Wait(0))
  part.forked()
  part.end("join", _part.Wait(0))


COUNTING = """
  import os, jax
  import callgate as cg
  from callgate import _part

  class Counting(_part.Part):
    calls = "counted calls"

    def __init__(self, name):
      self.name = name

    def define(self, name):
      return self if name == self.name else None

    def define_variant(self, key):
      print("defined", self.name)
      return False

    def settle(self, wait):
      print("settle", self.name, wait.seconds)
      return not (self.name == "b" and wait.seconds == 7)

    def end(self, phase, wait):
      assert wait.left > 0
      print(phase, self.name, flush=True)
      if phase == "draw":
        raise ValueError(self.name)

    def forked(self):
      print("forked", self.name, flush=True)

  cg.gate
  _part.join(Counting("a"))
  _part.join(Counting("b"))
"""


def test_a_part_is_called_at_barriers_in_forks_and_for_names() -> None:
  source = (
    COUNTING
    + """
  cg.barrier()
  try:
    cg.barrier(7)
  except TimeoutError as error:
    print(error)
  if os.fork() == 0:
    os._exit(0)
  os.wait()
  from callgate._core import registry
  registry.defined("b")
  os._exit(0)
"""
  )
  assert output_of(source).splitlines() == [
    *("settle a None", "settle b None", "settle a 7", "settle b 7"),
    "callgate.barrier: counted calls still run after 7 s; increase the timeout",
    *("forked a", "forked b", "defined b"),
  ]


def test_parts_end_in_their_order_and_join_in_the_reverse_whatever_one_raises() -> None:
  done = run_python(COUNTING)
  assert done.stdout.splitlines() == [
    f"{phase} {name}"
    for phase in ("hurry", "leave", "draw", "deliver", "join")
    for name in ("ba" if phase == "join" else "ab")
  ]
  assert [line for line in done.stderr.splitlines() if line.startswith("ValueError")] == [
    "ValueError: a",
    "ValueError: b",
  ]
  assert callable(lifecycle.end)


def test_each_part_joins_as_its_module_is_imported_and_keeps_its_place() -> None:
  joined = {name: _part.load(name) and name for name in _part.PARTS}
  names = [part.name for part in _part.parts()]
  assert names == [name for name in joined if name in names]
  assert set(_part.PARTS) == set(names)


def test_each_folder_with_a_part_is_in_the_table() -> None:
  package = pathlib.Path(__file__).parents[3] / "python" / "callgate"  # installed or not yet
  files = package.glob("**/*.py")
  join = re.compile(r"^@?(?:_part\.)?joins?\(", re.MULTILINE)
  joins = {path.parent.name for path in files if join.search(path.read_text(encoding="utf-8"))}
  table = {module.split(".")[-2] for module, *_ in _part.PARTS.values()}
  assert not joins - table, "PARTS of _part.py lacks a part that joins here"
  assert not table - joins, "PARTS of _part.py has a part that nothing here joins"


def test_the_name_of_a_callee_brings_its_part() -> None:
  brought = """
    import sys
    import callgate
    from callgate import _part

    callgate.barrier
    for name in ("check:loss is finite", "callgate.stop", "channel:loss"):
      before = set(_part._loaded)
      _part.load_for(name)
      print(sorted(_part._loaded - before))
  """
  assert output_of(brought).splitlines() == ["['checks']", "['stops']", "['channels', 'taps']"]


def test_a_part_that_joins_again_takes_its_own_place() -> None:
  class Again(_part.Part):
    name = "again"

  before = _part.parts()
  try:
    _part.join(Again())
    _part.join(last := Again())
    assert _part.parts() == (*before, last)
  finally:
    _part._parts[:] = before


def test_one_deadline_serves_all_steps_of_a_wait() -> None:
  asked: list[float] = []
  wait = _part.Wait(0.02)
  assert not wait.until(lambda seconds: asked.append(seconds) or time.sleep(seconds))
  assert asked[0] <= 0.02
  assert wait.left == 0
  assert not wait.event(threading.Event())
  assert not wait.poll(lambda: False)
  assert wait.poll(lambda: True)  # asked once, however late
  assert wait.until(lambda seconds: seconds == 0)


def test_a_wait_without_a_limit_lasts_until_it_is_done() -> None:
  answers = iter([False, False, True])
  wait = _part.Wait(None)
  assert wait.is_plain
  assert wait.until(lambda seconds: seconds == _part.FOREVER)
  assert wait.poll(lambda: next(answers))


@pytest.mark.parametrize("way", ["until", "poll", "event"])
def test_a_look_ends_a_wait_by_raising(way: str) -> None:
  looks = 0

  def look() -> None:
    nonlocal looks
    looks += 1
    if looks == 2:
      raise KeyError("enough")

  never = threading.Event()
  wait = _part.Wait(60).looking(look)
  done = {"until": never.wait, "poll": never.is_set, "event": never}[way]
  with pytest.raises(KeyError, match="enough"):
    getattr(wait, way)(done)
  assert wait.left > 0


def test_a_thread_runs_calls_while_it_waits_for_an_event() -> None:
  done = threading.Event()
  with cg.thread("waits") as thread:

    def wait() -> bool:
      assert core(thread).submit(done.set)
      return _part.Wait(60).event(done)

    assert core(thread).run(wait)


def test_a_part_that_joins_while_another_does_is_there_too() -> None:
  before, second = _part.parts(), _part.Part()
  meanwhile = Meanwhile(lambda: _part.join(second))
  seen = list[int]()

  class Looking(_part.Part):
    @property
    def name(self) -> str:  # type: ignore[override] - asked for while the parts are put in order
      seen.append(len(_part.parts()))
      meanwhile()
      return ""

  first = Looking()
  try:
    _part.join(first)
    _part.join(_part.Part())
    meanwhile.end()
    assert {first, second} <= {*_part.parts()}
    assert min(seen) >= len(before)
  finally:
    _part._parts[:] = before


def test_a_listener_that_comes_while_another_goes_stays(
  heard: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
  meanwhile = Meanwhile(lambda: _part.on("object dropped", heard.append))
  looks = itertools.count()

  class Listeners(dict[Any, Any]):
    def __getitem__(self, event: object) -> Any:
      if next(looks) == 1:  # between the look at those that stay, and their return
        meanwhile()
      return super().__getitem__(event)

  monkeypatch.setattr(_part, "_listeners", Listeners(_part._listeners))
  _part.off("object dropped", print)
  meanwhile.end()
  _part.tell("object dropped", 1)
  assert heard == [1]
