# SPDX-License-Identifier: Apache-2.0
"""The core of `callgate.Checkpoints`: programs send a carry to the disk, and resume from it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from callgate import _callgate
from callgate._checkpoints import loading, orbax
from callgate._checkpoints.parts import Leaf
from callgate._checkpoints.writer import NAME, Writer, leaves_of
from callgate._core import registry
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Uncopied
from callgate._core.where import where as users_line
from callgate._jax import tracing
from callgate._objects.handle import Handle
from callgate._part import Part, Phase, Wait, joins
from callgate._runtime import barrier, lifecycle
from callgate._tap import channel, tap, target

_LEAST_CAPACITY = 64 << 20  # the least bytes of carries that may wait for the disk


class CarrySaver(Uncopied):
  """Makes programs save the carry of a loop in a folder, and resume from it."""

  def __init__(
    self, folder: Path, every: int, keep: int, *, resume: bool, format: str
  ) -> None:  # fmt: skip
    self.folder, self.every, self.keep = folder, every, keep
    self.resume, self.format = resume, format
    self._loader = loading.Loader(folder, resume=resume, of_orbax=format == "orbax")
    self._writer = Writer(folder, keep, format, self._loader.wrote)
    self._lock = threading.Lock()
    self._channel: channel.Channel | None = None
    self._loop: tuple[Any, str] | None = None  # (marks of the first loop, its place for messages)
    self._trace: weakref.ref[Any] | None = None  # the last loop's trace

  def flush(self) -> None:
    """Waits until the carries of all programs so far are on the disk."""
    # In a fork's child they belong to the parent.
    if self._channel is not None and not _callgate.channels_abandoned():
      barrier.wait_for_programs()
      self._channel.flush()

  def begin(self, body: Any, init: Any, length: int | None) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the number of steps that have run, the number of the run, and the carry.

    `length` is that of a resumed loop. In a multi-host program one process determines the step for
    all.
    """
    self._refuse_region()
    _refuse_handles(init)
    leaves = leaves_of(init)
    if self.format == "orbax":
      orbax.check(leaves)
    self._refuse_second_loop(body, leaves)
    step, run = self._loader.begin(length)
    return step, run, self._loader.load(step, run, init, leaves) if self.resume else init

  def counts(self, step: Any, run: Any, feeds: Sequence[str]) -> Any:
    """Returns how many items the body's feeds had given before the loop's first step."""
    return self._loader.counts(step, run, feeds)

  def send(self, step: Any, run: Any, carry: Any, feeds: Any, where: Any) -> None:
    """Saves the carry, and the counts of feeds by name, if `where` is True."""
    self._refuse_region()
    _refuse_handles(carry)
    sent = jax.tree.map(loading.refusing_lanes, jax.lax.stop_gradient(carry))
    to = self._open(leaves_of(carry))
    tap.tap((step, run, sent, feeds), to, name=NAME, where=where)

  def _refuse_region(self) -> None:
    if axes := tuple(tracing.region_axes()):
      raise GateDefinitionError(
        f"Checkpoints: expected a scan outside jax.shard_map, got one over its axes {axes}; use "
        "jax.shard_map in the body of the loop instead"
      )

  def _refuse_second_loop(self, body: Callable[..., Any], leaves: Sequence[Leaf]) -> None:
    """Raises for a loop with another body, and for the same loop twice in a program."""
    here, trace = users_line(), tracing.current_trace()
    # These stay the same when a loop is traced again, as by a notebook's cell.
    marks = _place(here.file, here.line), here.code.co_qualname, _body(body), tuple(leaves)
    with self._lock:
      again = trace is not None and self._trace is not None and self._trace() is trace
      if self._loop is not None and (again or marks != self._loop[0]):
        raise GateDefinitionError(
          f"Checkpoints: {self.folder}: expected one loop, at {self._loop[1]}, got a second one "
          f"at {here}, which would overwrite the first one's checkpoints. Give each loop its own "
          "cg.Checkpoints and folder"
        )
      self._loop = self._loop or (marks, str(here))
      self._trace = None if trace is None else weakref.ref(trace)

  def _open(self, leaves: tuple[Leaf, ...]) -> channel.Channel:
    size = sum(int(np.prod(leaf.shape)) * 16 for leaf in leaves)
    with self._lock:
      if self._channel is None:
        name = registry.free_name(f"{target.CHECKPOINTS}{self.folder}")
        most = max(2 * size, _LEAST_CAPACITY)
        self._channel = channel.channel(name, capacity=most, to=self._writer)
        loading.channels[self._channel] = self.folder
        # The loader lives as long as this object, and as programs that save, whose gates hold it.
        # The channel and its thread end with the loader.
        weakref.finalize(self._loader, self._writer.end, self._channel).atexit = False
      return self._channel


def _body(function: Any) -> tuple[str, int]:
  while (inner := getattr(function, "func", getattr(function, "__wrapped__", None))) is not None:
    function = inner
  code = getattr(function, "__code__", None)
  if code is None:
    return type(function).__qualname__, 0
  return code.co_qualname, _place(code.co_filename, code.co_firstlineno)[1]


def _place(file: str, line: int) -> tuple[str, int]:
  """Returns a file and line; neither for a notebook's cell, where they differ in each run."""
  return ("", 0) if "ipykernel" in file or file.startswith("<ipython") else (file, line)


def _refuse_handles(carry: Any) -> None:
  found = jax.tree_util.tree_leaves_with_path(carry, is_leaf=lambda x: isinstance(x, Handle))
  for path, leaf in found:
    if isinstance(leaf, Handle):
      raise GateDefinitionError(
        "Checkpoints: expected a carry of arrays, got a handle at "
        f"{jax.tree_util.keystr(path) or 'carry'}, whose object ends with this process. Make the "
        "object before the loop, use it in the body, and carry its state as arrays"
      )


@joins("checkpoints")
class Writers(Part):
  """Waits at the end of the process until the checkpoints are on the disk.

  After Ctrl-C it doesn't wait. The end of all channels follows, which raises the errors of
  checkpoints that could not be written.
  """

  def end(self, phase: Phase, wait: Wait) -> None:
    for each in loading.channels.keyrefs() if phase == "deliver" else ():
      if (one := each()) is None or lifecycle.is_interrupted():
        continue
      if not channel.flushed(one, wait.seconds):
        what = "the end of the program waits until they are written; press Ctrl-C to drop them"
        print(f"callgate: checkpoints in {loading.channels[one]}: {what}", file=sys.stderr)
        channel.flushed(one, None)
