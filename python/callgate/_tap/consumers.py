# SPDX-License-Identifier: Apache-2.0
"""Turns the consumers of a channel into the runtime's consumers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from callgate import _callgate
from callgate._core import errors, failures, foreign, signatures
from callgate._tap import delivery
from callgate._tap.records import Record


@dataclasses.dataclass(frozen=True)
class Choice:
  """Chooses the records that a sink gets, of each tap on each device.

  Attributes:
    every: takes each n-th record.
    rate: takes at most so many of them a second; None for no limit.
    where: takes those of them for which it returns True; None for all.
  """

  every: int = 1
  rate: float | None = None
  where: Callable[[Record], Any] | None = None


def adapt(
  consumer: Any, where: str, *, batch: bool, limit: int | None
) -> tuple[delivery.Attached, _callgate.Consumer]:
  """Makes a consumer of `where`; with `batch` functions get stacks of at most `limit` rows."""
  choice = getattr(consumer, "choice", None)
  if not isinstance(choice, Choice):
    return _adapt(consumer, where, batch=batch, limit=limit)
  attached, native = _adapt(consumer, where, batch=batch, limit=limit, only=choice.where)
  if choice.every > 1 or choice.rate is not None:
    native = _callgate.thinned(native, every=choice.every, rate=choice.rate or 0.0)
  return attached, native


def _adapt(
  consumer: Any,
  where: str,
  *,
  batch: bool,
  limit: int | None,
  only: Callable[[Record], Any] | None = None,
) -> tuple[delivery.Attached, _callgate.Consumer]:
  attached = delivery.Attached(consumer, only)
  if isinstance(consumer, type) and attached.is_sink():
    got = f"the class {consumer.__name__}; pass an instance"
    raise errors.GateDefinitionError(f"{where}: to: expected a sink, got {got}")
  both = (consumer, getattr(consumer, "native", None))
  native = next((one for one in both if isinstance(one, _callgate.Consumer)), None)
  if native is not None and only is None:  # else Python checks each record
    attached.runs_natively = True
    return attached, native
  if callable(getattr(consumer, "write", None)):
    for name in ("open", "write", "flush", "close"):
      expected = f"{where}: to: expected a sink with a {name}()"
      signatures.refuse_unrun(expected, getattr(consumer, name, None))

    def control(what: str) -> None:
      try:
        getattr(consumer, what, lambda: None)()
      except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
        where = f"callgate: raised in {what}() of consumer {foreign.repr_of(consumer)}"
        failures.keep_consumer_error(error, where)

    consume = functools.partial(delivery.write_records, attached)
    return attached, _callgate.python_consumer(consume, control=control)
  if not callable(consumer):
    raise errors.GateDefinitionError(
      f"{where}: to: expected functions or sinks, got {foreign.repr_of(consumer)}"
    )
  delivery.check_takes_values(f"{where}: to: expected functions", consumer)
  consume = functools.partial(delivery.call_with_rows, attached)
  if batch:
    consume = functools.partial(delivery.call_with_stacks, attached, limit)
  return attached, _callgate.python_consumer(consume, stacked=batch, one_by_one=not batch)


class Records(Iterator[Record]):
  """An iterator that is a consumer: the channel's thread puts records, the user takes them."""

  _LIMIT = 1024

  def __init__(self) -> None:
    self._waiting: collections.deque[Record] = collections.deque()
    self._changed = threading.Condition()
    self._ending = self._ended = False

  def open(self, channel: str) -> None:
    """There is nothing to open."""

  def write(self, records: Sequence[Record]) -> None:
    with self._changed:
      self._changed.wait_for(lambda: len(self._waiting) < self._LIMIT or self._ending)
      self._waiting.extend(records)
      self._changed.notify_all()

  def close(self, *, ended: bool = True) -> None:
    """Ends the iteration after the last record. With `ended` False no call waits any longer."""
    with self._changed:
      self._ending = True
      self._ended = self._ended or ended
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
  """Raises in a fork's child, which lacks the channels' threads and would hang."""
  if _callgate.channels_abandoned():
    raise RuntimeError(
      "callgate: this process was forked from one that had channels, whose threads are not "
      "here; start processes with multiprocessing's 'spawn' or 'forkserver'"
    )
