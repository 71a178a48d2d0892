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
# An entry is None while the channel's sinks are being opened. Guarded by _lock, except for the
# entry of the thread that opens it; emptied by `Channel.close`.
_open: dict[str, Channel | None] = {}
_lock = threading.Lock()
# Sinks for every channel that has a consumer of the user's: `make(name)` makes one. Guarded by
# _lock; emptied by `unwatch`.
_watchers: dict[Callable[[str], Any], list[tuple[Channel, delivery.Attached]]] = {}


class Channel(Uncopied):
  """An open channel, which `callgate.channel` returns; a context manager that closes it.

  Attributes:
    name: the name that taps send to.
  """

  def __init__(
    self, name: str, capacity: str | int, on_full: OnFull, rate: float, to: Any, batch: int | None,
    place: Where | None = None, *, stands_in: bool = False,
  ) -> None:  # fmt: skip
    """Opens it. A channel that `stands_in` has only watchers, until the user opens its name."""
    expected = "a line of text"
    name = options.name("channel", name) or options.refuse("channel", "name", expected, name)
    if name == target.DEFAULT:
      raise errors.GateDefinitionError(f"channel: the name '{name}' is reserved; choose another")
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
    self._place = place  # the line that defines it
    self._stands_in = stands_in
    with _lock:
      old = _open.get(name)
      redefined = old is not None and place is not None and place.redefines(old._place)
      again = redefined or (old is not None and old._stands_in)
      if name in _open and not again:
        another = "close it first, or choose another name"
        raise ValueError(f"callgate: a channel named '{name}' is open already; {another}")
      _open[name] = None
    opened: list[Any] = []
    try:
      if old is not None:
        retire(old)
      adapted = dict(map(self._adapt, to if isinstance(to, (list, tuple)) else [to]))
      # Sinks are opened first: if one can't be opened, no channel is made, and the records that
      # wait for this name keep waiting.
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
      self._close(None)  # a consumer's exception must not hide the block's own
    else:
      self._settle()
      self.close()

  def _settle(self) -> None:
    """Waits for the programs that may still send to it."""
    barrier.wait_for_programs()
    _callgate.drain_devices(FOREVER)  # the records of programs on GPUs are on their way

  # -- consumers ---------------------------------------------------------------------------------
  def add(self, consumer: Any) -> None:
    """Adds a consumer, a function or a sink, which gets the records delivered from now on."""
    check_not_forked()
    if self._closed:
      raise ValueError(f"{self._label}: add: expected an open channel, got a closed one")
    attached, native = self._adapt(consumer)
    if attached.is_sink():
      consumer.open(self.name)
    self._attach({attached: native})

  def remove(self, consumer: Any) -> None:
    """Removes a consumer, and closes it if it is a sink; waits for the end of the call it is in.

    A consumer may remove itself. callgate doesn't call it again, not even with records it already
    has.

    Raises:
      GateDefinitionError: the channel has no such consumer.
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
      f"{self._label}: remove: expected one of its consumers, got {foreign.repr_of(consumer)}"
    )

  def _adapt(self, consumer: Any) -> tuple[delivery.Attached, _callgate.Consumer]:
    return _consumers.adapt(consumer, self._label, batch=self._batch, limit=self._limit)

  def _attach(self, consumers: dict[delivery.Attached, _callgate.Consumer]) -> None:
    """Adds consumers at once, so that all get the same records."""
    if consumers or self._stands_in:
      consumers = consumers | self._watched_by()
      self._consumers |= consumers
      self._handle.add([*consumers.values()])

  def _watched_by(self) -> dict[delivery.Attached, _callgate.Consumer]:
    """Makes consumers for the watchers that have none here yet; carries have no watcher."""
    added: dict[delivery.Attached, _callgate.Consumer] = {}
    if self.name.startswith(target.CHECKPOINTS):
      return added
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
    """Iterates over the records, beginning with waiting ones; ends when the channel is closed.

    Each call adds a consumer. An iterator that isn't read delays the channel, as slow consumers do.
    """
    records = _consumers.Records()
    if self._closed:
      records.close()
    else:
      self.add(records)
    return records

  # -- state -------------------------------------------------------------------------------------
  def stats(self) -> dict[str, int]:
    """Returns counters; `sent == delivered + dropped + pending` at any time.

    - `sent`, `delivered`, `dropped`, `pending`: records; all lanes of a `vmap` count as one.
    - `bytes`: bytes sent. `high_water`: the most bytes that have waited at once.
    - `lost`: delivered records on which a consumer failed, for each lane and consumer.
    """
    return self._handle.stats()

  def flush(self, timeout: float | None = None) -> None:
    """Waits until the consumers have every record sent so far, and sinks have written them.

    Programs on a GPU send their records when they have run.

    Args:
      timeout: the most seconds to wait; None for no limit.

    Raises:
      TimeoutError: the consumers needed longer.
      BaseException: a consumer's exception.
    """
    check_not_forked()
    options.or_none(options.seconds, self._label, "timeout", timeout, zero=True)
    if not flushed(self, timeout):
      waiting = f"{self.stats()['pending']} record(s) still wait after {timeout} s"
      raise TimeoutError(f"{self._label}: {waiting}; increase timeout=")
    failures.raise_consumer_errors()

  def close(self, timeout: float | None = None) -> None:
    """Delivers the waiting records and closes the consumers. In a fork's child it does nothing.

    Programs on a GPU send their records when they have run. Later records wait for a new channel.

    Args:
      timeout: the most seconds to wait; None for no limit.

    Raises:
      TimeoutError: a consumer needed longer; the message has the number of undelivered records.
      BaseException: a consumer's exception.
    """
    options.or_none(options.seconds, self._label, "timeout", timeout, zero=True)
    if not self._close(timeout if self._closed else self._drain(timeout)):
      left = f"{self.stats()['pending']} record(s) not delivered after {timeout} s"
      raise TimeoutError(f"{self._label}: closed with {left}; increase timeout=")
    failures.raise_consumer_errors()

  def _drain(self, timeout: float | None) -> float | None:
    """Waits for the values that programs on GPUs have sent; returns the remaining time."""
    wait = Wait(timeout, look=lambda: None)  # Ctrl-C may interrupt
    if not _callgate.delivers_here():  # the copies may wait for room that this consumer makes
      wait.until(_callgate.drain_devices)
    return None if timeout is None else wait.left

  def _close(self, timeout: float | None) -> bool:
    if self._closed:
      return True
    self._closed = True
    if _callgate.channels_abandoned():
      return True  # the channel is open in the parent; locks may be held forever
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
        if one.runs_natively:  # the runtime has closed the sink
          getattr(one.given, "_release", lambda: None)()
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
  """Opens a `Channel`, which passes the records of taps to its consumers.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  seen = []
  with cg.channel("loss", to=seen.append) as losses:
    jax.jit(lambda x: cg.tap(x * 2, "loss"))(jnp.float32(3))
  assert seen == [6.0] and losses.stats()["delivered"] == 1
  ```

  The end of the block waits for running programs, delivers every record and closes the consumers.
  While no channel of a name is open, up to 1 MiB of records wait for the next one; callgate drops
  and counts later records (`channel_stats`).

  Args:
    name: the name that taps send to. Only one channel of a name may be open.
    capacity: the most bytes that may wait: a number, "64MiB" or "1GB". A larger record goes alone.
    on_full: a tap that finds no room waits ("block"), drops its record ("drop_new") or drops the
      oldest ones ("drop_old"). "sample" is "drop_new" with at most `rate` records a second of each
      tap.
    rate: records a second, for "sample".
    to: a consumer or a list of consumers: functions `fn(value)` or `fn(value, info)`, which get
      NumPy arrays and a `TapInfo` for each record (each lane of a vmap), or sinks
      (`callgate.sinks`). Without consumers, records wait for `Channel.add` or `Channel.records`.
    batch: functions get many records in one call, as stacked arrays with a row for each record, and
      a `BatchInfo`. A number is the most rows in a call; True sets no limit.

  Raises:
    GateDefinitionError: an option is wrong.
    ValueError: a channel of that name is open. If the same notebook cell or a reloaded module had
      opened it, callgate closes the old channel instead.
  """
  return Channel(name, capacity, on_full, rate, to, batch, where().definition())


def flushed(one: Channel, timeout: float | None) -> bool:
  """Does as `Channel.flush`, but returns False if the time ran out and keeps consumers' errors."""
  return one._closed or one._handle.flush(one._drain(timeout))  # pyright: ignore[reportPrivateUsage]


def has_stream(one: Channel) -> bool:
  """True if one of its consumers is a `sinks.Stream`, by which other processes read the run."""
  consumers = list(one._consumers)  # pyright: ignore[reportPrivateUsage]
  return any(getattr(each.given, "is_stream", False) for each in consumers)


def stands_in(one: Channel) -> bool:
  """True if a channel that the user opens replaces it."""
  return one._stands_in  # pyright: ignore[reportPrivateUsage]


def tap_of(one: Channel) -> Any:
  """Returns the runtime's callee for taps to the channel."""
  return one._tap  # pyright: ignore[reportPrivateUsage]


def retire(one: Channel) -> None:
  """Closes a channel that another one replaces; a barrier raises the consumers' exceptions."""
  one._settle()  # pyright: ignore[reportPrivateUsage]
  one._close(None)  # pyright: ignore[reportPrivateUsage]


def _named(name: str) -> Channel:
  """Returns the open channel of a pickled channel's name."""
  if (found := _open.get(name)) is not None:
    return found
  raise pickle.UnpicklingError(
    f"channel '{name}': expected an open channel of this name in the process that loads the "
    f"pickle, got none; open it first: cg.channel({name!r}, to=...), or tap to the name instead"
  )


def watch(make: Callable[[str], Any]) -> None:
  """Adds a sink, `make(name)`, to all channels with other consumers, also later; None skips one."""
  with _lock:
    _watchers[make] = []
  for one in open_channels().values():
    one._watch()  # pyright: ignore[reportPrivateUsage]


def unwatch(make: Callable[[str], Any], *, wait: bool) -> None:
  """Removes the sinks of `watch`, which get no more calls; with `wait` waits for current calls."""
  with _lock:
    made = _watchers.pop(make, [])
  for _, attached in made:
    attached.left = True
  for channel, attached in made if wait else ():
    if not channel._closed and attached in channel._consumers:  # pyright: ignore[reportPrivateUsage]
      channel.remove(attached.given)


def open_channels() -> dict[str, Channel]:
  """Returns the open channels by name."""
  return {name: one for name, one in dict(_open).items() if one is not None}


def close_all(wait: Wait) -> None:
  """Closes every channel at the end of the process, and reports undelivered records.

  All channels share the time, and deliver concurrently.
  """
  least = min(wait.seconds or 0.0, lifecycle.LAST_SECONDS)  # the least time of each channel
  ends = [(f"channel '{one.name}'", one._close, one.stats) for one in open_channels().values()]  # pyright: ignore[reportPrivateUsage]
  for name, handle in target.own_channels():
    what = "taps to functions" if name == target.DEFAULT else name
    ends.append((what, handle.close, handle.stats))
  left: list[tuple[str, int]] = []  # (channel's name, number of undelivered records)
  for what, close, stats in ends:
    if not close(max(wait.left, least)):
      left.append((what, stats()["pending"]))
  for name, stats in _callgate.channel_stats().items():
    if stats["pending"]:
      left.append((f"channel '{name}', which was not open", stats["pending"]))
  for what, count in left:
    pending = f"{count} record(s)" if count else "a consumer's close() still runs"
    print(f"callgate: not delivered at the end of the program: {what}: {pending}", file=sys.stderr)


@joins("channels")
class Channels(Part):
  """Delivers all records before the process ends."""

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "deliver":
      close_all(wait)
