# SPDX-License-Identifier: Apache-2.0
"""`callgate.record`: a file of what the gates and feeds of a block were given and gave."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

from callgate import _callgate
from callgate._core import foreign, options, registry
from callgate._core.dtypes import Value
from callgate._core.errors import GateError
from callgate._process import group
from callgate._replay import calls, raised
from callgate._replay.block import Block, without_handles
from callgate._replay.calls import Recorded
from callgate._stream.reader import open_stream

_MAGIC = b"cgsS"  # that a stream begins with


class Recording(Block):
  """The block of `callgate.record`.

  Attributes:
    path: the file.
    count: how many calls it holds so far; a wait for a started one is none.
  """

  _what = "record"
  _stays = "it hears of this process's calls; expected its path, or a block in the other process"

  def __init__(self, path: str, digests: bool, overwrite: bool) -> None:
    super().__init__(path)
    self._digests, self._overwrite = digests, overwrite
    self.count = 0
    self._next = 0
    self._failure: BaseException | None = None
    self._writing = threading.Lock()
    self._writer: Any = None

  def _begin(self) -> None:
    _make_room(self.path, self._overwrite)
    index = group.known_index()
    self._writer = _callgate.RecordWriter(
      _callgate.stream_sink(self.path, process_index=-1 if index is None else index)
    )

  def _end(self, late: list[str], error: BaseException | None) -> None:
    with self._writing:
      writer, self._writer = self._writer, None
      try:
        writer.close()
      except ValueError as wrong:
        self._failure = self._failure or GateError(f"record: {wrong}")
    failure = self._failure
    if failure is None and late:
      failure = GateError(
        f"record: {self.path!r}: calls of {', '.join(map(repr, late))} still ran at the end of the "
        "block, and are not in it"
      )
    if failure is None:
      return
    if error is None:
      raise failure
    if failure is not error:
      foreign.add_note(error, f"callgate: {failure}")

  def _tell(
    self, gate: str, site: str, spec: str, lane: int, shard: int, device: int, run: int,
    operands: tuple[Value, ...], types: Any,
  ) -> Any:  # fmt: skip
    del types
    operands = without_handles(gate, spec, operands)
    made = registry.get(gate)
    with self._counting:
      number, self._next = self._next, self._next + 1
    call = Recorded(
      gate, site, lane, device, shard, number, getattr(made, "effect", "pure"),
      tuple(registry.argument(gate, spec, i) for i in range(len(operands))),
      tuple((code, shape) for code, shape, _ in operands),
      None if self._digests else operands, tuple(map(calls.digest, operands)),
      waits=getattr(made, "waits", False),
    )  # fmt: skip
    begun = _RecordedCall(functools.partial(self._write, run=run), self._running, call)
    self._running[number] = gate, weakref.ref(begun)
    return begun

  def _write(self, call: Recorded, run: int) -> None:
    """Writes a call that has ended; raises where the file does not take it."""
    with self._writing:
      if self._writer is None:  # its block has ended, and has said so
        return
      try:
        self._writer.write(
          name=call.gate, role=0, leaves=calls.leaves_of(call), description=calls.describe(call),
          seq=call.number, time_ns=time.time_ns(), run=run, device=call.device, repeated=False,
          lane=[],
        )  # fmt: skip
      except ValueError as wrong:
        failure = GateError(f"record: call {call.number} of '{call.gate}' is not recorded: {wrong}")
        self._failure = self._failure or failure
        raise failure from None
      self.count += not call.waits


class _RecordedCall:
  """A call that has begun; called with what it gave.

  A program that ends within the call drops it. It has no `__del__`: an interrupt there is lost.
  """

  def __init__(
    self, write: Callable[[Recorded], None], running: dict[int, Any], call: Recorded
  ) -> None:
    self._write, self._running, self._call = write, running, call
    self.number = call.number

  def __call__(self, results: tuple[Value, ...] | None, error: BaseException | None) -> None:
    try:
      if error is None:
        call = dataclasses.replace(self._call, results=results)
      elif foreign.is_a(error, Exception):
        text, pickled = raised.text_of(error), raised.pickle_of(error)
        call = dataclasses.replace(self._call, error=text, pickled=pickled)
      else:  # Ctrl-C is nothing that the gate gave
        return
      self._write(call)
    finally:
      self._running.pop(self.number, None)


def _make_room(path: str, overwrite: bool) -> None:
  """Raises unless a new file may be made there; removes a stream where that is asked for."""
  if not os.path.lexists(path):
    return
  if not overwrite:
    raise FileExistsError(
      f"record: expected a path where no file is, got {path!r}; overwrite=True replaces a recording"
    )
  if not _is_recording(path):
    raise FileExistsError(f"record: expected a recording to replace, got another file, {path!r}")
  _callgate.FileClaim("record", path).remove()  # raises if another process writes it


def _is_recording(path: str) -> bool:
  """True also for one without calls, and for an empty file."""
  with open(path, "rb") as file:
    begins = file.read(len(_MAGIC))
  if begins != _MAGIC:
    return begins == b""
  try:
    with open_stream(path) as stream:
      first = next(stream, None)
    if first is not None:
      calls.read(first)
  except (ValueError, OSError):
    return False
  return True


def record(
  path: str | os.PathLike[str], *, operands: Literal["arrays", "digest"] = "arrays",
  overwrite: bool = False,
) -> Recording:  # fmt: skip
  """A block that keeps what each gate and feed is given and gives, for `callgate.replay`.

  ```python
  import callgate as cg, jax, numpy as np

  price = cg.gate(lambda day: np.float32(day + 0.5), out=np.float32(0), name="record.price")
  with cg.record("prices.cgr") as recording:
    jax.jit(price)(3).block_until_ready()
  assert recording.count == 1
  ```

  Programs need not be traced anew; those of all threads count. A call is in the file, a stream of
  `docs/stream.md`, before its program goes on, so that a process which is killed leaves all whole
  calls. Exceptions are kept as well. At its end the block waits for programs and started calls.

  Args:
    path: a new file, "{process}" in it replaced by `jax.process_index()`.
    operands: "arrays" keeps them: a call that differs is shown with its first differing element,
      and a replay can compare with a tolerance. "digest" keeps 16 bytes of each, where operands are
      large, or nobody is to read them.
    overwrite: replace a recording that is there.

  Returns:
    A context manager, with `path` and `count`, the number of calls so far.

  Raises:
    GateDefinitionError: an option is wrong.
    FileExistsError: (entering) there is a file; with `overwrite`, one that is no recording.
    ValueError: (entering) the file can't be made.
    GateError: (entering) another recording or replay is open. (leaving, and in the call) the file
      does not take a call, on a full disk, say; or a call that timed out still runs.
  """
  kinds = ("arrays", "digest")
  options.choice("record", "operands", operands, kinds)
  options.boolean("record", "overwrite", overwrite)
  return Recording(options.path("record", "path", path), operands == "digest", bool(overwrite))
