# SPDX-License-Identifier: Apache-2.0
"""Feeds in programs for CUDA: what they give, and that their copies run ahead of the program."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import fake_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import OUT_OF_MEMORY, FakeCuda
from waiting import until

import callgate as cg
from callgate import _callgate

WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")


def items(count: int | None = None, size: int = 3) -> Iterator[Any]:
  numbers = itertools.count() if count is None else range(count)
  return (np.full(size, i, np.float32) for i in numbers)


def uploads(fake: FakeCuda) -> int:
  return fake.calls("cuMemcpyHtoDAsync_v2")


def in_use() -> tuple[int, int]:
  gc.collect()
  _callgate.drain()
  assert _callgate.drain_devices(60)
  return _callgate.device_memory_in_use()


@pytest.fixture(autouse=True)
def nothing_is_left(fake: FakeCuda) -> Iterator[None]:
  yield
  until(lambda: in_use() == (0, 0), "all memory given back")


def test_items_come_in_order_within_and_across_programs(fake: FakeCuda) -> None:
  with cg.feed(items()) as feed:
    f = lambda x: jax.lax.scan(lambda c, _: (c + feed.next(), feed.next()), x, length=3)
    program = fake_programs.load(fake, f, np.zeros(3, np.float32))
    for first in (0, 6):
      total, odd = program(np.zeros(3, np.float32))
      np.testing.assert_array_equal(total, np.full(3, 3 * first + 6))
      np.testing.assert_array_equal(odd[:, 0], [first + 1, first + 3, first + 5])
    assert feed.stats()["served"] == 12


def test_pytrees_and_dtypes_come_as_they_are(fake: FakeCuda) -> None:
  item = {
    "b": np.array([True, False]),
    "h": (np.arange(4, dtype=np.float16).reshape(2, 2), np.int8(3)),
    "z": jnp.ones(2, jnp.bfloat16),
    "empty": np.zeros((0, 2), np.int32),
  }
  with cg.feed(itertools.repeat(item)) as feed:
    got = fake_programs.run(fake, lambda: feed.next())
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(item), strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(np.asarray(one, float), np.asarray(other, float))


def test_each_lane_takes_an_item(fake: FakeCuda) -> None:
  with cg.feed(items()) as feed:
    f = jax.vmap(jax.vmap(lambda x: feed.next() + x))
    got = fake_programs.run(fake, f, np.zeros((2, 3), np.float32))
  np.testing.assert_array_equal(got[..., 0], np.arange(6).reshape(2, 3))


def test_nothing_on_the_host_waits_for_the_gpu(fake: FakeCuda) -> None:
  with cg.feed(items()) as feed:
    program = fake_programs.load(fake, lambda x: feed.next() + x, np.zeros(3, np.float32))
    stream = fake.stream()
    stream.hold()
    pending = [program.start(np.zeros(3, np.float32), stream=stream) for _ in range(5)]
    assert stream.queued() > 0
    stream.release()
    for i, one in enumerate(pending):
      np.testing.assert_array_equal(one.get(), np.full(3, i))
  assert fake.calls("cuStreamSynchronize") == fake.calls("cuCtxSynchronize") == 0


def test_uploads_start_before_the_program_asks(fake: FakeCuda) -> None:
  with cg.feed(items(), prefetch=3) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    until(lambda: feed.stats()["queued"] == 3)
    assert uploads(fake) == 0  # nobody has asked, so it is not known where to
    stream = fake.stream()
    stream.hold()
    pending = program.start(stream=stream)
    until(lambda: uploads(fake) >= 3)  # of the item that was taken, and of those that wait
    assert feed.stats()["served"] == 1
    assert stream.queued() > 0
    stream.release()
    np.testing.assert_array_equal(pending.get(), np.zeros(3))
    np.testing.assert_array_equal(program(), np.ones(3))
    until(lambda: uploads(fake) >= feed.stats()["produced"])


def test_an_item_goes_to_the_device_that_asks(fake: FakeCuda) -> None:
  with cg.feed(items(), prefetch=4) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    streams = [fake.stream(0), fake.stream(1)]
    got = [program(stream=streams[i % 2])[0] for i in range(10)]
  assert got == list(range(10))


def test_the_end_a_default_and_errors_are_as_on_the_cpu(fake: FakeCuda) -> None:
  with cg.feed(items(2)) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    assert [program()[0], program()[0]] == [0, 1]
    with pytest.raises(fake_programs.ProgramError, match=r"ended after 2 item\(s\)"):
      program()
    assert isinstance(cg.last_error(), cg.EndOfFeed)
  with pytest.raises(fake_programs.ProgramError, match="is closed"):
    program()
  cg.last_error()

  with cg.feed(items(1), default=np.full(3, 7, np.float32)) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    assert [program()[0] for _ in range(3)] == [0, 7, 7]
    assert feed.stats()["served"] == 3

  def failing() -> Iterator[Any]:
    yield np.zeros(3, np.float32)
    raise KeyError("no more of these")

  with cg.feed(failing()) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    program()
    with pytest.raises(fake_programs.ProgramError, match="no more of these"):
      program()
    assert isinstance(cg.last_error(), KeyError)


def test_a_program_waits_for_an_item_that_is_not_there(fake: FakeCuda) -> None:
  go = threading.Event()

  def slow() -> Iterator[Any]:
    yield np.zeros(3, np.float32)
    assert go.wait(60)
    yield np.ones(3, np.float32)

  with cg.feed(slow()) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    program()
    before = feed.stats()["waited"]  # for the first item, perhaps
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(program()))
    thread.start()
    until(lambda: feed.stats()["waited"] == before + 1)
    go.set()
    thread.join()
    np.testing.assert_array_equal(got[0], np.ones(3))


def test_an_uploaded_item_that_nobody_asks_for_is_freed(fake: FakeCuda) -> None:
  def run() -> None:
    with cg.feed(items(size=5000), prefetch=4) as feed:
      fake_programs.load(fake, feed.next)()
      until(lambda: uploads(fake) >= 4)

  run()  # the fixture looks at what is left


def test_out_of_memory_is_an_error_of_the_program_that_asks(fake: FakeCuda) -> None:
  with cg.feed(items(size=3_000_001), prefetch=1) as feed:
    program = fake_programs.load(fake, lambda: feed.next())
    fake.fail("cuMemHostAlloc", OUT_OF_MEMORY, count=-1)
    with pytest.raises(fake_programs.ProgramError, match="cuMemHostAlloc"):
      program()
    cg.last_error()
    fake.clear()
    assert program()[0] == 1


def test_a_gate_without_arguments_on_the_host_does_not_wait_for_the_stream(fake: FakeCuda) -> None:
  out = jax.ShapeDtypeStruct((3,), np.float32)
  gate = cg.gate(lambda: np.ones(3, np.float32), out=out, effect="io")
  program = fake_programs.load(fake, lambda x: gate() + x, np.zeros(3, np.float32))
  stream = fake.stream()
  stream.hold()
  pending = program.start(np.zeros(3, np.float32), stream=stream)
  stream.release()
  np.testing.assert_array_equal(pending.get(), np.ones(3))
