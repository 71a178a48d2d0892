# SPDX-License-Identifier: Apache-2.0
"""Feeds that the host iterates over: the same items, in the same order, as programs take.

Python's own iteration of the iterable is the truth.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import callgate as cg


def items(count: int) -> Iterator[Any]:
  return ({"x": np.full(2, i, np.float32), "n": i} for i in range(count))


def test_a_loop_sees_what_iterating_the_iterable_gives() -> None:
  with cg.feed(items(7)) as feed:
    got = list(feed)
    assert feed.stats()["served"] == 7
    assert list(feed) == []  # it stays at its end
  for left, right in zip(got, items(7), strict=True):
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(left))
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert left["n"].dtype == jnp.int32


def test_the_host_and_programs_take_turns(engine: str) -> None:
  with cg.feed(range(20)) as feed:
    assert iter(feed) is feed
    program = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])
    got = [int(next(feed)), *program().tolist(), int(next(feed)), int(feed.next())]
    assert [*got, *map(int, feed)] == list(range(20))


def test_the_host_waits_for_programs_that_it_called_before() -> None:
  go = threading.Event()

  def iterate() -> Iterator[int]:
    yield 0
    assert go.wait(60)
    yield from range(1, 10)

  with cg.feed(iterate()) as feed:
    program = jax.jit(
      lambda x: (jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=5)[1], x @ x @ x)
    )
    square = jnp.ones((300, 300))
    program.lower(square).compile()
    opener = threading.Thread(target=lambda: (until(lambda: feed.stats()["waited"] > 0), go.set()))
    opener.start()
    taken, _ = program(square)  # not there yet
    assert int(next(feed)) == 5
    assert taken.tolist() == [0, 1, 2, 3, 4]
    opener.join()


def test_a_default_goes_on_for_ever() -> None:
  with cg.feed([1, 2], default=-1) as feed:
    assert [int(x) for x, _ in zip(feed, range(5), strict=False)] == [1, 2, -1, -1, -1]


def test_the_iterators_exception_comes_as_it_is_and_again() -> None:
  error = OSError("gone")

  def iterate() -> Iterator[float]:
    yield 0.0
    raise error

  with cg.feed(iterate()) as feed:
    assert float(next(feed)) == 0
    for _ in range(2):
      with pytest.raises(OSError, match="gone") as caught:
        next(feed)
      assert caught.value is error


def test_the_end_of_another_feed_that_the_iterator_reads_is_its_own_error() -> None:
  def doubled(inner: cg.Feed) -> Iterator[Any]:
    while True:
      with cg.errors():
        yield 2 * int(inner.next())

  with cg.feed(range(2)) as inner, cg.feed(doubled(inner)) as outer:
    assert [int(next(outer)), int(next(outer))] == [0, 2]
    with pytest.raises(cg.EndOfFeed, match=f"feed '{inner.name}' ended after 2"):
      next(outer)


def test_a_feed_may_be_fed_with_a_feed() -> None:
  with cg.feed(range(9)) as inner, cg.feed(x * 2 for x in inner) as outer:
    program = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, outer.next()), 0, length=4)[1])
    assert [*program().tolist(), *map(int, outer)] == list(range(0, 18, 2))


def test_a_closed_feed_says_so() -> None:
  feed = cg.feed(range(5), name="closed before")
  feed.close()
  with pytest.raises(cg.GateError, match="feed 'closed before' is closed"):
    next(feed)


@pytest.mark.parametrize(
  "trace",
  [
    jax.jit,
    jax.vmap,
    jax.grad,
    lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), 0), x, None, 1),
  ],
)
def test_while_jax_traces_iterating_is_an_error_that_says_what_to_use(
  trace: Callable[..., Any],
) -> None:
  with cg.feed((float(i) for i in range(5)), name="traced") as feed:
    expected = r"feed 'traced': a program that is being traced .*; use feed\.next\(\)"
    x = jnp.ones(2) if trace is jax.vmap else 1.0
    for take in (next, lambda feed: next(iter(feed))):
      with pytest.raises(cg.GateError, match=expected):
        trace(lambda x, take=take: x * take(feed))(x)
    assert float(next(feed)) == 0  # none was taken


def test_several_threads_get_each_item_once() -> None:
  with cg.feed(range(400), prefetch=4) as feed:
    got: list[list[int]] = [[] for _ in range(4)]
    workers = [threading.Thread(target=lambda own=own: own.extend(map(int, feed))) for own in got]
    for worker in workers:
      worker.start()
    for worker in workers:
      worker.join(120)
  assert sorted(x for own in got for x in own) == list(range(400))
  assert all(own == sorted(own) for own in got)


def test_a_feed_s_error_names_the_feed_and_is_noted_once(engine: str) -> None:
  def broken() -> Iterator[Any]:
    yield np.float32(1)
    raise ValueError("broken")

  with cg.feed(broken(), name=f"broken.{engine}") as feed:
    assert jax.jit(feed.next)() == 1
    for program in (lambda: feed.next() + 1, lambda: feed.next() + 2, lambda: feed.next() + 3):
      with pytest.raises(ValueError, match="broken") as caught, cg.errors():
        jax.jit(program)()
      notes = [note for note in caught.value.__notes__ if "raised in" in note]
      assert len(notes) == 1
      assert notes[0].startswith(f"callgate: raised in feed '{feed.name}'")
