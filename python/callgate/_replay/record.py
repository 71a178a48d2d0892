# SPDX-License-Identifier: Apache-2.0
"""`callgate.record`: a file of the operands and results of a block's gates and feeds."""

from __future__ import annotations

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

_MAGIC = b"cgsS"  # the first bytes of a stream


class Recording(Block):
  """The block of `callgate.record`.

  Attributes:
    path: the file.
    count: the number of recorded calls so far. A wait for a started call doesn't count.
  """

  _what = "record"
  _stays = "it records this process's calls; pass its path, or open a block in the other process"

  def __init__(self, path: str, digests: bool, overwrite: bool) -> None:
    super().__init__(path)
    self._digests, self._overwrite = digests, overwrite
    self._next = 0
    self._file: CallFile | None = None

  @property
  def count(self) -> int:
    """The number of recorded calls so far."""
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
      call = call.digested()
    return self._file.begun(call, run, self._running)


def _make_room(path: str, overwrite: bool) -> None:
  """Raises unless a new file may be made; with `overwrite` removes a recording."""
  if not os.path.lexists(path):
    return
  if not overwrite:
    raise FileExistsError(
      f"record: expected a new path, got the existing file {path!r}; pass overwrite=True to "
      "replace a recording"
    )
  if not _is_recording(path):
    raise FileExistsError(f"record: expected a recording to replace, got another file, {path!r}")
  _callgate.FileClaim("record", path).remove()  # raises if another process is writing it


def _is_recording(path: str) -> bool:
  """True for a recording, also without calls, and for an empty file."""
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
  """Records the calls of gates and feeds in a file, for `callgate.replay`.

  ```python
  import callgate as cg, jax, numpy as np

  price = cg.gate(lambda day: np.float32(day + 0.5), out=np.float32(0), name="record.price")
  with cg.record("prices.cgr") as recording:
    jax.jit(price)(3).block_until_ready()
  assert recording.count == 1
  ```

  The block records the programs of all threads, without tracing them again. It writes each call, or
  its exception, before the program continues. So if the process is killed, the file has all
  complete calls. The file is a stream (docs/stream.md). The end of the block waits for programs and
  started calls.

  Args:
    path: a new file; "{process}" in it is replaced by `jax.process_index()`. A relative path is
      relative to the open `run`'s folder.
    operands: "arrays" stores operands whole. Then a replay can show the first different element,
      and compare with a tolerance. "digest" stores 16 bytes of each, for large or private data.
    overwrite: replaces an existing recording.

  Returns:
    A context manager, with `path` and `count`, the number of calls so far.

  Raises:
    GateDefinitionError: an option is wrong.
    FileExistsError: at the start: the file exists; with `overwrite`, it isn't a recording.
    ValueError: at the start: the file can't be made.
    GateError: at the start: another recording or replay is open. In a call and at the end: the file
      can't store a call, for example on a full disk; or a call that timed out is still running.
  """
  kinds = ("arrays", "digest")
  options.choice("record", "operands", operands, kinds)
  options.boolean("record", "overwrite", overwrite)
  where = based(options.path("record", "path", path))
  return Recording(where, operands == "digest", bool(overwrite))
