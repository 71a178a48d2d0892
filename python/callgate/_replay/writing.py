# SPDX-License-Identifier: Apache-2.0
"""The file to which a block adds calls, each when it has ended."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from callgate import _callgate
from callgate._core import foreign
from callgate._core.dtypes import Value
from callgate._core.errors import GateError
from callgate._process import group
from callgate._replay import calls, raised
from callgate._replay.calls import Recorded


class CallFile:
  """A file that is open for writing; an existing recording is continued.

  Attributes:
    count: the number of written calls; a wait for a started call doesn't count.
  """

  def __init__(self, what: str, path: str) -> None:
    self._what, self._path = what, path
    self._failure: BaseException | None = None
    self._writing = threading.Lock()
    self.count = 0
    index = group.known_index()
    self._writer: Any = _callgate.RecordWriter(
      _callgate.stream_sink(path, process_index=-1 if index is None else index)
    )

  def begun(self, call: Recorded, run: int, running: dict[int, Any]) -> RecordedCall:
    """Returns an object for a call that has begun; calling it with the results writes the call.

    The call is in `running` meanwhile.
    """
    begun = RecordedCall(self._write, running, call, run)
    running[call.number] = call.gate, weakref.ref(begun)
    return begun

  def _write(self, call: Recorded, run: int, leaves: list[calls.Leaf]) -> None:
    """Writes a call that has ended; raises if the file can't store it."""
    with self._writing:
      if self._writer is None:  # the block has ended, and has reported the call
        return
      try:
        self._writer.write(
          name=call.gate, role=0, leaves=leaves, description=calls.describe(call),
          seq=call.number, time_ns=time.time_ns(), run=run, device=call.device, repeated=False,
          lane=[],
        )  # fmt: skip
      except ValueError as wrong:
        failure = GateError(
          f"{self._what}: call {call.number} of '{call.gate}' was not recorded: {wrong}"
        )
        self._failure = self._failure or failure
        raise failure from None
      self.count += not call.waits

  def close(self, late: list[str], error: BaseException | None) -> None:
    """Closes the file; raises its write error, or adds that to `error`, which leaves the block.

    `late`: gates whose calls still run.
    """
    with self._writing:
      writer, self._writer = self._writer, None
      try:
        writer.close()
      except ValueError as wrong:
        self._failure = self._failure or GateError(f"{self._what}: {wrong}")
    failure = self._failure
    if failure is None and late:
      failure = GateError(
        f"{self._what}: {self._path!r}: calls of {', '.join(map(repr, late))} still ran at the "
        "end of the block, and are not in the file; wait for them in the block"
      )
    if failure is None:
      return
    if error is None:
      raise failure
    if failure is not error:
      foreign.add_note(error, f"callgate: {failure}")


class RecordedCall:
  """A call that has begun; call this object with the results.

  A program that ends during the call drops the object. It has no `__del__`, in which an interrupt
  would be lost.
  """

  def __init__(
    self, write: Callable[[Recorded, int, list[calls.Leaf]], None], running: dict[int, Any],
    call: Recorded, run: int,
  ) -> None:  # fmt: skip
    self._write, self._running, self._call, self._run = write, running, call, run
    self.number = call.number

  def __call__(self, results: tuple[Value, ...] | None, error: BaseException | None) -> None:
    try:
      text, pickled = "", b""
      if error is not None:
        if not foreign.is_a(error, Exception):  # Ctrl-C is no result of the gate
          return
        text, pickled = raised.text_of(error), raised.pickle_of(error)
      leaves = calls.leaves_of(self._call, results, text, pickled)
      self._write(self._call, self._run, leaves)
    finally:
      self._running.pop(self.number, None)
