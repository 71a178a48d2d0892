# SPDX-License-Identifier: Apache-2.0
"""`callgate.run`: a folder for a training, with everything that its block makes.

A process has at most one open run. Every channel gets a stream in the folder beside its own
consumers. A name that taps send to without a channel gets a channel that gives way to the user's.
`_core/opened.py` makes relative paths relative to the folder. The thread that changes something
writes `run.json`.
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
from callgate._core.errors import LINK, GateError
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

_MOST = 1000  # the most alerts, and failed checks, in run.json
_SECONDS = 30.0  # seconds for waiting records if an exception ends the block; for earlier alerts
_TRACEBACK = 20_000  # the last characters that are kept
StrPath = str | os.PathLike[str]
_open: list[Run] = []  # guarded by _opening, but for a fork's child; at most one entry
_opening = threading.Lock()
_numbers = itertools.count()  # numbers of runs, the same in every process. Guarded by _opening


class Run(Stays):
  """A training with a folder of its own; `callgate.run` returns it, as a context manager.

  Attributes:
    name: the run's name.
    folder: its folder, an absolute `pathlib.Path`, from the start of the block.
    config: the config, as stored in JSON.
    notes: the notes.
    tags: the tags.
    summary: a mapping of results by name; each change is written to the folder at once, as JSON.
    state: "new", "running", "finished" or "crashed".
  """

  _stays = "its folder belongs to this process; make a new run in the other process"

  def __init__(
    self, name: str, folder: str, config: dict[str, Any], notes: str, tags: tuple[str, ...]
  ) -> None:
    self.name, self.config, self.notes, self.tags = name, config, notes, tags
    self._results: dict[str, Result] = {}
    self.summary: MutableMapping[str, Any] = Summary(self._results, self._change)
    self.state = "new"
    self.folder: Path = Path(folder)
    self._above = folder
    self._lock = threading.RLock()  # guards the content of run.json
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
          f"run: expected no other run in this process, got {self.name!r} in the block of "
          f"{other}; close that one first"
        )
      if self.state != "new":
        raise GateError(f"run: a run can be entered once, got {self.name!r} again; make a new one")
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
    """Adds streams to all channels, and listens to alerts and failed checks."""
    self._write()
    alert.deliver(Wait(_SECONDS), anew=True)  # earlier alerts don't belong to the run
    opened.begin(
      opened.OpenRun(
        self.name, str(self.folder), self.config, self.notes, self.tags, self._plain_results
      )
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
      return  # in a fork's child the block belongs to the parent
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
    """Removes the streams and writes how the run ended; the run is closed even if this fails.

    If an `error` ends the block, a failure becomes its note.

    Raises:
      BaseException: the failure, if there is no such error; also Ctrl-C.
    """
    cause = error
    for step in (self._let_go, _end_trackers, self._end):
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
    """Delivers waiting records, then removes the streams and listeners."""
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
    """Writes how the run ended. If that fails, the run is closed all the same, and has crashed."""
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
    if (original := failures.original_of(error)) is not error:  # the gate's exception behind JAX's
      error = original
    self._error = foreign.said_by(error)
    self._traceback = foreign.traceback_of(error)[-_TRACEBACK:]

  # -- the run's content -------------------------------------------------------------------------
  def _stream_of(self, name: str) -> Stream:
    several = group.known_index() if group.group() is not None else None
    path = files.stream_path(self.folder, name, several)
    self._streams.add(path)
    sink = Stream(path)
    sink.open(name)
    return sink

  def _drop_empty(self) -> None:
    """Removes streams without a record, for names that older programs send to."""
    for path in self._streams:
      with contextlib.suppress(OSError, ValueError):
        with open_stream(path) as stream:
          is_empty = next(stream, None) is None
        if is_empty:
          path.unlink()

  def _shared_folder(self) -> Path:
    """Makes the folder; in a multi-host program, process 0 makes it for all."""
    if (several := group.group()) is None:
      return files.make_folder(self._above, self.name)
    key = f"callgate/run/{next(_numbers)}"
    if several.index == 0:
      several.store.put(key, str(files.make_folder(self._above, self.name)))
    while (folder := several.store.get(key, several.look_seconds)) is None:
      if several.index in several.ended() or 0 in several.ended():
        ended = "but it has ended; its own output has the reason"
        raise GateError(f"run: expected process 0 to make the folder, {ended}")
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
        except OSError as error:  # a barrier raises it; the other listeners still get the alert
          failures.keep_consumer_error(error, f"callgate: raised in {self!r}")

  def _change(self, name: str, result: Result | None) -> None:
    """Sets a result, or removes it for None. If it can't be written, nothing changes."""
    if self._process and self._process["id"] != os.getpid():
      here = f"got process {os.getpid()}, which was forked from it"
      raise GateError(f"run: expected process {self._process['id']}, which opened the run, {here}")
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

  def _plain_results(self) -> dict[str, Any]:
    with self._lock:
      return {name: one.plain for name, one in self._results.items()}

  def _write(self) -> None:
    """Writes run.json; in a multi-host program, process 0 does."""
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
        "summary": self._plain_results(),
        "alerts": self._alerts, "checks": self._checks, "knobs": self._knobs,
        "process": self._process,
        "processes": 1 if several is None else several.count,
      }  # fmt: skip
      files.write(self.folder, about)


def _end_trackers(error: BaseException | None) -> None:
  """Ends the block's trackers."""
  del error
  _part.tell_all("run ends")


def _numbers_of_knobs() -> dict[str, Any]:
  return {name: values.plain("knob", one.value) for name, one in knob.live().items()}


def _is_good_exit(error: BaseException) -> bool:
  return foreign.is_a(error, SystemExit) and error.code in (None, 0)


def _stand_in(name: str) -> None:
  """Opens a channel for a name to which taps send, unless the user has."""
  is_own = name.startswith(target.CHECKPOINTS)
  if name not in channel.open_channels() and not is_own:
    with contextlib.suppress(ValueError):  # the user opens one at this moment
      channel.Channel(name, "64MiB", "block", 100.0, (), None, stands_in=True)


def run(
  name: str,
  *,
  folder: StrPath = "runs",
  config: Any = None,
  notes: str = "",
  tags: Sequence[str] = (),
) -> Run:
  """Opens a run: a training with a folder for its config, metrics, files and results.

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

  The folder gets

  - `run.json`: the config, notes and tags, the state, the summary, alerts, failed checks and knobs.
    Each change replaces the file as a whole.
  - `stream.NAME.cgs` for each channel that the program opens, and for each name that taps send to
    without a channel.
  - the files of sinks, recordings and checkpoints that the block makes with relative paths.

  Trackers that the block opens log the run, too. `python -m callgate watch runs` shows all runs of
  a folder.

  The end of the block waits for all programs and records, and raises their errors as `barrier()`
  does. If an exception ends the block, the run has "crashed", and `run.json` has the exception's
  text. A run whose process is killed has crashed, too. Both keep everything written before.

  Args:
    name: the run's name, and its folder's. If the folder exists, the new one gets a number.
    folder: the parent folder of the runs' folders.
    config: a mapping or a dataclass of numbers, texts, paths, arrays, and lists, mappings and
      dataclasses of these. An array is stored as its type, with its elements if there are at most
      8.
    notes: any text.
    tags: words to find the run by.

  Returns:
    A `Run`, a context manager. A process may have one open run at a time.

  Raises:
    GateDefinitionError: an option is wrong. For a value of the config the message has its key.
    GateError: at the start: another run is open, or this one was open before.
    OSError: at the start: the folder can't be made.
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
          if not note.startswith(LINK):
            print(note, file=sys.stderr)

  def forked(self) -> None:
    """Forgets the run in a fork's child, since it belongs to the parent."""
    _open.clear()
    opened.begin(None)
