"""What a channel can be given to deliver to, and how it becomes what the runtime calls.

Functions, sinks, and the iterator that `Channel.records` returns.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from callgate import _callgate
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import keep_consumer_error
from callgate._tap import delivery
from callgate._tap.delivery import Presence
from callgate._tap.records import Record


class Adapted(NamedTuple):
  """A consumer as the user gave it, as the runtime takes it, and whether it is still called."""

  given: Any
  native: Any
  presence: Presence


def adapt(consumer: Any, where: str, *, batch: bool, limit: int | None) -> Adapted:
  """A consumer as the runtime takes it.

  With `batch` functions get stacked arrays, with at most `limit` rows a call; `where` is the
  channel, for messages.
  """
  if isinstance(consumer, type) and _is_sink(consumer):
    raise GateDefinitionError(f"{where}: to: expected a sink, got its class {consumer.__name__}")
  native, presence = _native_of(consumer), Presence()
  if native is not None:
    return Adapted(consumer, native, presence)
  if callable(getattr(consumer, "write", None)):
    rows = delivery.rows_to_records(consumer.write, consumer, presence)
    native = _callgate.python_consumer(rows, control=_control_of(consumer))
    return Adapted(consumer, native, presence)
  if not callable(consumer):
    raise GateDefinitionError(f"{where}: to: expected functions or sinks, got {consumer!r}")
  if not delivery.takes_values(consumer):
    raise GateDefinitionError(
      f"{where}: to: expected functions of (value) or of (value, info), got {consumer!r}"
    )
  if batch:
    consume = delivery.stacks_to_function(consumer, limit, presence)
  else:
    consume = delivery.rows_to_function(consumer, presence)
  return Adapted(consumer, _callgate.python_consumer(consume, stacked=batch), presence)


def _native_of(consumer: Any) -> Any:
  for one in (consumer, getattr(consumer, "native", None)):
    if isinstance(one, _callgate.Consumer):
      return one
  return None


def _is_sink(consumer: Any) -> bool:
  return hasattr(consumer, "open") and hasattr(consumer, "write")


def open_sinks(name: str, consumers: Sequence[Any]) -> None:
  """Opens those that are sinks, all or none."""
  opened: list[Any] = []
  for one in filter(_is_sink, consumers):
    try:
      one.open(name)
    except BaseException:
      close_sinks(opened)
      raise
    opened.append(one)


def close_sinks(consumers: Sequence[Any]) -> None:
  """After an error, which is raised whatever comes here."""
  for one in filter(_is_sink, consumers):
    with contextlib.suppress(Exception):
      one.close()


def leave(consumers: Iterable[Any]) -> None:
  """Says to native sinks, which the runtime closes, that their channel has ended."""
  for one in consumers:
    if _native_of(one) is not None and hasattr(one, "left"):
      one.left()


def _control_of(sink: Any) -> Callable[[str], None]:
  def control(what: str) -> None:
    method = getattr(sink, what, None)
    if method is None:
      return
    try:
      method()
    except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
      keep_consumer_error(error, f"callgate: raised in {what}() of consumer {sink!r}")

  return control


class Records(Iterator[Record]):
  """An iterator that is a consumer: the channel's thread puts, the user's takes."""

  _LIMIT = 1024

  def __init__(self, channel: Any, *, closed: bool) -> None:
    self._waiting: collections.deque[Record] = collections.deque()
    self._changed = threading.Condition()
    self._ending = self._ended = False
    if closed:
      self._ended = True
    else:
      channel.add(self)

  def write(self, records: Sequence[Record]) -> None:
    with self._changed:
      self._changed.wait_for(lambda: len(self._waiting) < self._LIMIT or self._ending)
      self._waiting.extend(records)
      self._changed.notify_all()

  def open(self, channel: str) -> None:
    """Nothing to open."""

  def end_soon(self) -> None:
    """The channel is being closed: what is left comes at once."""
    with self._changed:
      self._ending = True
      self._changed.notify_all()

  def close(self) -> None:
    with self._changed:
      self._ending = self._ended = True
      self._changed.notify_all()

  def __next__(self) -> Record:
    check_not_forked()
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._ended)
      if not self._waiting:
        raise StopIteration
      record = self._waiting.popleft()
      self._changed.notify_all()
      return record


def check_not_forked() -> None:
  """Channels have no thread in a fork's child: a clear error instead of a hang."""
  if _callgate.channels_abandoned():
    raise RuntimeError(
      "callgate: this process was forked from one that had channels, whose threads are not here; "
      "expected a process of its own (multiprocessing's 'spawn' or 'forkserver')"
    )
