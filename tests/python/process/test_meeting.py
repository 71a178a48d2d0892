# SPDX-License-Identifier: Apache-2.0
"""Meetings of all processes, with threads for processes and a store in memory for JAX's.

Tests over processes are in process/test_group.py; here are the cases that need exact timing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

import callgate as cg
from callgate._part import Wait
from callgate._process import group as _group
from callgate._process.group import Failure, Group
from callgate._process.meeting import Meeting
from callgate._runtime import barrier


class MemoryStore:
  """A `CommonStore` for threads instead of processes."""

  def __init__(self) -> None:
    self.texts: dict[str, str] = {}
    self.changed = threading.Condition()
    self.is_down = False

  def put(self, key: str, text: str, *, overwrite: bool = False) -> bool:
    self.check()
    with self.changed:
      if key in self.texts and not overwrite:
        return False
      self.texts[key] = text
      self.changed.notify_all()
      return True

  def get(self, key: str, seconds: float = 0.0) -> str | None:
    self.check()
    with self.changed:
      self.changed.wait_for(lambda: key in self.texts, seconds)
      return self.texts.get(key)

  def under(self, folder: str) -> dict[str, str]:
    self.check()
    with self.changed:
      found = [(key, text) for key, text in self.texts.items() if key.startswith(folder)]
      return {key.removeprefix(folder): text for key, text in found}

  def remove(self, folder: str) -> None:
    with self.changed:
      for key in [key for key in self.texts if key.startswith(folder)]:
        del self.texts[key]

  def check(self) -> None:
    if self.is_down:
      raise ConnectionError("the coordinator of jax.distributed: UNAVAILABLE")


@pytest.fixture
def store() -> MemoryStore:
  return MemoryStore()


@pytest.fixture
def groups(store) -> Iterator[list[Group]]:
  """Three processes as they see themselves."""
  made = [Group(store, index, 3) for index in range(3)]
  yield made
  for group in made:
    group.leave()


def meet(group: Group, own_part: Callable[[Meeting], object] = lambda _: None, timeout=None):
  """The exception of a process in a barrier, or None."""
  try:
    with Meeting(group) as meeting:
      own_part(meeting)
      wait = Wait(timeout)
      assert wait.poll(lambda: timeout is None or not wait.left)  # over already
      meeting.wait(wait)
  except BaseException as error:  # noqa: BLE001 - whatever it is, is what tests look at
    return error
  return None


def all_meet(groups, *parts) -> list[BaseException | None]:
  """The outcomes of one barrier of all processes; `parts` are what they do in it."""
  outcomes: list[BaseException | None] = [None] * len(groups)
  threads = []
  for index, group in enumerate(groups):
    part = parts[index] if index < len(parts) else lambda _: None

    def run(index=index, group=group, part=part):
      outcomes[index] = meet(group, part)

    threads.append(threading.Thread(target=run, daemon=True))
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  return outcomes


def failing(error: BaseException) -> Callable[[Meeting], None]:
  def part(_: Meeting) -> None:
    raise error

  return part


def test_a_meeting_holds_when_all_come_and_leaves_one_record_behind(groups, store):
  for number in range(1, 6):
    assert all_meet(groups) == [None] * 3
    assert store.texts[f"callgate/barrier/{number}/result"] == "ok"
  kept = {key.split("/")[2] for key in store.texts if key.startswith("callgate/barrier/")}
  assert kept == {"5"}


def test_the_one_that_fails_raises_its_own_object_and_the_others_name_it(groups):
  own = KeyError("weights")
  outcomes = all_meet(groups, lambda _: None, failing(own))
  assert outcomes[1] is own
  for other in (outcomes[0], outcomes[2]):
    assert isinstance(other, cg.ProcessError)
    assert isinstance(other, cg.GateError)
    assert (other.process, other.kind, other.message) == (1, "KeyError", "'weights'")
    assert str(other) == "process 1: KeyError: 'weights'"
    assert "in process 1:\nTraceback" in other.__notes__[0]
  assert all_meet(groups) == [None] * 3


def test_one_that_fails_does_not_wait_for_those_that_come_late(groups):
  own = OSError("disk full")
  assert meet(groups[2], failing(own)) is own
  late = [meet(groups[0]), meet(groups[1])]
  assert [error.process for error in late] == [2, 2]


def test_two_that_fail_keep_their_own_and_the_rest_hears_of_the_first(groups):
  first, second = OSError("first"), OSError("second")
  assert meet(groups[1], failing(first)) is first
  assert meet(groups[2], failing(second)) is second
  assert meet(groups[0]).message == "first"


@pytest.mark.parametrize("index", [0, 2])
def test_a_process_that_ends_without_coming_is_an_error_in_the_others(groups, index):
  groups[index].say_ended(None)
  others = [meet(group) for group in groups if group.index != index]
  assert [str(error) for error in others] == [
    f"process {index} ended without reaching this point"
  ] * 2


def test_a_process_that_came_and_then_ended_is_no_failure(groups):
  # Process 2 is let out first, and ends before the others have looked.
  groups[2].store.put("callgate/barrier/1/at/2", "ok")
  groups[2].say_ended(None)
  assert all_meet(groups[:2]) == [None, None]
  assert meet(groups[0]).process == 2  # but to the next one it will not come


def test_the_own_part_ends_when_another_process_has_failed(groups):
  def endless(meeting: Meeting) -> None:
    while True:
      meeting.watch()

  outcomes = all_meet(groups, endless, failing(ValueError("no")))
  assert [type(error) for error in outcomes] == [cg.ProcessError, ValueError, cg.ProcessError]


def test_a_process_that_falls_silent_is_found_missing(store, monkeypatch):
  monkeypatch.setenv("CALLGATE_SILENT_SECONDS", "3")
  alive = [Group(store, index, 3) for index in range(3)]
  try:
    alive[1].leave()  # its thread counts no more
    for error in all_meet([alive[0], alive[2]]):
      assert str(error) == "process 1 has not responded for 3 s"
  finally:
    for group in alive:
      group.leave()


def test_a_timeout_names_the_processes_that_are_missing(groups):
  late = meet(groups[1], timeout=0.25)
  assert isinstance(late, TimeoutError)
  assert str(late) == (
    "callgate.barrier: expected all 3 processes within 0.25 s, but [0, 2] did not arrive"
  )
  assert meet(groups[0]).kind == "TimeoutError"
  assert meet(groups[2]).process == 1
  assert all_meet(groups) == [None] * 3


def test_an_error_that_another_process_may_have_caused_says_so(groups):
  groups[0].say_ended(RuntimeError("out of memory"))
  error = meet(groups[1], failing(ValueError("connection closed by peer")))
  assert type(error) is ValueError
  expected = "callgate: before that, process 0: RuntimeError: out of memory"
  assert expected in error.__notes__


def test_without_its_coordinator_a_process_gets_an_error(groups, store):
  store.is_down = True
  error = meet(groups[1])
  assert isinstance(error, cg.ProcessError)
  assert (error.process, error.kind) == (0, "ConnectionError")


def test_an_interrupt_in_a_meeting_ends_it_for_all(groups):
  assert isinstance(meet(groups[0], failing(KeyboardInterrupt())), KeyboardInterrupt)
  assert meet(groups[1]).kind == "KeyboardInterrupt"


def test_the_first_word_of_a_process_that_ends_holds(groups, store):
  groups[1].say_ended(ValueError("the cause"))
  groups[1].say_ended(None)
  assert Failure.parse(store.texts["callgate/ended/1"]).message == "the cause"


def test_in_a_program_of_one_process_it_is_the_plain_barrier():
  seen: list[float] = []
  cg.tap(3.0, seen.append)
  cg.barrier(all_processes=True, timeout=60)
  assert seen == [3.0]
  cg.tap(3.0, failing(LookupError("nobody")))
  with pytest.raises(LookupError, match="nobody"):
    cg.barrier(all_processes=True)


def test_several_processes_without_jax_distributed_are_refused(monkeypatch):
  monkeypatch.setattr(_group.jax, "process_count", lambda: 2)
  with pytest.raises(RuntimeError, match=r"expected jax.distributed .* got 2 processes"):
    cg.barrier(all_processes=True)


def test_a_blocked_consumer_does_not_hide_the_failure_of_another_process(groups, monkeypatch):
  monkeypatch.setattr(barrier._group, "group", lambda: groups[0])
  entered, released = threading.Event(), threading.Event()

  def blocked(_: object) -> None:
    entered.set()
    released.wait(60)

  cg.tap(1.0, blocked)
  assert entered.wait(60)
  groups[1].say_ended(RuntimeError("gone"))
  try:
    with pytest.raises(cg.ProcessError, match="process 1: RuntimeError: gone"):
      cg.barrier(all_processes=True)
  finally:
    released.set()
    with contextlib.suppress(cg.ProcessError):
      cg.barrier()
