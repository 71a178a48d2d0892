# SPDX-License-Identifier: Apache-2.0
"""The interface between the core and its parts: what a part is called for, and events."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from interpreters import output_of, run_python

from callgate import _part
from callgate._runtime import lifecycle


@pytest.fixture
def heard() -> Generator[list[object]]:
  """What listeners of the test heard; they are taken back."""
  before = list(_part._listeners["knob changed"])
  yield []
  _part._listeners["knob changed"][:] = before


def test_an_event_is_told_to_its_listeners_in_their_order(heard: list[object]) -> None:
  first, second = (lambda value: heard.append((1, value))), (lambda value: heard.append((2, value)))
  for function in (first, second, first):  # the third changes nothing
    _part.on("knob changed", function)
  knob = object()
  _part.tell("knob changed", knob)
  assert heard == [(1, knob), (2, knob)]
  _part.off("knob changed", first)
  _part.off("knob changed", first)  # neither does this
  _part.tell("knob changed", knob)
  assert heard[2:] == [(2, knob)]


def test_a_listener_may_take_itself_back(heard: list[object]) -> None:
  def once(value: object) -> None:
    heard.append(value)
    _part.off("knob changed", once)

  _part.on("knob changed", once)
  _part.on("knob changed", heard.append)
  _part.tell("knob changed", 1)
  _part.tell("knob changed", 2)
  assert heard == [1, 1, 2]


def test_a_part_that_overrides_nothing_is_in_nobodys_way() -> None:
  part = _part.Part()
  assert part.define("name") is None
  assert part.wait(0)
  part.settle()
  part.forked()
  part.end("join", 0)


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

    def wait(self, seconds):
      print("wait", self.name)
      return True

    def settle(self):
      print("settle", self.name)

    def end(self, phase, seconds):
      assert seconds > 0
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
  if os.fork() == 0:
    os._exit(0)
  os.wait()
  from callgate._core import registry
  registry.undefined("b")
  os._exit(0)
"""
  )
  assert output_of(source).splitlines() == [
    *("wait a", "wait b", "settle a", "settle b"),
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
