# SPDX-License-Identifier: Apache-2.0
"""The native sinks: their consumers are C++ (src/channel) and run without the GIL.

A channel uses `native`. `write` is for records made in Python, and may be called at the same time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack, cast

import jax
import numpy as np

from callgate import _callgate
from callgate._core import dtypes, masked, options
from callgate._core.errors import GateDefinitionError
from callgate._core.opened import resolved
from callgate._core.where import where
from callgate._process import group
from callgate._tap import channel, kinds
from callgate._tap.delivery import ROLES
from callgate._tap.records import Record, leaf_paths, parts_of
from callgate.sinks._base import ChoiceOptions, OwnedSink, SinkError, StrPath

# By path. Atomic: single steps.
_made: weakref.WeakValueDictionary[str, FileSink] = weakref.WeakValueDictionary()
_N = TypeVar("_N")
_PLAIN = ("name", "seq", "time_ns", "run", "device", "repeated")


class SinkOpenError(SinkError, ValueError):
  """Also a ValueError, for programs that were written before it was a SinkError."""


def _opened(what: Callable[..., _N], *args: Any, **options: Any) -> _N:
  """Makes a native sink, which opens its file; raises SinkError if it can't."""
  try:
    return what(*args, **options)
  except ValueError as error:  # the runtime's
    raise SinkOpenError(str(error)) from None


class NativeSink(OwnedSink):
  """A sink in C++; a channel uses its `native`."""

  def __init__(
    self, native: _callgate.Consumer, target: str, **choice: Unpack[ChoiceOptions]
  ) -> None:
    super().__init__(target, **choice)
    self.native = native
    self._writer = _callgate.RecordWriter(native)

  def write(self, records: Sequence[Record]) -> None:
    self._check(records)
    first: tuple[str, Exception] | None = None
    for record in records:
      info = record.info
      try:
        if info.role not in ROLES:
          raise ValueError(f"expected a role of {', '.join(ROLES)}, got {info.role!r}")
        leaves, tree = jax.tree.flatten(record.value)
        self._writer.write(
          role=ROLES.index(info.role), lane=list(info.lane),
          leaves=[_leaf(path, x) for (path, _), x in zip(leaf_paths(tree), leaves, strict=True)],
          parts=[(shape, [s.start for s in part]) for part, shape in parts_of(record)],
          **{name: getattr(info, name) for name in _PLAIN},
        )  # fmt: skip
      except (ValueError, TypeError) as error:
        types = "texts that UTF-8 can encode, and 64-bit integers (`seq` from 0)"
        expected = f"expected a TapInfo with {types}, got {info}"
        said = expected if isinstance(error, TypeError) else str(error)
        first = first or (f"tap {info.name!r}, record {info.seq}: {said}", error)
    if first is not None:
      raise self._error(first[0]) from first[1]

  def _begin(self) -> None:
    try:
      self._writer.open()
    except ValueError as error:
      raise self._error(str(error)) from None

  def _release(self) -> None:
    """Lets another channel open the sink, after its channel has closed `native`."""
    self._channel = None

  def flush(self) -> None:
    if os.getpid() == self._process:  # in a fork's child its lock may be held forever
      self._writer.flush()

  def close(self) -> None:
    self._release()
    if os.getpid() == self._process:
      self._writer.close()


class FileSink(NativeSink):
  """A sink of a file, or of one for each leaf. A redefined sink closes the old one's channel."""

  _make: Callable[[str, bool, int], _callgate.Consumer]

  def __init__(
    self, path: StrPath, *, append: bool = False, **choice: Unpack[ChoiceOptions]
  ) -> None:
    label = f"sinks.{type(self).__name__}"
    path = resolved(group.fill_index(options.path(label, "path", path)))
    append = options.boolean(label, "append", append)
    self._place, old = where().definition(), _made.get(path)
    if old is not None and self._place is not None and self._place.redefines(old._place):
      if holder := channel.open_channels().get(old._channel or ""):
        channel.retire(holder)
      old.close()
    super().__init__(_opened(self._make, path, append, group.known_index() or 0), path, **choice)
    _made[path] = self


class JSONL(FileSink):
  """Writes a line of JSON for each record: https://jsonlines.org

  A line is visible in the file as soon as the channel has delivered the record. It has

  - `name`, `seq`, `time_ns`, `device`, `run` and `role`; under `vmap` also `lane`;
  - `repeated`, if it is true;
  - `value`: a number or nested lists for a single array, else an object with an entry for each path
    ("w/0");
  - in a program over several devices also `process`, `global_shape`, and `shard`: [begin, end) of
    the value's part of the global array, for each dimension.

  NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"; a complex number is `[real,
  imaginary]`.

  Args:
    path: the file. Its folder is made, and the file is emptied at once, unless `append`.
    append: continues an existing file, and removes an incomplete last line. Several processes may
      append at the same time. Without `append` no other process may write to the file.
  """

  _make = staticmethod(_callgate.jsonl_sink)


class Npy(FileSink):
  """Writes a `.npy` file for each leaf, with a row for each record; readable at any time.

  In a program over several devices there is another file, "loss.shard.npy" beside "loss.npy". Its
  rows have the fields `seq`, `time_ns`, `run`, `process`, `device`, `global_shape`, and `shard`:
  [begin, end) of the record's part of the global array, for each dimension.

  bfloat16 and smaller floats are stored as float32, int4 and similar types as int8 or uint8. A
  record with another shape or dtype raises an error and isn't written.

  Args:
    path: the file; "{name}" in it is replaced by the leaf's name ("loss", "grad_w_0"). Several
      leaves need "{name}". Folders are made.
    append: continues existing files, and removes an incomplete last row. Only one process at a time
      may write to a file.
  """

  _make = staticmethod(_callgate.npy_sink)


class Stats(NativeSink):
  """Computes running statistics of each leaf in constant memory; `result` reads them at any time.

  Args:
    bins: increasing edges of the histograms' bins; None for powers of two.
  """

  def __init__(
    self, bins: Sequence[float] | np.ndarray | None = None, **choice: Unpack[ChoiceOptions]
  ) -> None:
    self._trim = bins is None
    given, edges = cast("Any", bins), list[float]()
    expected = "edges of bins, increasing numbers, or None"
    if bins is not None:
      array_like = isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, bytearray)
      if not array_like or np.ndim(given) != 1:  # a text has no dimensions
        options.refuse("sinks.Stats", "bins", expected, bins)
      if not (edges := [options.number("sinks.Stats", "bins", x, what=expected) for x in given]):
        raise ValueError(f"sinks.Stats: bins: expected {expected}, got an empty sequence")
    native, self._reader = _callgate.stats_sink(edges)
    super().__init__(native, "", **choice)

  def result(self) -> dict[str, dict[str, Any]]:
    """Returns the statistics so far; thread-safe.

    Returns:
      A dictionary of dictionaries, by column (`callgate.sinks.columns`). Each has `records`; the
      numbers of elements that are finite (`count`), `nan` and `inf`; for the finite elements
      `mean`, `variance` (as `np.var`), `min`, `max` (NaN if there are none), and `histogram`, a
      dict of `edges`, `counts`, and the numbers of elements `below` and `above`; and `last`, the
      last record's value as float64. A complex element counts with its absolute value.
    """
    return {name: self._readable(summary) for name, summary in self._reader.read().items()}

  def clear(self) -> None:
    """Resets all statistics."""
    self._reader.clear()

  def _readable(self, summary: dict[str, Any]) -> dict[str, Any]:
    some = summary["count"] > 0
    edges, counts = np.array(summary["edges"]), np.array(summary["counts"], np.uint64)
    if self._trim:
      used = np.flatnonzero(counts)
      counts = counts[used[0] : used[-1] + 1] if some else counts[:0]
      edges = edges[used[0] : used[-1] + 2] if some else edges[:0]
    outside = {key: summary[key] for key in ("below", "above")}
    return {
      **{key: summary[key] for key in ("records", "count", "nan", "inf")},
      **{key: summary[key] if some else np.nan for key in ("mean", "variance", "min", "max")},
      "last": np.array(summary["last"]).reshape(summary["last_shape"]),
      "histogram": {"edges": edges, "counts": counts, **outside},
    }


def _leaf(path: str, leaf: Any) -> tuple[str, int, list[int], bytes]:
  """Returns a leaf in the form that `RecordWriter.write` takes."""
  if masked.is_masked(leaf):
    raise ValueError(f"expected an array for the leaf {path!r}, got {masked.shown(leaf)}")
  if isinstance(leaf, str):  # from a tap with kind="text"
    leaf = kinds.text_bytes(leaf)
  try:
    code, shape, data = dtypes.value_of(leaf)
  except GateDefinitionError as error:
    raise ValueError(f"{error} for the leaf {path!r}") from None
  return path, code, list(shape), data


class Stream(NativeSink):
  """Writes a checksummed stream that other processes read while it grows (`callgate.open_stream`).

  ```python
  import callgate as cg, jax

  with cg.channel("loss", to=cg.sinks.Stream("train.cgs")):
    jax.jit(lambda x: cg.tap(2 * x, "loss"))(3.0)
  assert [r.leaves[""] for r in cg.open_stream("train.cgs")] == [6.0]
  ```

  Args:
    destination: a file, to which the sink appends; or `unix:PATH` or `tcp://HOST:PORT`, to which
      readers connect. HOST defaults to this machine's loopback; port 0 is any free one. "{process}"
      is replaced by this process's index: "run-{process}.cgs".
  """

  is_stream = True

  def __init__(self, destination: str | os.PathLike[str], **choice: Unpack[ChoiceOptions]) -> None:
    path = group.fill_index(options.path("sinks.Stream", "destination", destination))
    path = path if path.startswith(("unix:", "tcp://")) else resolved(path)
    known = group.known_index()
    self._sink = _opened(_callgate.stream_sink, path, process_index=-1 if known is None else known)
    super().__init__(self._sink, path, **choice)

  @property
  def address(self) -> str:
    """Returns the address for readers: the destination, with the port that was chosen."""
    return self._sink.address
