# SPDX-License-Identifier: Apache-2.0
"""Channels: policies and their counters, consumers, what is lost and what is not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import until

import callgate as cg
from callgate._part import Wait
from callgate._runtime import lifecycle
from callgate._tap import channel as channel_module
from callgate._tap import target
from callgate._tap.channel import open_channels


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
  """A test that fails half-way must not take the next ones along."""
  yield
  for channel in list(open_channels().values()):
    channel.close(timeout=5)


class Gatekeeper:
  """A consumer that lets nothing through until it is opened."""

  def __init__(self) -> None:
    self.entered, self.open = threading.Event(), threading.Event()
    self.seen: list[Any] = []

  def __call__(self, value: Any) -> None:
    self.entered.set()
    assert self.open.wait(60)
    self.seen.append(np.asarray(value).tolist())


def sender(name: str, **options: Any) -> Any:
  """A program that taps 0, 1, ... n - 1 to the channel `name`."""
  body = lambda i, c: (cg.tap(i, name, **options), c)[1]
  return jax.jit(lambda n: jax.lax.fori_loop(0, n, body, 0))


def balanced(stats: dict[str, int]) -> bool:
  return stats["sent"] == stats["delivered"] + stats["dropped"] + stats["pending"]


# -- policies ------------------------------------------------------------------------------------
def test_block_loses_nothing_however_small_the_channel():
  seen: list[Any] = []
  with cg.channel("t", capacity=1024, to=lambda v: seen.append(int(v))) as channel:
    sender("t")(5000)
  assert seen == list(range(5000))
  stats = channel.stats()
  assert (stats["sent"], stats["delivered"], stats["dropped"], stats["pending"]) == (
    5000,
    5000,
    0,
    0,
  )
  assert 0 < stats["high_water"] <= 1024


def test_drop_new_drops_what_finds_no_room():
  keeper = Gatekeeper()
  channel = cg.channel("t", capacity=1024, on_full="drop_new", to=keeper)
  program = sender("t")
  jax.block_until_ready(program(1))
  assert keeper.entered.wait(60)
  jax.block_until_ready(program(100))
  until(lambda: channel.stats()["sent"] == 101)  # a GPU's records come later
  stats = channel.stats()
  assert balanced(stats)
  assert stats["dropped"] > 80
  keeper.open.set()
  cg.barrier()
  assert keeper.seen == [0, *range(len(keeper.seen) - 1)]
  assert len(keeper.seen) == channel.stats()["delivered"] == 101 - stats["dropped"]
  channel.close()


def test_drop_old_keeps_the_newest():
  keeper = Gatekeeper()
  channel = cg.channel("t", capacity=1024, on_full="drop_old", to=keeper)
  program = sender("t")
  jax.block_until_ready(program(1))
  assert keeper.entered.wait(60)
  jax.block_until_ready(program(100))
  keeper.open.set()
  cg.barrier()
  kept = keeper.seen[1:]
  assert kept == list(range(100 - len(kept), 100))
  assert 0 < len(kept) < 20
  stats = channel.stats()
  assert balanced(stats)
  assert stats["dropped"] == 100 - len(kept)
  channel.close()


def test_sample_takes_no_more_than_its_rate():
  seen: list[Any] = []
  with cg.channel("t", on_full="sample", rate=0.001, to=seen.append) as channel:
    jax.block_until_ready(sender("t")(1000))
  assert [int(v) for v in seen] == [0]
  assert channel.stats()["dropped"] == 999


def test_counters_balance_at_any_time():
  channel = cg.channel("t", capacity=4096, on_full="drop_old", to=lambda v: None)
  done = threading.Event()
  unbalanced: list[dict[str, int]] = []

  def watch() -> None:
    while not done.is_set():
      stats = channel.stats()
      if not balanced(stats) or min(stats.values()) < 0:
        unbalanced.append(stats)

  watcher = threading.Thread(target=watch)
  watcher.start()
  jax.block_until_ready(sender("t")(50_000))
  done.set()
  watcher.join()
  channel.close()
  assert not unbalanced
  assert channel.stats()["sent"] == 50_000


def test_records_larger_than_the_channel_go_one_by_one():
  seen: list[Any] = []
  with cg.channel("t", capacity="4KiB", to=seen.append) as channel:
    program = jax.jit(lambda x: cg.tap(x, "t"))
    for i in range(5):
      program(jnp.full(10_000, i))
  assert [v.tolist() for v in seen] == [[i] * 10_000 for i in range(5)]
  assert channel.stats()["delivered"] == 5


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("consumers", [1, 2])
def test_large_arrays_are_a_consumer_s_own_to_keep_and_to_change(consumers: int, batch: int | None):
  kept: list[list[Any]] = [[] for _ in range(consumers)]

  def keeper(own: list[Any]) -> Any:
    def keep(value: Any) -> None:
      value += 100 * len(own)
      own.append(value)

    return keep

  size = 1 << 19  # 2 MiB each
  with cg.channel("t", capacity="4MiB", to=[keeper(own) for own in kept], batch=batch):
    program = jax.jit(lambda x: cg.tap(x, "t"))
    for i in range(6):
      program(jnp.full(size, i, jnp.float32))
  for own in kept:
    assert [float(v.ravel()[0]) for v in own] == [i + 100 * i for i in range(6)]
    assert all((v == v.ravel()[0]).all() for v in own)


@pytest.mark.parametrize("batch", [None, 1])
def test_a_small_leaf_or_lane_that_is_kept_does_not_hold_the_rest_of_a_large_record(
  batch: int | None,
):
  leaves: list[dict[str, Any]] = []
  lanes: list[Any] = []
  with cg.channel("leaves", to=leaves.append, batch=batch), cg.channel("lanes", to=lanes.append):
    jax.jit(lambda x: cg.tap({"large": x, "small": x[:4]}, "leaves"))(jnp.arange(1 << 19) * 1.0)
    jax.jit(jax.vmap(lambda x: cg.tap(x, "lanes")))(jnp.arange(1 << 19).reshape(8, -1))
  assert leaves[0]["small"].ravel().tolist() == [0, 1, 2, 3]
  small = leaves[0]["small"]
  while isinstance(small.base, np.ndarray):
    small = small.base
  assert small.base is None  # memory of its own
  assert small.nbytes == 16
  assert leaves[0]["large"].ravel()[-1] == (1 << 19) - 1
  starts = [lane.__array_interface__["data"][0] for lane in lanes]
  apart = [after - before for before, after in itertools.pairwise(starts)]
  assert len(lanes) == 8
  assert set(apart) != {lanes[0].nbytes}, "they lie in one block"


# -- consumers -----------------------------------------------------------------------------------
def test_consumers_of_one_channel_all_get_all_and_do_not_hurt_each_other():
  first: list[Any] = []
  last: list[Any] = []

  def bad(value: Any) -> None:
    raise KeyError(int(value))

  channel = cg.channel("t", to=[first.append, bad, last.append])
  jax.block_until_ready(sender("t")(3))
  with pytest.raises(KeyError) as error:
    channel.flush()
  assert error.value.args == (0,)
  assert [other.args for other in error.value.callgate_others] == [(1,), (2,)]
  assert any("bad of tap 't', record 0" in note for note in error.value.__notes__)
  assert [int(v) for v in first] == [int(v) for v in last] == [0, 1, 2]
  channel.close()  # raised once


@pytest.mark.parametrize("batch", [None, True])
def test_a_slow_consumer_leaves_the_others_their_turns(batch: bool | None):
  sent = threading.Event()
  by_slow: list[int] = []
  by_fast: list[int] = []
  had: list[int] = []

  def slow(value: Any) -> None:
    if not by_slow:
      assert sent.wait(60)  # all the others wait behind it
    by_slow.extend(np.atleast_1d(value).tolist())
    if len(by_slow) >= 100 and not had:
      had.append(len(by_fast))
    time.sleep(0.001 * np.size(value))

  def fast(value: Any) -> None:
    by_fast.extend(np.atleast_1d(value).tolist())

  with cg.channel("t", to=[slow, fast], batch=batch) as channel:
    sender("t")(400).block_until_ready()
    sent.set()
  assert had[0] > 0
  assert by_slow == by_fast == list(range(400))
  assert channel.stats()["delivered"] == 400


def test_a_consumers_exception_comes_out_of_close_barrier_and_errors():
  def bad(value: Any) -> None:
    raise ValueError("of the consumer")

  program = jax.jit(lambda x: cg.tap(x, bad))
  with pytest.raises(ValueError, match="of the consumer"), cg.errors():
    program(1.0)
  program(1.0)
  with pytest.raises(ValueError, match="of the consumer"):
    cg.barrier()
  with pytest.raises(ValueError, match="of the consumer"), cg.channel("t", to=bad):
    sender("t")(1)
  cg.barrier()  # and then it is forgotten


def test_the_blocks_own_exception_is_not_hidden_by_a_consumers():
  def bad(value: Any) -> None:
    raise ValueError("of the consumer")

  def block() -> None:
    with cg.channel("t", to=bad):
      sender("t")(1)
      raise RuntimeError("of the block")

  with pytest.raises(RuntimeError, match="of the block"):
    block()
  with pytest.raises(ValueError, match="of the consumer"):
    cg.barrier()


def test_a_batch_consumer_gets_stacked_arrays():
  got: list[tuple[Any, cg.BatchInfo]] = []
  program = jax.jit(
    lambda x: jax.vmap(lambda a, b: cg.tap({"a": a, "b": b}, "t"), (0, None))(x, x.sum())
  )
  with cg.channel("t", to=lambda value, info: got.append((value, info)), batch=True):
    for k in range(4):
      program(jnp.arange(6.0).reshape(3, 2) + k)
  a = np.concatenate([value["a"] for value, _ in got])
  b = np.concatenate([value["b"] for value, _ in got])
  np.testing.assert_array_equal(
    a, np.concatenate([np.arange(6.0).reshape(3, 2) + k for k in range(4)])
  )
  np.testing.assert_array_equal(b, np.repeat([15.0, 21.0, 27.0, 33.0], 3))
  lanes = np.concatenate([info.lane for _, info in got])
  assert lanes[:, 0].tolist() == [0, 1, 2] * 4
  assert {info.name for _, info in got} == {"t"}
  assert all(len(info.seq) == len(value["a"]) for value, info in got)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_holds_a_taps_records_together_unless_the_order_of_all_matters(ordered: bool):
  def body(i: Any, carry: Any) -> Any:
    cg.tap(i, "t", name="even", ordered=ordered)
    cg.tap(i + 0.5, "t", name="half", ordered=ordered)
    return carry

  jax.block_until_ready(jax.jit(lambda: jax.lax.fori_loop(0, 5, body, 0))())
  cg.barrier()  # on a GPU, too, all are there
  got: list[tuple[str, list[float]]] = []
  keep = lambda value, info: got.append((info.name, value.tolist()))
  with cg.channel("t", to=keep, batch=True):
    pass  # what waited for it comes at once
  if ordered:
    assert got == [pair for i in range(5) for pair in (("even", [i]), ("half", [i + 0.5]))]
  else:
    assert sorted(got) == [("even", [*range(5)]), ("half", [i + 0.5 for i in range(5)])]


def test_large_records_come_to_a_batch_consumer_one_by_one():
  sizes: list[tuple[int, ...]] = []
  program = jax.jit(lambda x: (cg.tap(x[0], "t", name="small"), cg.tap(x, "t", name="large")))
  with cg.channel("t", to=lambda value: sizes.append(value.shape), batch=True):
    for _ in range(5):
      program(jnp.ones(1 << 19))
  assert sizes.count((1, 1 << 19)) == 5
  assert sum(shape[0] for shape in sizes if len(shape) == 1) == 5


def test_a_batch_has_at_most_so_many_rows():
  sizes: list[int] = []
  with cg.channel("t", to=lambda value: sizes.append(len(value)), batch=7):
    sender("t")(100)
  assert sum(sizes) == 100
  assert max(sizes) <= 7


def test_records_iterates_until_the_channel_is_closed():
  channel = cg.channel("t")
  jax.block_until_ready(sender("t")(3))  # they wait for a consumer
  records = channel.records()
  assert [int(next(records).value) for _ in range(3)] == [0, 1, 2]
  jax.block_until_ready(sender("t")(2000))
  threading.Thread(target=channel.close).start()
  rest = list(records)
  assert [int(r.value) for r in rest] == list(range(2000))
  assert rest[0].info.name == "t"
  assert list(channel.records()) == []


def test_consumers_come_and_go():
  early: list[Any] = []
  late: list[Any] = []
  with cg.channel("t", to=early.append) as channel:
    program = sender("t")
    jax.block_until_ready(program(1))
    channel.flush()
    channel.add(late.append)
    jax.block_until_ready(program(2))
    channel.flush()
    channel.remove(early.append)
    jax.block_until_ready(program(3))
    with pytest.raises(cg.GateDefinitionError, match="expected one of its consumers"):
      channel.remove(early.append)
  assert [int(v) for v in early] == [0, 0, 1]
  assert [int(v) for v in late] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("batch", [None, 2])
def test_a_consumer_that_takes_itself_out_is_not_called_again(batch: int | None):
  seen: list[int] = []

  def consumer(value: Any) -> None:
    seen.append(np.atleast_1d(value).tolist()[-1])
    if seen[-1] >= 3:
      channel.remove(consumer)

  with cg.channel("t", batch=batch) as channel:
    jax.block_until_ready(sender("t")(100))  # all in one delivery
    channel.add(consumer)
    channel.flush()
  assert seen == ([1, 3] if batch else [0, 1, 2, 3])


def test_a_consumer_that_another_takes_out_is_not_called_any_more(tmp_path):
  late: list[Any] = []
  file = cg.sinks.JSONL(tmp_path / "a.jsonl")

  def first(value: Any) -> None:
    if int(value) == 0:
      channel.remove(late.append)
      channel.remove(file)

  with cg.channel("t", to=[first, late.append, file]) as channel:
    jax.block_until_ready(sender("t")(100))
  assert late == []
  assert (tmp_path / "a.jsonl").read_text() == ""


class Sink:
  """A sink that writes down what is done to it."""

  def __init__(self, fail: str = "") -> None:
    self.calls: list[Any] = []
    self._fail = fail

  def open(self, channel: str) -> None:
    self.calls.append(("open", channel))

  def write(self, records: Any) -> None:
    self.calls.append(("write", [int(r.value) for r in records]))
    if self._fail == "write":
      raise OSError("disk full")

  def flush(self) -> None:
    self.calls.append("flush")

  def close(self) -> None:
    self.calls.append("close")


def test_a_sink_is_opened_written_flushed_and_closed():
  sink = Sink()
  with cg.channel("t", to=sink) as channel:
    jax.block_until_ready(sender("t")(3))
    channel.flush()
    assert "flush" in sink.calls
  assert sink.calls[0] == ("open", "t")
  assert sink.calls[-1] == "close"
  assert [v for call in sink.calls if call[0] == "write" for v in call[1]] == [0, 1, 2]


def test_a_failing_sink_is_closed_and_reported():
  sink = Sink(fail="write")
  with pytest.raises(OSError, match="disk full"), cg.channel("t", to=sink):
    sender("t")(1)
  assert sink.calls[-1] == "close"


def test_a_sink_that_cannot_be_opened_leaves_the_name_and_the_records(tmp_path):
  class Broken(Sink):
    def open(self, channel: str) -> None:
      raise OSError("no such disk")

  program = sender("t")
  jax.block_until_ready(program(3))  # wait for the channel
  before, seen = Sink(), []
  with pytest.raises(OSError, match="no such disk"):
    cg.channel("t", to=[before, Broken(), seen.append])
  assert before.calls == [("open", "t"), "close"]
  with cg.channel("t", to=seen.append) as channel:
    with pytest.raises(OSError, match="no such disk"):
      channel.add(Broken())
    after = Sink()
    with pytest.raises(ValueError, match="'t' is open already"):
      cg.channel("t", to=after)
    jax.block_until_ready(program(1))
  assert [int(v) for v in seen] == [0, 1, 2, 0]
  assert after.calls == []


# -- names ---------------------------------------------------------------------------------------
def test_records_to_a_name_that_is_not_open_wait_for_the_next_channel():
  program = sender("later")
  jax.block_until_ready(program(3))
  seen: list[Any] = []
  second: list[Any] = []
  with cg.channel("later", to=[seen.append, second.append]) as channel:
    jax.block_until_ready(program(2))
  assert second == seen
  assert [int(v) for v in seen] == [0, 1, 2, 0, 1]
  assert channel.stats()["sent"] == channel.stats()["delivered"] == 5
  with cg.channel("later", to=seen.append):
    pass
  assert len(seen) == 5


def test_one_program_sends_to_whatever_channel_is_open():
  program = sender("t")
  for count in (2, 3):
    seen: list[Any] = []
    with cg.channel("t", to=seen.append):
      program(count)
    assert len(seen) == count


def test_a_name_is_taken_while_its_channel_is_open():
  with cg.channel("t"), pytest.raises(ValueError, match="'t' is open already"):
    cg.channel("t")
  with cg.channel("t"):
    pass


def test_a_channel_object_is_a_target_too():
  seen: list[Any] = []
  with cg.channel("t", to=seen.append) as channel:
    jax.jit(lambda x: cg.tap(x, channel))(2.0)
  assert seen == [2.0]


# -- waiting -------------------------------------------------------------------------------------
def test_flush_and_close_give_up_after_their_time():
  keeper = Gatekeeper()
  channel = cg.channel("t", to=keeper)
  jax.block_until_ready(sender("t")(2))
  with pytest.raises(TimeoutError, match=r"channel 't': \d record\(s\) still wait"):
    channel.flush(timeout=0.1)
  with pytest.raises(TimeoutError, match=r"records still wait after 2 s: \{'t'"):
    cg.barrier(timeout=2)
  with pytest.raises(TimeoutError, match="closed with"):
    channel.close(timeout=0.1)
  keeper.open.set()
  deadline = time.monotonic() + 60
  while len(keeper.seen) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_the_barrier_covers_programs_of_other_threads_and_dropped_results():
  seen: list[Any] = []
  go = threading.Event()
  wait = cg.gate(lambda x: (go.wait(60), x)[1], out=lambda x: x, effect="io", thread="own")

  def program(x):
    return cg.tap(wait(x), seen.append)

  thread = threading.Thread(
    target=lambda: [jax.jit(program)(jnp.float32(i)) for i in range(2)] and None
  )
  thread.start()
  threading.Timer(0.2, go.set).start()
  thread.join()
  cg.barrier()
  assert sorted(map(float, seen)) == [0.0, 1.0]


def test_a_consumer_may_run_programs_that_tap():
  inner: list[Any] = []
  square = jax.jit(lambda x: cg.tap(x * x, inner.append))
  seen: list[float] = []

  def consumer(value: Any) -> None:
    seen.append(float(square(value)))

  with cg.channel("t", capacity=1024, to=consumer):
    sender("t")(40)
  cg.barrier()
  assert seen == [float(i * i) for i in range(40)]
  assert sorted(map(float, inner)) == seen


def test_a_consumer_may_tap_into_its_own_full_channel():
  seen: list[int] = []
  again = jax.jit(lambda x: cg.tap(x + 1000, "t"))

  def consumer(value: Any) -> None:
    seen.append(int(value))
    if value < 1000:
      jax.block_until_ready(again(value))

  with cg.channel("t", capacity=1024, to=consumer):
    sender("t")(50)
    cg.barrier()
  assert sorted(seen) == sorted([*range(50), *range(1000, 1050)])


@pytest.mark.parametrize(
  ("options", "text"),
  [
    (
      {"capacity": "many"},
      "capacity: expected a number of bytes, such as 65536 or '64MiB', got 'many'",
    ),
    ({"capacity": 0}, "capacity: expected a number of bytes"),
    ({"on_full": "wait"}, "on_full: expected 'block'"),
    ({"rate": 0}, "rate: expected records a second"),
    ({"to": 3}, "to: expected functions or sinks, got 3"),
    ({"batch": 0}, "batch: expected a number of rows"),
  ],
)
def test_wrong_options_are_refused_and_leave_the_name_free(options, text):
  with pytest.raises(cg.GateDefinitionError) as error:
    cg.channel("t", **options)
  assert text in str(error.value)
  cg.channel("t").close()


@pytest.mark.parametrize("name", ["", "default", "a\nb", 3])
def test_wrong_names_are_refused(name):
  with pytest.raises(cg.GateDefinitionError, match="name"):
    cg.channel(name)


def test_a_closed_channel_takes_no_consumer() -> None:
  channel = cg.channel("is closed")
  channel.close()
  with pytest.raises(ValueError, match="'is closed': add: expected an open channel, got a closed"):
    channel.add(print)


def test_at_the_exit_channels_that_hang_share_the_time(monkeypatch, capfd):
  class Hanging:
    name = "hanging"
    given: list[float] = []  # noqa: RUF012

    def close(self, timeout: float) -> bool:
      self.given.append(timeout)
      time.sleep(timeout)
      return False

    _close = close

    def stats(self) -> dict[str, int]:
      return {"pending": 1}

  monkeypatch.setattr(channel_module, "_open", {str(i): Hanging() for i in range(3)})
  monkeypatch.setattr(target, "_own", {str(i): Hanging() for i in range(3)})
  monkeypatch.setattr(lifecycle, "LAST_SECONDS", 0.01)
  channel_module.close_all(Wait(0.2))
  assert capfd.readouterr().err.count("not delivered at the end of the program: ") == 6
  assert Hanging.given[0] <= 0.2
  assert Hanging.given[1:] == [0.01] * 5


@pytest.mark.parametrize("lone", ["of a channel", "of a tap"])
def test_what_a_slow_function_has_had_counts_as_delivered(lone: str) -> None:
  behind: list[int] = []

  def slow(value: Any) -> None:
    del value
    behind.append(before + len(behind) - stats()["delivered"])
    time.sleep(0.006)  # a turn is a few of these

  with cg.channel("counted", to=slow) as channel:
    stats = target.start_channel(target.DEFAULT).stats if lone == "of a tap" else channel.stats
    before = stats()["delivered"]
    to = slow if lone == "of a tap" else channel
    program = jax.jit(lambda: jax.lax.fori_loop(0, 100, lambda i, x: cg.tap(x + 1, to), 0.0))
    program()
    cg.barrier()
  assert len(behind) == 100
  assert 0 <= min(behind) <= max(behind) <= 8
