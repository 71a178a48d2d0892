"""Receivers of 2020's outfeed: who may run taps on which device, and what their consumers raised.

Programs with taps ask here before each execution, in the thread that calls them (`NeedsReceiver`);
consumers report here from the channel's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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
    self._name, self.timeout, self._devices = name, timeout, tuple(devices)
    self.raised: list[BaseException] = []  # what consumers raised, until the end of the block

  def __repr__(self) -> str:
    return f"<outfeed receiver '{self._name}' of {_names(self._devices)}>"

  def __enter__(self) -> Receiver:
    check_not_forked()
    start_channel(CHANNEL)
    with _lock:
      if taken := [device for device in self._devices if device.id in _started]:
        got = f"{_names(taken)}, for which {_started[taken[0].id]!r} is started"
        raise ValueError(f"outfeed_receiver: expected devices without a receiver, got {got}")
      _started.update({device.id: self for device in self._devices})
    return self

  def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
    outstanding, failure = self._end(), None
    with _lock:
      for device in self._devices:
        _started.pop(device.id, None)
      raised = list(self.raised)
    if raised:
      shown = "".join(f"\n  {type(error).__name__}: {error}" for error in raised[:10])
      more = f"\n  and {len(raised) - 10} more" if len(raised) > 10 else ""
      text = f"functions of {len(raised)} tap(s) raised:{shown}{more}"
      failure = TapFunctionException(text, raised)
    if error is not None:  # the block's own exception must not be hidden
      for what in filter(None, (outstanding, failure)):
        error.add_note(f"callgate: {what}")
    elif outstanding:
      raise TimeoutError(outstanding) from failure
    elif failure is not None:
      raise failure from raised[0]

  def _end(self) -> str:
    """Lets programs and consumers finish; says what was left when the time ran out, or ""."""
    whose = f"{self!r}: after {self.timeout:g} s"
    try:
      if finish(self.timeout):
        return ""
    except TimeoutError:
      return f"{whose} programs still ran"
    calling = f"; {_calling[-1]} was being called" if _calling else ""
    pending = start_channel(CHANNEL).stats()["pending"]
    return f"{whose} {pending} record(s) still waited for their functions{calling}"


def finish(timeout: float | None) -> bool:
  """Waits for all programs and taps, those that functions start too; whether taps ended in time."""
  deadline = None if timeout is None else time.monotonic() + timeout

  def rest() -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())

  handle, before = start_channel(CHANNEL), -1
  while True:
    wait_for_programs(rest())  # or TimeoutError
    if (sent := handle.stats()["sent"]) == before:
      return True
    # The marker behind all that was sent: the channel says when it is through.
    if not handle.flush(rest()):
      return False
    before = sent


class NeedsReceiver:
  """Kept by programs with taps, and called before each execution (`_jax/dispatch.py`)."""

  def __call__(self, devices: Sequence[Any]) -> None:
    if missing := [device for device in devices if device.id not in _started]:
      raise ValueError(
        "host_callback: outfeed_receiver is not started (in the first form's words: "
        "outfeed_consumer is not started): a compiled program with taps was called "
        f"for {_names(missing)}, whose outfeed receiver is not started; expected the call inside "
        "`with outfeed_receiver():`"
      )


NEEDS_RECEIVER = NeedsReceiver()


def run(consumer: Callable[[], None], name: str, device: int | None) -> None:
  """Calls a record's consumer and keeps what it raises; without a device its caller gets that."""
  if device is None:
    with _lock:
      receiver = next(iter(_started.values()), None)
    handle = start_channel(CHANNEL)
    if receiver is not None and handle.stats()["pending"]:  # it may depend on what they sent
      handle.flush(receiver.timeout)  # a function may itself wait for the caller
    try:
      return consumer()
    except Exception as error:
      raise TapFunctionException(f"tap function {name} raised {error!r}", [error]) from error
  _calling.append(name)
  try:
    consumer()
  except BaseException as error:  # noqa: BLE001 - kept, and raised where the receiver ends
    where = f"callgate: raised in tap function {name}"
    with _lock:
      if (receiver := _started.get(device) or next(iter(_started.values()), None)) is not None:
        error.add_note(where)
        receiver.raised.append(error)
    if receiver is None:  # it gave up waiting
      keep_consumer_error(error, where)
  finally:
    _calling.remove(name)


def _names(devices: Sequence[Any]) -> str:
  return ", ".join(map(str, devices))
