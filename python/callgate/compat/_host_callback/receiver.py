"""Receivers of 2020's outfeed: who may run taps on which device, and what their consumers raised.

A receiver stands for the devices it was started for, from `with` to the end of the block. Programs
with taps ask here before each execution, in the thread that calls them (`NeedsReceiver`); consumers
report here from the channel's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

from callgate._core.failures import keep_consumer_error
from callgate._runtime.barrier import wait_for_programs
from callgate._tap.consumers import check_not_forked
from callgate._tap.target import start_channel
from callgate.compat._host_callback.tapped import CHANNEL

_lock = threading.Lock()
_started: dict[int, Receiver] = {}  # by the device's id
_calling: list[str] = []  # the consumer that is being called


class TapFunctionException(Exception):
  """Functions of taps raised.

  Attributes:
    exceptions: what they raised, all of it, in order.
  """

  def __init__(self, message: str, exceptions: Sequence[BaseException]) -> None:
    super().__init__(message)
    self.exceptions = tuple(exceptions)


class Receiver:
  """Receives what the taps on some devices send; a context manager."""

  def __init__(self, name: str, timeout: float, devices: Sequence[Any]) -> None:
    self._name = name
    self.timeout = timeout
    self._devices = tuple(devices)
    self._raised: list[BaseException] = []

  def __repr__(self) -> str:
    return f"<outfeed receiver '{self._name}' of {_names(self._devices)}>"

  def __enter__(self) -> Receiver:
    check_not_forked()
    start_channel(CHANNEL)
    with _lock:
      taken = [device for device in self._devices if device.id in _started]
      if taken:
        raise ValueError(
          f"outfeed_receiver: expected devices without a receiver, got {_names(taken)}, for which "
          f"{_started[taken[0].id]!r} is started"
        )
      for device in self._devices:
        _started[device.id] = self
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    outstanding = self._end()
    with _lock:
      for device in self._devices:
        _started.pop(device.id, None)
      raised = list(self._raised)
    failure = _failure(raised)
    if error is not None:  # the block's own exception must not be hidden
      for what in filter(None, (outstanding, failure)):
        error.add_note(f"callgate: {what}")
      return
    if outstanding:
      raise TimeoutError(outstanding) from failure
    if failure is not None:
      raise failure from raised[0]

  def add_error(self, error: BaseException) -> None:
    """Keeps what a consumer raised until the end of the block."""
    with _lock:
      self._raised.append(error)

  def _end(self) -> str:
    """Lets programs and consumers finish; says what was left when the time ran out, or ""."""
    whose = f"{self!r}: after {self.timeout:g} s"
    handle = start_channel(CHANNEL)
    try:
      if finish(self.timeout):
        return ""
    except TimeoutError:
      return f"{whose} programs still ran"
    calling = f"; {_calling[-1]} was being called" if _calling else ""
    pending = handle.stats()["pending"]
    return f"{whose} {pending} record(s) still waited for their functions{calling}"


def finish(timeout: float | None) -> bool:
  """Lets all programs and the functions of their taps finish, also those that functions started.

  Returns whether all that was sent was delivered in time; TimeoutError where programs still ran.
  What programs failed with is for those who look at their results.
  """
  deadline = None if timeout is None else time.monotonic() + timeout
  handle = start_channel(CHANNEL)
  before = -1
  while True:
    wait_for_programs(_rest(deadline))
    sent = handle.stats()["sent"]
    if sent == before:
      return True
    # The marker behind all that was sent: the channel says when it is through.
    if not handle.flush(_rest(deadline)):
      return False
    before = sent


def _rest(deadline: float | None) -> float | None:
  return None if deadline is None else max(0.0, deadline - time.monotonic())


class NeedsReceiver:
  """Kept by programs with taps, and called before each execution (`_jax/lowering.py`)."""

  def __call__(self, devices: Sequence[Any]) -> None:
    missing = [device for device in devices if device.id not in _started]
    if missing:
      raise ValueError(
        "host_callback: outfeed_receiver is not started (in the first form's words: "
        "outfeed_consumer is not started): a compiled program with taps was called "
        f"for {_names(missing)}, whose outfeed receiver is not started; expected the call inside "
        "`with outfeed_receiver():`"
      )


NEEDS_RECEIVER = NeedsReceiver()


@contextlib.contextmanager
def calling(name: str) -> Generator[None]:
  """Says who is being called, for the report of a receiver that waits in vain."""
  _calling.append(name)
  try:
    yield
  finally:
    _calling.remove(name)


def wait_for_earlier() -> None:
  """Lets the functions of compiled taps finish whose records are there already.

  What is called at once, outside compiled code, may depend on their values. Waits no longer than a
  receiver would: a function may itself wait for the caller.
  """
  with _lock:
    receiver = next(iter(_started.values()), None)
  handle = start_channel(CHANNEL)
  if receiver is not None and handle.stats()["pending"]:
    handle.flush(receiver.timeout)


def report(error: BaseException, device: int, where: str) -> None:
  """Keeps what a consumer raised for a record of `device`, -1 when it is not known."""
  with _lock:
    receiver = _started.get(device)
    if receiver is None and _started:
      receiver = next(iter(_started.values()))
  if receiver is not None:
    error.add_note(where)
    receiver.add_error(error)
  else:  # its receiver gave up waiting
    keep_consumer_error(error, where)


def _failure(raised: Sequence[BaseException]) -> TapFunctionException | None:
  if not raised:
    return None
  shown = "".join(f"\n  {type(error).__name__}: {error}" for error in raised[:10])
  more = f"\n  and {len(raised) - 10} more" if len(raised) > 10 else ""
  return TapFunctionException(f"functions of {len(raised)} tap(s) raised:{shown}{more}", raised)


def _names(devices: Sequence[Any]) -> str:
  return ", ".join(str(device) for device in devices)
