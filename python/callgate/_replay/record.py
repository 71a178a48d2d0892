# SPDX-License-Identifier: Apache-2.0
"""`callgate.record`: a file of what the gates and feeds of a block were given and gave."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from callgate import _callgate
from callgate._core import options
from callgate._core.dtypes import Value
from callgate._core.opened import based
from callgate._replay import calls
from callgate._replay.block import Block, call_of
from callgate._replay.writing import CallFile
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
    self._next = 0
    self._file: CallFile | None = None

  @property
  def count(self) -> int:
    return 0 if self._file is None else self._file.count

  def _begin(self) -> None:
    _make_room(self.path, self._overwrite)
    self._file = CallFile("record", self.path)

  def _end(self, late: list[str], error: BaseException | None) -> None:
    assert self._file is not None
    self._file.close(late, error)

  def _tell(
    self, gate: str, site: str, spec: str, lane: int, shard: int, device: int, run: int,
    operands: tuple[Value, ...], types: Any,
  ) -> Any:  # fmt: skip
    del types
    assert self._file is not None
    with self._counting:
      number, self._next = self._next, self._next + 1
    call = call_of(gate, site, spec, lane, shard, device, operands, number)
    if self._digests:
      call = dataclasses.replace(call, operands=None)
    return self._file.begun(call, run, self._running)


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
    path: a new file, "{process}" in it replaced by `jax.process_index()`. A relative one is of the
      open `run`.
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
  where = based(options.path("record", "path", path))
  return Recording(where, operands == "digest", bool(overwrite))
