# SPDX-License-Identifier: Apache-2.0
"""Escaped views are found by counting references: each holder counts once, in every Python.

Python 3.14 borrows references of local variables for the stack and for calls' arguments, so it may
count fewer of them than Python 3.13. A view that is kept has a reference of its own in both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
import pytest
from free_threaded import frees_functions, reads_frames
from kept_memory import SCALAR, names, numbers, reuse_memory

import callgate as cg
from callgate._arrays import escape, holders

ANSWER = np.float32(0)
kept: list[Any] = []


def use(*arrays: Any, **named: Any) -> Any:
  return sum(float(array.sum()) for array in (*arrays, *named.values()))


def one(array: Any) -> Any:
  return array


def chain(array: Any, depth: int = 20) -> Any:
  return use(array) if depth == 0 else chain(array, depth - 1)


def walk(array: Any) -> Generator[Any]:
  held = array
  while True:
    yield held, (yield)


def in_locals(a: Any, b: Any) -> None:
  first = second = a
  third, first = first, b
  use(first, second, third)


def in_a_closure(a: Any, b: Any) -> None:
  def inner() -> Any:
    return use(a, b)

  inner()


def in_an_abandoned_generator(a: Any, b: Any) -> None:
  steps = walk(a)
  next(steps)
  steps.send(b)


def in_a_handled_exception(a: Any, b: Any) -> None:
  try:
    a.reshape(-1, b.size + 7)
  except ValueError:
    use(a, b)


def in_a_match(a: Any, b: Any) -> None:
  match (a, [b]):
    case (x, [y]):
      use(x, y)


NAMED = {"d": np.zeros(1)}
# Functions that don't keep their two views.
DROPPED: dict[str, Callable[[Any, Any], Any]] = {
  "locals": in_locals,
  "passed on": lambda a, b: use(a, *[b], c=a, **NAMED),
  "passed on and on": lambda a, b: chain(a) + chain(b),
  "returned by a callee": lambda a, b: one(one(a)) is one(b),
  "unpacked": lambda *both: use(*both, *both),
  "a tuple": lambda a, b: use(*((a, b), (b, a))[1]),
  "a list comprehension": lambda a, b: [x.sum() for x in (a, b) for _ in range(3)],
  "a dict comprehension": lambda a, b: {id(x): x for x in (a, b)},
  "a generator expression": lambda a, b: sum(x.sum() for x in (a, b)),
  "a conditional": lambda a, b: use(a if b.size else b) or use(b and a if b.size == 0 else b),
  "a walrus": lambda a, b: (c := a).sum() + c.sum() + b.sum(),
  "a closure": in_a_closure,
  "an abandoned generator": in_an_abandoned_generator,
  "a handled exception": in_a_handled_exception,
  "a match": in_a_match,
  "a lambda's default": lambda a, b: (lambda x=a, y=b: use(x, y))(),
  "a class body": lambda a, b: type("Body", (), {"a": a, "b": b}).__name__,
  "map": lambda a, b: list(map(use, (a, b))),
  "sorted": lambda a, b: sorted((a, b), key=lambda x: float(x.sum())),
}
# Functions that keep their first view.
KEEPS: dict[str, Callable[[Any, Any], Any]] = {
  "a name": lambda a, b: kept.append(a),
  "a callee's return value": lambda a, b: kept.append(one(one(a))),
  "the stack of a generator": lambda a, b: [steps := walk(a), next(steps), kept.append(steps)],
  "a default": lambda a, b: kept.append(lambda x=a: x),
  "an unpacked list": lambda *both: kept.extend([*both][:1]),
  "a comprehension": lambda a, b: kept.append([x for x in (a, b) if x is a]),
  "a cell": lambda a, b: kept.append(lambda: a),
  "a generator's frame": lambda a, b: kept.append(x for x in [a]),
}


def called(function: Callable[[Any, Any], Any], times: int = 1) -> None:
  def look(a: Any, b: Any) -> Any:
    function(a, b)
    return ANSWER

  gate = cg.gate(look, out=SCALAR, effect="io", name=f"references{next(names)}")
  program = jax.jit(lambda x: gate(x * 1, x * 2))
  with cg.errors():
    for _ in range(times):
      jax.block_until_ready(program(numbers(64)))


@pytest.mark.parametrize(
  "way",
  [pytest.param(way, marks=[frees_functions] * (way == "a class body")) for way in DROPPED],
)
def test_views_that_a_call_drops_are_no_escape(way: str) -> None:
  called(DROPPED[way], times=3)


def test_code_that_runs_often_is_no_escape() -> None:
  called(lambda a, b: [use(one(x), y) for x in (a, b) for y in (a, b)], times=3000)


@pytest.mark.parametrize("way", KEEPS)
def test_a_view_that_a_call_keeps_is_an_escape_of_this_view_alone(way: str) -> None:
  kept.clear()
  with pytest.raises(cg.EscapedViewError, match="argument 'a': a view") as caught:
    called(KEEPS[way])
  assert "argument 'b'" not in str(caught.value)
  assert "still points" not in str(caught.value)
  kept.clear()


@pytest.mark.parametrize("holders_of_it", range(4))
def test_each_holder_counts_once(holders_of_it: int) -> None:
  suspect = ("argument", 0, np.zeros(3), 0, 24)
  runtimes = [suspect[2]]
  others = [suspect[2] for _ in range(holders_of_it)]
  for _ in range(5000):  # also once the interpreter has specialized the code
    assert escape._others(suspect) == holders_of_it
  del runtimes, others
  assert escape._others(suspect) == -1


@reads_frames
@pytest.mark.parametrize(("borrows", "counted"), [(False, 3), (True, 2)])
def test_arguments_that_may_be_borrowed_hide_no_holder(
  borrows: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The frame of a thread with the most variables of a view counts, no other."""
  monkeypatch.setattr(holders, "_BORROWS", borrows)
  array, arrived, go_on = np.zeros(3), threading.Event(), threading.Event()

  def outer(given: Any) -> None:
    twice = given
    inner(given)
    del twice

  def inner(given: Any) -> None:
    arrived.set()
    go_on.wait(60)
    del given

  thread = threading.Thread(target=outer, args=(array,))
  thread.start()
  arrived.wait(60)
  try:
    found = [one for one in holders._running_frames().values() if isinstance(one, list)]
    assert sum(value is array for values in found for value in values) == counted
  finally:
    go_on.set()
    thread.join()


@reads_frames
@pytest.mark.parametrize("borrows", [False, True])
def test_a_thread_that_passes_a_view_on_holds_no_address(
  borrows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(holders, "_BORROWS", borrows or holders._BORROWS)
  threads: list[threading.Thread] = []
  seen: list[Any] = []
  arrived, go_on = threading.Event(), threading.Event()

  def wait(part: Any) -> None:
    arrived.set()
    go_on.wait(60)
    seen.append(part.copy())

  def leak(x: Any) -> Any:
    threads.append(threading.Thread(target=wait, args=(x[5:-5],)))
    threads[0].start()
    arrived.wait(60)

  try:
    with pytest.raises(cg.EscapedViewError) as caught:
      called(lambda a, b: leak(a))
    assert "still points" not in str(caught.value)
    reuse_memory()
  finally:
    go_on.set()
    threads[0].join()
  np.testing.assert_array_equal(seen[0], numbers(64)[5:-5])
