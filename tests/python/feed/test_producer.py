# SPDX-License-Identifier: Apache-2.0
"""The producer of a feed: how far ahead it goes, how it fails, and how and when it ends.

Threads wait for each other's events here, never for a time to pass.
"""

from __future__ import annotations

import gc
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import callgate as cg

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Steps:
  """An iterator that counts, and gives an item for each permit, or for each call once `free`."""

  def __init__(self, count: int = 1000, *, free: bool = True) -> None:
    self.given = 0
    self.count = count
    self.free = free
    self.permits = threading.Semaphore(0)
    self.asked = threading.Semaphore(0)  # released for each call

  def __iter__(self) -> Iterator[np.float32]:
    return self

  def __next__(self) -> np.float32:
    self.asked.release()
    if not self.free:
      assert self.permits.acquire(timeout=60)
    if self.given == self.count:
      raise StopIteration
    self.given += 1
    return np.float32(self.given - 1)


def threads(name: str) -> list[threading.Thread]:
  return [t for t in threading.enumerate() if t.name == f"callgate {name}"]


def take(feed: cg.Feed, count: int) -> list[float]:
  return jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=count)[1])().tolist()


# -- ahead ---
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_iterator_is_at_most_prefetch_items_ahead(prefetch: int) -> None:
  steps = Steps()
  with cg.feed(steps, prefetch=prefetch) as feed:
    for taken in (0, 1, 4):
      served = feed.stats()["served"]
      assert take(feed, taken) == list(range(served, served + taken)) if taken else True
      # Full again once the queue was half empty.
      until(lambda s=served + taken: feed.stats()["queued"] > prefetch // 2)
      assert served + taken <= steps.given <= served + taken + prefetch


def test_the_program_waits_only_for_items_that_are_not_there() -> None:
  steps = Steps(free=False)
  with cg.feed(steps, prefetch=3, shape=SCALAR) as feed:
    for _ in range(3):
      steps.permits.release()
    until(lambda: feed.stats()["queued"] == 3)
    assert take(feed, 3) == [0, 1, 2]
    assert feed.stats() == {"produced": 3, "served": 3, "waited": 0, "queued": 0}
    waiter = threading.Thread(target=lambda: until(lambda: feed.stats()["waited"] == 1))
    releaser = threading.Thread(target=lambda: (waiter.join(), steps.permits.release()))
    waiter.start()
    releaser.start()
    assert take(feed, 1) == [3]
    releaser.join()
    assert feed.stats() == {"produced": 4, "served": 4, "waited": 1, "queued": 0}
    steps.free = True
    steps.permits.release()


def test_the_first_item_is_pulled_when_the_feed_is_made_only_if_it_is_needed() -> None:
  steps = Steps(free=False)
  with cg.feed(steps, shape=SCALAR) as feed:  # returns though there is no item
    assert feed.stats()["produced"] == 0
    steps.free = True
    steps.permits.release()
    assert take(feed, 2) == [0, 1]


def test_the_iterator_runs_on_one_named_thread() -> None:
  names: set[str] = set()

  def iterate() -> Iterator[float]:
    for i in range(5):
      names.add(threading.current_thread().name)
      yield float(i)

  with cg.feed(iterate(), name="data of one thread") as feed:
    assert take(feed, 5) == [0, 1, 2, 3, 4]
  assert names == {"callgate data of one thread"}
  assert not threads(feed.name)


# -- the end of the data and errors ---
def raised(program: Callable[[], Any]) -> BaseException:
  with pytest.raises(BaseException) as caught, cg.errors():
    jax.block_until_ready(program())
  return caught.value


@pytest.mark.parametrize("compiled", [True, False])
def test_the_end_of_the_data_is_an_error_and_stays_one(compiled: bool) -> None:
  with cg.feed(Steps(3)) as feed:
    run = jax.jit(feed.next) if compiled else feed.next
    assert [float(run()) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
      error = raised(run)
      assert type(error) is cg.EndOfFeed
      assert isinstance(error, cg.GateError)
      assert f"feed '{feed.name}' ended after 3 item(s)" in str(error)
      assert isinstance(cg.last_error(), cg.EndOfFeed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ended after 3"):
      jax.block_until_ready(run())


def test_a_default_is_served_for_ever_after_the_last_item() -> None:
  items = [{"x": np.full(3, i, np.float32), "n": i} for i in range(2)]
  with cg.feed(items, default=-1) as feed:
    program = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=4)[1])
    assert program()["n"].tolist() == [0, 1, -1, -1]
    assert program()["x"].tolist() == [[-1] * 3] * 4
  with cg.feed(items, default={"x": np.float32(7), "n": 5}) as feed:
    lanes = jax.vmap(lambda _: feed.next())(jnp.arange(3))
    assert lanes["x"][:, 1].tolist() == [0, 1, 7]
    assert lanes["n"].tolist() == [0, 1, 5]


def test_an_empty_iterable_has_the_default_s_types() -> None:
  with cg.feed([], default=(np.int8(3), np.zeros(2, bool))) as feed:
    n, flags = feed.next()
  assert (n.dtype, n, flags.shape) == (jnp.int8, 3, (2,))


@pytest.mark.parametrize("failing", [1, 3])
@pytest.mark.parametrize("error", [ValueError("corrupt"), KeyboardInterrupt(), SystemExit(3)])
def test_the_iterators_exception_is_raised_at_its_item(failing: int, error: Any) -> None:
  def iterate() -> Iterator[float]:
    for i in range(failing):
      yield float(i)
    raise error

  with cg.feed(iterate(), default=0) as feed:
    assert take(feed, failing) == list(range(failing))
    first, again = raised(feed.next), raised(jax.jit(feed.next))
  assert first is again is error
  assert "iterate" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_in_the_place_of_the_first_item_is_raised_at_once() -> None:
  def iterate() -> Iterator[float]:
    raise FileNotFoundError("data.bin")
    yield 0.0

  with pytest.raises(FileNotFoundError, match=r"data\.bin"):
    cg.feed(iterate())
  with cg.feed(iterate(), shape=SCALAR) as feed:
    assert isinstance(raised(feed.next), FileNotFoundError)


X = np.zeros((2, 3), np.float32)
WRONG = {
  "shape": ({"x": X.T}, r"item 1\['x'\]: expected float32\[2,3\], got float32\[3,2\]"),
  "dtype": (
    {"x": X.astype(float)},
    r"item 1\['x'\]: expected float32\[2,3\], got float64\[2,3\]",
  ),
  "integer": ({"x": 1}, r"item 1\['x'\]: expected float32\[2,3\], got int32\[\]"),
  "structure": ({"y": X}, "item 1: expected the structure .*'x'.*, got .*'y'"),
  "text": ({"x": "text"}, r"item 1\['x'\]: expected an array or a number .* got str"),
  "large": ({"x": 2**40}, r"item 1\['x'\]: expected .* that JAX can hold, got int 1099511627776"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_item_is_an_error_that_names_it(name: str) -> None:
  item, message = WRONG[name]
  with cg.feed([{"x": X}, item, {"x": X}]) as feed:
    feed.next()
    error = raised(feed.next)
  assert isinstance(error, cg.ResultError)
  with pytest.raises(cg.ResultError, match=f"^feed '{feed.name}': {message}"):
    raise error


def options(*args: Any, **kwargs: Any) -> Callable[[], Any]:
  return lambda: cg.feed(*args, **kwargs)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (options(3), "expected an iterable of items, got int"),
    (options(lambda: [1]), "expected an iterable of items, got function; call the function"),
    (options([1], prefetch=0), "prefetch: expected an integer of 1 or more, got 0"),
    (options([1], prefetch=1.5), "prefetch: expected an integer of 1 or more, got 1.5"),
    (options([1], prefetch=True), "prefetch: expected an integer of 1 or more, got True"),
    (options([]), "the iterable is empty, .*pass shape= or default="),
    (options([()]), "item 0: expected at least one array"),
    (options([np.float64(1)]), "item 0: float64 needs jax_enable_x64; expected float32 without"),
    (options([1], shape=[3]), r"shape\[0\]: expected a value with .shape and .dtype, got 3"),
    (options([1], default=[1]), "default: expected the items' structure"),
    (options([1], default=0.5), r"default: expected int32\[\] or .*, got float32\[\]"),
    (
      options([X], default=np.zeros(4, "f")),
      r"default: expected float32\[2,3\] or .*float32\[4\]",
    ),
    (options([1], shape=jax.ShapeDtypeStruct((), jnp.int4)), "shape: int4 has several elements"),
  ],
)
def test_wrong_options_are_said(make: Callable[[], Any], message: str) -> None:
  before = threading.active_count()
  with pytest.raises(cg.GateDefinitionError, match=message):
    make()
  until(lambda: threading.active_count() <= before)


def test_keys_are_no_items() -> None:
  with pytest.raises(cg.ResultError, match=r"use jax\.random\.key_data"):
    cg.feed([jax.random.key(0)])


# -- the end ---
def test_close_ends_a_producer_that_waits_for_room_and_its_generator() -> None:
  closed = threading.Event()

  def iterate() -> Iterator[float]:
    try:
      yield from map(float, itertools.count())
    finally:
      closed.set()

  feed = cg.feed(iterate(), name="endless")
  assert threads("endless")
  assert feed.close()
  assert closed.is_set()
  assert not threads("endless")
  assert feed.close()  # again
  for run in (feed.next, jax.jit(lambda: feed.next())):
    with pytest.raises(cg.GateError, match="feed 'endless' is closed"):
      run()


def test_close_does_not_wait_for_ever_for_a_slow_iterator() -> None:
  steps = Steps(free=False)
  feed = cg.feed(steps, shape=SCALAR, name="slow steps")
  assert steps.asked.acquire(timeout=60)
  assert not feed.close(timeout=0.01)
  (thread,) = threads("slow steps")
  assert thread.daemon
  steps.permits.release()
  thread.join(60)
  assert not thread.is_alive()


def test_close_fails_a_program_that_waits() -> None:
  steps = Steps(free=False)
  feed = cg.feed(steps, shape=SCALAR, name="awaited")
  errors: list[BaseException] = []
  program = threading.Thread(target=lambda: errors.append(raised(jax.jit(feed.next))))
  program.start()
  until(lambda: feed.stats()["waited"] == 1)
  feed.close(timeout=0)
  program.join(60)
  assert "feed 'awaited' is closed" in str(errors[0])
  steps.free = True
  steps.permits.release()


def test_a_feed_that_nobody_can_read_ends_its_thread(clean_caches: None) -> None:
  for use in (lambda f: None, lambda f: jax.jit(lambda: f.next())(), lambda f: f.next()):
    feed = cg.feed(Steps(), name="forgotten")
    use(feed)
    del feed
    jax.clear_caches()
    gc.collect()
    until(lambda: gc.collect() >= 0 and not threads("forgotten"))


def test_a_program_keeps_its_feed(clean_caches: None) -> None:
  feed = cg.feed(Steps(), name="kept")
  compiled = jax.jit(lambda: feed.next()).lower().compile()  # noqa: F821
  del feed
  jax.clear_caches()
  gc.collect()
  assert [float(compiled()) for _ in range(5)] == [0, 1, 2, 3, 4]
  del compiled
  jax.clear_caches()
  until(lambda: gc.collect() >= 0 and not threads("kept"))


def test_many_threads_take_every_item_once() -> None:
  with cg.feed(Steps(400), prefetch=4, default=-1) as feed:
    program = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=100)[1])
    program.lower().compile()
    got: list[float] = []
    workers = [threading.Thread(target=lambda: got.extend(program().tolist())) for _ in range(4)]
    for worker in workers:
      worker.start()
    for worker in workers:
      worker.join(120)
  assert sorted(got) == list(range(400))
