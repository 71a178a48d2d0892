# SPDX-License-Identifier: Apache-2.0
"""Channels: bounded streams of records from compiled programs to consumers (src/channel)."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from callgate import _callgate, _part
from callgate._core import errors, exact, failures, foreign, options
from callgate._core.public import Uncopied
from callgate._core.where import Where, where
from callgate._part import FOREVER, Part, Phase, Wait, joins
from callgate._runtime import barrier, lifecycle
from callgate._tap import consumers as _consumers
from callgate._tap import delivery, target
from callgate._tap.consumers import check_not_forked
from callgate._tap.records import Record

OnFull = Literal["block", "drop_new", "drop_old", "sample"]
# None while its sinks are being opened. Guarded by _lock, but for the entry of the thread that
# opens it; emptied by `Channel.close`.
_open: dict[str, Channel | None] = {}
_lock = threading.Lock()
# Sinks with every channel that has a consumer of its user's: `make(name)` makes one. Guarded by
# _lock; emptied by `unwatch`.
_watchers: dict[Callable[[str], Any], list[tuple[Channel, delivery.Attached]]] = {}


class Channel(Uncopied):
  """An open channel; made by `callgate.channel`. A context manager that closes it.

  Attributes:
    name: what taps send to it by.
  """

  def __init__(
    self, name: str, capacity: str | int, on_full: OnFull, rate: float, to: Any, batch: int | None,
    place: Where | None = None, *, stands_in: bool = False,
  ) -> None:  # fmt: skip
    """One that `stands_in` has watchers alone, until its user opens one of the name."""
    expected = "a line of text"
    name = options.name("channel", name) or options.refuse("channel", "name", expected, name)
    if name == target.DEFAULT:
      raise errors.GateDefinitionError(f"channel: the name '{name}' is that of taps to functions")
    self.name = name
    self._label = label = f"channel '{name}'"
    self._batch = batch is not None and batch is not False
    rows = None if isinstance(batch, bool) else batch
    what = "a number of rows or True"
    self._limit = options.or_none(options.count, label, "batch", rows, least=1, what=what)
    self._consumers: dict[delivery.Attached, _callgate.Consumer] = {}
    what = "'block', 'drop_new', 'drop_old' or 'sample'"
    options.choice(label, "on_full", on_full, get_args(OnFull), what=what)
    rate = options.number(label, "rate", rate, above=0, what="records a second, above 0")
    size = options.byte_size(label, "capacity", capacity)
    check_not_forked()
    self._closed = False
    self._place = place  # where it is defined
    self._stands_in = stands_in
    with _lock:
      old = _open.get(name)
      redefined = old is not None and place is not None and place.redefines(old._place)
      again = redefined or (old is not None and old._stands_in)
      if name in _open and not again:
        another = "close it first, or give this one another name"
        raise ValueError(f"callgate: a channel named '{name}' is open already; {another}")
      _open[name] = None
    opened: list[Any] = []
    try:
      if old is not None:
        retire(old)
      adapted = dict(map(self._adapt, to if isinstance(to, (list, tuple)) else [to]))
      # Sinks first: with one that can't be opened there is no channel, and the records that wait
      # for one of this name wait on.
      for sink in (one.given for one in adapted if one.is_sink()):
        sink.open(name)
        opened.append(sink)
      self._handle = _callgate.Channel(name, capacity=size, on_full=on_full, rate=rate)
      # Programs that were exported, or loaded from a cache, find the channel by this callee.
      self._tap = target.of_channel(name)
    except BaseException:
      for sink in opened:
        with contextlib.suppress(Exception):
          sink.close()
      del _open[name]
      raise
    _open[name] = self
    self._attach(adapted)

  def __repr__(self) -> str:
    return f"<{self._label}{' (closed)' if self._closed else ''}>"

  def __reduce_ex__(self, protocol: Any) -> Any:
    return _named, (self.name,)

  def __enter__(self) -> Channel:
    return self

  def __exit__(self, kind: object, *exception: object) -> None:
    if kind is not None or _callgate.channels_abandoned():
      self._close(None)  # what consumers raised must not hide the block's own exception
    else:
      self._settle()
      self.close()

  def _settle(self) -> None:
    """Waits for the programs that may still send to it."""
    barrier.wait_for_programs()
    _callgate.drain_devices(FOREVER)  # what GPUs have sent is on its way

  # -- consumers ---------------------------------------------------------------------------------
  def add(self, consumer: Any) -> None:
    """Adds a consumer: a function, a sink. It gets the records that are delivered from now on."""
    check_not_forked()
    if self._closed:
      raise ValueError(f"{self._label}: add: expected an open channel, got a closed one")
    attached, native = self._adapt(consumer)
    if attached.is_sink():
      consumer.open(self.name)
    self._attach({attached: native})

  def remove(self, consumer: Any) -> None:
    """Takes a consumer out, and closes it if it is a sink; waits for the call it may be in.

    It is not called any more, not even for records that are with it, also where it called this.

    Raises:
      GateDefinitionError: it is not a consumer of this channel.
    """
    check_not_forked()
    for attached in self._consumers:
      if exact.identity(attached.given) == exact.identity(consumer):
        attached.left = True
        self._handle.remove(self._consumers.pop(attached))
        if hasattr(consumer, "close"):
          consumer.close()
        return
    raise errors.GateDefinitionError(
      f"{self._label}: {foreign.repr_of(consumer)} is not one of its consumers"
    )

  def _adapt(self, consumer: Any) -> tuple[delivery.Attached, _callgate.Consumer]:
    return _consumers.adapt(consumer, self._label, batch=self._batch, limit=self._limit)

  def _attach(self, consumers: dict[delivery.Attached, _callgate.Consumer]) -> None:
    """Adds consumers at once: all get the same records."""
    if consumers or self._stands_in:
      consumers = consumers | self._watched_by()
      self._consumers |= consumers
      self._handle.add([*consumers.values()])

  def _watched_by(self) -> dict[delivery.Attached, _callgate.Consumer]:
    """The watchers' consumers, but for those that it has: without its own, records wait."""
    added: dict[delivery.Attached, _callgate.Consumer] = {}
    with _lock:
      for make, made in _watchers.items():
        made[:] = [one for one in made if not one[0]._closed]
        is_new = not any(channel is self for channel, _ in made)
        if is_new and (sink := make(self.name)) is not None:
          attached, native = self._adapt(sink)
          made.append((self, attached))
          added[attached] = native
    return added

  def _watch(self) -> None:
    if (self._consumers or self._stands_in) and not self._closed and (added := self._watched_by()):
      self._consumers |= added
      self._handle.add([*added.values()])

  def records(self) -> Iterator[Record]:
    """Iterates over the records, from those that wait on; ends when the channel is closed.

    Each call is a consumer of its own; one that is not iterated holds the channel up, as slow ones.
    """
    records = _consumers.Records()
    if self._closed:
      records.close()
    else:
      self.add(records)
    return records

  # -- state -------------------------------------------------------------------------------------
  def stats(self) -> dict[str, int]:
    """Counters: at any time `sent == delivered + dropped + pending`.

    Returns:
      `sent`, `delivered`, `dropped`, `pending`: records (all lanes of a vmap are one). `bytes`:
      payload sent. `high_water`: most bytes that waited at once. `lost`: of the delivered, what
      consumers could not take, a full disk's sink, say (lanes count each, and each consumer).
    """
    return self._handle.stats()

  def flush(self, timeout: float | None = None) -> None:
    """Waits until every record sent so far is with the consumers, and in the sinks' files.

    Records of programs on a GPU are on their way until the programs have run.

    Args:
      timeout: seconds to wait at most; None for no limit.

    Raises:
      TimeoutError: the consumers were not done in time.
      BaseException: what a consumer raised.
    """
    check_not_forked()
    options.or_none(options.seconds, self._label, "timeout", timeout, zero=True)
    if not flushed(self, timeout):
      waiting = f"{self.stats()['pending']} record(s) still wait after {timeout} s"
      raise TimeoutError(f"{self._label}: {waiting}")
    failures.raise_consumer_errors()

  def close(self, timeout: float | None = None) -> None:
    """Delivers what is there, then closes the consumers. Later records wait for a new channel.

    Records of programs on a GPU are there once the programs have run. In a fork's child it does
    nothing: the channel is open in the parent.

    Args:
      timeout: seconds to wait at most; None for no limit.

    Raises:
      TimeoutError: a consumer did not end in time; the message counts what it holds up.
      BaseException: what a consumer raised.
    """
    options.or_none(options.seconds, self._label, "timeout", timeout, zero=True)
    if not self._close(timeout if self._closed else self._drain(timeout)):
      left = f"{self.stats()['pending']} record(s) not delivered after {timeout} s"
      raise TimeoutError(f"{self._label}: closed with {left}")
    failures.raise_consumer_errors()

  def _drain(self, timeout: float | None) -> float | None:
    """Waits for what programs on GPUs have sent; returns the time that is left."""
    wait = Wait(timeout, look=lambda: None)  # Ctrl-C comes in between
    if not _callgate.delivers_here():  # the copies may wait for room that a consumer makes
      wait.until(_callgate.drain_devices)
    return None if timeout is None else wait.left

  def _close(self, timeout: float | None) -> bool:
    if self._closed:
      return True
    self._closed = True
    if _callgate.channels_abandoned():
      return True  # the parent's is open; locks may be held for ever
    with _lock:
      if _open.get(self.name) is self:
        del _open[self.name]
    for one in self._consumers:
      if isinstance(one.given, _consumers.Records):
        one.given.close(ended=False)
    try:
      return self._handle.close(timeout)
    finally:
      for one in self._consumers:
        if one.runs_natively:  # the runtime has closed it
          getattr(one.given, "left", lambda: None)()
      _part.tell("channel closed", self.name)


def channel(
  name: str,
  *,
  capacity: str | int = "64MiB",
  on_full: OnFull = "block",
  rate: float = 100.0,
  to: Any = (),
  batch: int | bool | None = None,
) -> Channel:
  """Opens a `Channel`: taps to `name` send their records to its consumers.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  seen = []
  with cg.channel("loss", to=seen.append) as losses:
    jax.jit(lambda x: cg.tap(x * 2, "loss"))(jnp.float32(3))
  assert seen == [6.0] and losses.stats()["delivered"] == 1
  ```

  Leaving the block waits for the programs that run, delivers every record and closes the consumers.
  While no channel of a name is open, its records wait for the next one (up to 1 MiB of them).

  Args:
    name: the name that taps send to. One channel of a name may be open.
    capacity: bytes that may wait, as a number or as "64MiB", "1GB". Larger records go one by one.
    on_full: what happens if a tap finds no room: "block" (the program waits), "drop_new" (the tap's
      record is dropped), "drop_old" (the oldest records are), "sample" (each tap sends at most
      `rate` records a second).
    rate: records a second, for "sample".
    to: one consumer or several: functions `fn(value)` or `fn(value, info)`, called for each record
      (each lane of a vmap) with NumPy arrays and a `TapInfo`; sinks (`callgate.sinks`). Without
      any, records wait for `Channel.add` or `Channel.records`.
    batch: functions get many records at once, as stacked arrays with a row a record, and a
      `BatchInfo`: at most so many rows, or True for all that are there.

  Raises:
    GateDefinitionError: an option is wrong.
    ValueError: a channel of that name is open already. (One that a notebook's cell, or a module
      that is loaded again, has opened before is closed instead.)
  """
  return Channel(name, capacity, on_full, rate, to, batch, where().definition())


def flushed(one: Channel, timeout: float | None) -> bool:
  """As `Channel.flush`, but False if the time ran out; errors stay for the next that asks."""
  return one._closed or one._handle.flush(one._drain(timeout))  # pyright: ignore[reportPrivateUsage]


def has_stream(one: Channel) -> bool:
  """True if one of its consumers is `sinks.Stream`, which others read a run by."""
  consumers = list(one._consumers)  # pyright: ignore[reportPrivateUsage]
  return any(getattr(each.given, "is_stream", False) for each in consumers)


def stands_in(one: Channel) -> bool:
  """True if it gives way to one of its user's."""
  return one._stands_in  # pyright: ignore[reportPrivateUsage]


def tap_of(one: Channel) -> Any:
  """The runtime's callee for taps to the channel."""
  return one._tap  # pyright: ignore[reportPrivateUsage]


def retire(one: Channel) -> None:
  """Closes a channel for what takes its place; consumers' exceptions are kept for a barrier."""
  one._settle()  # pyright: ignore[reportPrivateUsage]
  one._close(None)  # pyright: ignore[reportPrivateUsage]


def _named(name: str) -> Channel:
  """Finds the channel of a pickle: the one of its name here."""
  if (found := _open.get(name)) is not None:
    return found
  raise pickle.UnpicklingError(
    f"channel '{name}': expected one of this name, open in the process that loads the pickle, got "
    f"none; open it first: cg.channel({name!r}, to=...). Taps to the name itself need none"
  )


def watch(make: Callable[[str], Any]) -> None:
  """Has a sink, `make(name)`, with every open and every later channel that has other consumers.

  It comes opened; None for a channel that is to have none.
  """
  with _lock:
    _watchers[make] = []
  for one in open_channels().values():
    one._watch()  # pyright: ignore[reportPrivateUsage]


def unwatch(make: Callable[[str], Any], *, wait: bool) -> None:
  """Takes the sinks of `watch` out; they get nothing more. Waits for the calls they may be in."""
  with _lock:
    made = _watchers.pop(make, [])
  for _, attached in made:
    attached.left = True
  for channel, attached in made if wait else ():
    if not channel._closed and attached in channel._consumers:  # pyright: ignore[reportPrivateUsage]
      channel.remove(attached.given)


def open_channels() -> dict[str, Channel]:
  """The channels that are open now, by name."""
  return {name: one for name, one in dict(_open).items() if one is not None}


def close_all(wait: Wait) -> None:
  """At the end of the process: closes every channel, and says what could not be delivered.

  The time is for all of them, which deliver side by side.
  """
  least = min(wait.seconds or 0.0, lifecycle.LAST_SECONDS)  # for each, however late
  ends = [(f"channel '{one.name}'", one._close, one.stats) for one in open_channels().values()]  # pyright: ignore[reportPrivateUsage]
  for name, handle in target.own_channels():
    what = "taps to functions" if name == target.DEFAULT else name
    ends.append((what, handle.close, handle.stats))
  left: list[tuple[str, int]] = []  # and how many records there are
  for what, close, stats in ends:
    if not close(max(wait.left, least)):
      left.append((what, stats()["pending"]))
  for name, stats in _callgate.channel_stats().items():
    if stats["pending"]:
      left.append((f"channel '{name}', which was not open", stats["pending"]))
  for what, count in left:
    pending = f"{count} record(s)" if count else "a consumer's close() has not ended"
    print(f"callgate: not delivered at the end of the program: {what}: {pending}", file=sys.stderr)


@joins("channels")
class Channels(Part):
  """Delivers all records before the process ends."""

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "deliver":
      close_all(wait)
