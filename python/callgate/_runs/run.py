# SPDX-License-Identifier: Apache-2.0
"""`callgate.run`: a folder for a training, to which all belongs that its block makes.

A process has one open run. Every channel gets a stream in the folder beside its own consumers, and
a name that taps send to without a channel gets one that gives way to its user's. Paths are of the
folder by `_core/opened.py`. `run.json` is written by whichever thread changes something.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from callgate import _part
from callgate._core import failures, foreign, opened, options
from callgate._core.errors import GateError
from callgate._core.pickling import Stays
from callgate._part import Part, Phase, Wait
from callgate._process import group
from callgate._runs import files, values
from callgate._runs.summary import Result, Summary
from callgate._runtime import barrier
from callgate._steer import knob
from callgate._stream.reader import open_stream
from callgate._tap import alert, channel, target
from callgate.sinks import Stream

_MOST = 1000  # alerts, and failed checks, that run.json keeps: the first
_SECONDS = 30.0  # for records that wait, where an exception ends the block; for earlier alerts
_TRACEBACK = 20_000  # characters, of its end
StrPath = str | os.PathLike[str]
_open: list[Run] = []  # guarded by _opening, but for a fork's child; at most one entry
_opening = threading.Lock()
_numbers = itertools.count()  # of runs, the same in every process. Guarded by _opening


class Run(Stays):
  """A training with a folder of its own; made by `callgate.run`, whose block it is.

  Attributes:
    name: as given.
    folder: its own folder, an absolute `pathlib.Path`, from the block's beginning on.
    config: as given, as JSON has it.
    notes: as given.
    tags: as given.
    summary: a mapping of results by name, which are in the folder at once, as JSON has them.
    state: "new", "running", "finished" or "crashed".
  """

  _stays = "it is this process's folder; expected a run of its own in the other one"

  def __init__(
    self, name: str, folder: str, config: dict[str, Any], notes: str, tags: tuple[str, ...]
  ) -> None:
    self.name, self.config, self.notes, self.tags = name, config, notes, tags
    self._results: dict[str, Result] = {}
    self.summary: MutableMapping[str, Any] = Summary(self._results, self._change)
    self.state = "new"
    self.folder: Path = Path(folder)
    self._above = folder
    self._lock = threading.RLock()  # of what run.json has
    self._error: str | None = None
    self._traceback: str | None = None
    self._process: dict[str, Any] = {}
    self._times: dict[str, int | None] = {"started_ns": None, "ended_ns": None}
    self._alerts: list[dict[str, Any]] = []
    self._checks: list[dict[str, Any]] = []
    self._knobs: dict[str, Any] = {}
    self._streams: set[Path] = set()

  def __repr__(self) -> str:
    return f"<callgate.run {self.name!r}, {self.state}, in {str(self.folder)!r}>"

  # -- the block ---------------------------------------------------------------------------------
  def __enter__(self) -> Self:
    with _opening:
      if _open:
        other = f"{_open[0].name!r} in {str(_open[0].folder)!r}"
        raise GateError(
          f"run: expected no other run in this process, got {self.name!r} in the block of {other}"
        )
      if self.state != "new":
        raise GateError(f"run: expected a new one for each block, got {self.name!r} again")
      self.folder = self._shared_folder()
      self._process, self.state = files.this_process(), "running"
      self._times["started_ns"] = time.time_ns()
      _open.append(self)
    try:
      self._begin()
    except BaseException as error:
      self._leave(error)
      raise
    return self

  def _begin(self) -> None:
    """Has streams for all channels, and hears of alerts and checks."""
    self._write()
    alert.deliver(Wait(_SECONDS), anew=True)  # what came before is not the run's
    opened.begin(
      opened.OpenRun(self.name, str(self.folder), self.config, self.notes, self.tags)
    )  # fmt: skip
    _part.on("alert", self._note_alert)
    _part.on("check failed", self._note_check)
    channel.watch(self._stream_of)
    _part.on("channel closed", _stand_in)
    _part.on("channel named", _stand_in)
    for name in target.channel_names():
      _stand_in(name)

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if os.getpid() != self._process.get("id"):
      return  # a fork's child: the block is the parent's
    own: BaseException | None = None
    try:
      if error is None:
        barrier.barrier()
      elif foreign.is_a(error, Exception):
        barrier.wait_for_programs()
    except BaseException as late:
      own = late
      raise
    finally:
      self._leave(own or error)

  def _leave(self, error: BaseException | None) -> None:
    """Takes the streams out, and says how the run ended; the run is closed whatever fails.

    An `error` that ends the block gets a failure as a note.

    Raises:
      BaseException: what failed, without such an error; Ctrl-C with one, too.
    """
    cause = error
    for step in (self._let_go, self._end):
      try:
        step(cause)
      except BaseException as late:  # noqa: BLE001 - raised below, or a note
        if cause is None or not foreign.is_a(late, Exception):
          cause = late
        else:
          foreign.add_note(cause, f"callgate: {self!r}: {foreign.said_by(late)}")
    if cause is not None and cause is not error:
      raise cause

  def _let_go(self, error: BaseException | None) -> None:
    """Takes the streams and listeners out; delivers first what waits."""
    _part.off("channel closed", _stand_in)
    _part.off("channel named", _stand_in)
    seconds = None if error is None else _SECONDS
    try:
      alert.deliver(Wait(seconds), anew=True)
      for one in channel.open_channels().values():
        if channel.stands_in(one):
          one._close(None)  # pyright: ignore[reportPrivateUsage]
        else:
          channel.flushed(one, seconds)
    finally:
      _part.off("alert", self._note_alert)
      _part.off("check failed", self._note_check)
      channel.unwatch(self._stream_of, wait=True)
      self._drop_empty()

  def _end(self, error: BaseException | None) -> None:
    """Writes how the run ended; it is closed also where that fails, and has crashed by it."""
    with self._lock:
      self._knobs = _numbers_of_knobs()
      self.state = "finished"
      if error is not None and not _is_good_exit(error):
        self._crash(error)
      self._times["ended_ns"] = time.time_ns()
    opened.begin(None)
    with _opening:
      _open.clear()
    try:
      self._write()
    except BaseException as late:
      if self.state == "finished":
        self._crash(late)
      raise

  def _crash(self, error: BaseException) -> None:
    self.state = "crashed"
    if (original := failures.original_of(error)) is not error:  # a gate's, in JAX's
      error = original
    self._error = foreign.said_by(error)
    self._traceback = foreign.traceback_of(error)[-_TRACEBACK:]

  # -- what belongs to it ------------------------------------------------------------------------
  def _stream_of(self, name: str) -> Stream | None:
    if name.startswith(target.CHECKPOINTS):  # whose files have all of it
      return None
    several = group.known_index() if group.group() is not None else None
    path = files.stream_path(self.folder, name, several)
    self._streams.add(path)
    sink = Stream(path)
    sink.open(name)
    return sink

  def _drop_empty(self) -> None:
    """Removes streams without a record: of names that older programs send to."""
    for path in self._streams:
      with contextlib.suppress(OSError, ValueError):
        with open_stream(path) as stream:
          is_empty = next(stream, None) is None
        if is_empty:
          path.unlink()

  def _shared_folder(self) -> Path:
    """A folder that is there; of several processes the one that process 0 has made."""
    if (several := group.group()) is None:
      return files.make_folder(self._above, self.name)
    key = f"callgate/run/{next(_numbers)}"
    if several.index == 0:
      several.store.put(key, str(files.make_folder(self._above, self.name)))
    while (folder := several.store.get(key, several.look_seconds)) is None:
      if several.index in several.ended() or 0 in several.ended():
        raise GateError("run: expected process 0 to make the folder, got none: it has ended")
    return Path(folder)

  def _note_alert(self, one: alert.Alert) -> None:
    about = {"time_ns": one.time_ns, "text": str(one), "message": one.message}
    about |= {"lane": list(one.lane), "left_out": one.left_out}
    self._note(self._alerts, about)

  def _note_check(self, message: str, text: str) -> None:
    self._note(self._checks, {"time_ns": time.time_ns(), "text": text, "message": message})

  def _note(self, kept: list[dict[str, Any]], about: dict[str, Any]) -> None:
    with self._lock:
      if len(kept) < _MOST:
        kept.append(about)
        try:
          self._write()
        except OSError as error:  # a barrier's: the other listeners hear of it all the same
          failures.keep_consumer_error(error, f"callgate: raised in {self!r}")

  def _change(self, name: str, result: Result | None) -> None:
    """Puts a result in, or takes it out for None; nothing changes where that can't be written."""
    if self._process and self._process["id"] != os.getpid():
      here = f"got process {os.getpid()}, which was forked from it"
      raise GateError(f"run: expected process {self._process['id']}, whose run it is, {here}")
    with self._lock:
      before = dict(self._results)
      if result is None:
        del self._results[name]
      else:
        self._results[name] = result
      try:
        self._write()
      except BaseException:
        self._results.clear()
        self._results.update(before)
        raise
    if result is not None and self.state == "running":
      _part.tell("summary", name, result.plain)

  def _write(self) -> None:
    """Writes run.json; of several processes the first does."""
    several = group.group()
    not_first = several is not None and several.index != 0
    if self.state == "new" or not_first or self._process["id"] != os.getpid():
      return
    with self._lock:
      if self.state == "running":
        self._knobs = _numbers_of_knobs()
      about = {
        "name": self.name, "state": self.state, "error": self._error, "traceback": self._traceback,
        **self._times, "config": self.config, "notes": self.notes, "tags": list(self.tags),
        "summary": {name: one.plain for name, one in self._results.items()},
        "alerts": self._alerts, "checks": self._checks, "knobs": self._knobs,
        "process": self._process,
        "processes": 1 if several is None else several.count,
      }  # fmt: skip
      files.write(self.folder, about)


def _numbers_of_knobs() -> dict[str, Any]:
  return {name: values.plain("knob", one.value) for name, one in knob.live().items()}


def _is_good_exit(error: BaseException) -> bool:
  return foreign.is_a(error, SystemExit) and error.code in (None, 0)


def _stand_in(name: str) -> None:
  """Opens a channel for a name to which taps send, unless its user has."""
  is_own = name.startswith(target.CHECKPOINTS)
  if name not in channel.open_channels() and not is_own:
    with contextlib.suppress(ValueError):  # the user opens one now
      channel.Channel(name, "64MiB", "block", 100.0, (), None, stands_in=True)


def run(
  name: str,
  *,
  folder: StrPath = "runs",
  config: Any = None,
  notes: str = "",
  tags: Sequence[str] = (),
) -> Run:
  """A block around a training: what it makes belongs to the run, and lies in a folder of its own.

  ```python
  import callgate as cg, jax

  with cg.run("digits", config={"rate": 0.1, "layers": [64, 64]}, tags=["first"]) as run:
    step = jax.jit(lambda loss: cg.tap(loss * 0.5, "digits.loss"))
    loss = step(1.0)
    run.summary["loss"] = loss
  assert run.state == "finished"
  with cg.open_stream(run.folder / "stream.digits.loss.cgs") as stream:
    assert [float(record.leaves[""]) for record in stream] == [0.5]
  ```

  The folder has `run.json`, and a stream for each channel, `stream.NAME.cgs`: of channels that the
  program opens, and of names that taps send to without one. Relative paths of sinks, recordings and
  checkpoints that the block makes lie in it. `run.json` has the config, notes and tags, the state,
  the summary, alerts, failed checks and knobs; each change replaces it whole. Trackers that the
  block opens get these, too. `python -m callgate watch runs` shows all runs of a folder.

  At its end the block waits for all programs and records, and raises their errors as `barrier()`
  does. A run that an exception ends has "crashed", with its text; so has one whose process is
  killed. Both keep what came before.

  Args:
    name: the run's name. Its folder has it, and a number where there is such a folder already.
    folder: where the runs' folders are.
    config: a mapping by name, or a dataclass, of numbers, texts, paths, arrays (of which the type
      is kept, and up to 8 elements), and lists, mappings and dataclasses of these.
    notes: a text for people.
    tags: words to find the run by.

  Returns:
    A context manager, with `folder`, `summary` and `state`. One run of a process is open at a time.

  Raises:
    GateDefinitionError: an option is wrong; of a config's value it has the key.
    GateError: (entering) another run is open, or this one was.
    OSError: (entering) the folder can't be made.
  """
  options.name("run", options.text("run", "name", name, "a line of text"))
  above = os.path.abspath(options.path("run", "folder", folder))
  made = values.config("run: config", config)
  options.text("run", "notes", notes)
  return Run(str(name), above, made, str(notes), options.strings("run", "tags", tags))


@_part.joins("runs")
class Runs(Part):
  """Ends a run whose block the process did not leave."""

  def end(self, phase: Phase, wait: Wait) -> None:
    del wait
    if phase == "deliver":
      for one in list(_open):
        error = GateError("the process ended within the block")
        one._leave(error)  # pyright: ignore[reportPrivateUsage]
        for note in foreign.notes_of(error):
          print(note, file=sys.stderr)

  def forked(self) -> None:
    """The run is the parent's."""
    _open.clear()
    opened.begin(None)
