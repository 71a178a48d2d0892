# SPDX-License-Identifier: Apache-2.0
"""Follows folders of runs for the page: a thread reads `run.json` files and the runs' streams.

Each run has a model of its own. A file is read to its end, and kept open while its run continues.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from callgate._core import opened
from callgate._runs import files
from callgate._stream.reader import StreamReader, open_stream
from callgate._stream.records import StreamRecord
from callgate._watch.model import Model

_PERIOD = 0.5  # seconds between two scans
_CHUNK = 4096  # the most records that a model gets at once
_POINTS = 4000  # the most points of a curve
_MOST_TEXT = 2000  # the most characters of a shown value


class WatchedRun:
  """One run: the content of its `run.json`, and a model of its streams."""

  def __init__(self, folder: Path, name: str) -> None:
    self.folder, self.id = folder, name
    self.about: dict[str, Any] = {}
    self.model = Model(points=_POINTS)
    self.problem = ""  # the reason why a file can't be read
    self._stamp: tuple[int, int] | None = None
    self._readers: dict[Path, tuple[int, StreamReader | None]] = {}  # None once read to the end

  @property
  def is_running(self) -> bool:
    return self.about.get("state") == "running"

  def look(self, ending: threading.Event) -> bool:
    """Reads new data. False if the run no longer exists."""
    try:
      found = os.stat(self.folder / files.FILE)
      stamp = found.st_mtime_ns, found.st_ino
      changed = stamp != self._stamp
      if changed or self.is_running:
        self.about, self._stamp = files.read(self.folder), stamp
    except FileNotFoundError:
      return False
    except (OSError, ValueError) as error:
      self.about, self._stamp = {"state": "unreadable", "error": str(error)}, None
      return True
    # Streams get no more records once their run has ended and its end has been seen before.
    if changed or self.is_running or any(reader for _, reader in self._readers.values()):
      self._read(ending)
    return True

  def _read(self, ending: threading.Event) -> None:
    goes_on = self.is_running
    for path in sorted(self.folder.glob(files.STREAMS)):
      if path not in self._readers:
        with self._naming(path):
          reader = open_stream(os.fspath(path), follow=True)
          self._readers[path] = self.model.add_run(self.id, self.about.get("started_ns")), reader
    for path, (source, reader) in self._readers.items():
      if reader is None:
        continue
      damaged = True
      with self._naming(path):
        while not ending.is_set() and self._read_some(reader, source):
          pass
        damaged = False
      if damaged or not (goes_on or ending.is_set()):
        reader.close()
        self._readers[path] = source, None

  def _read_some(self, reader: StreamReader, source: int) -> bool:
    """True if there may be more."""
    chunk: list[StreamRecord] = []
    try:
      while len(chunk) < _CHUNK and (record := reader.read(0.0)) is not None:
        chunk.append(record)
    finally:  # also the records before damage
      self.model.add(chunk, source)
    return len(chunk) == _CHUNK

  @contextlib.contextmanager
  def _naming(self, path: Path) -> Generator[None]:
    try:
      yield
    except (OSError, ValueError) as error:
      self.problem = f"{path.name}: {error}"

  def close(self) -> None:
    for _, reader in self._readers.values():
      if reader is not None:
        reader.close()

  # -- for the page ------------------------------------------------------------------------------
  def row(self) -> dict[str, Any]:
    """Returns the run as a row of the table; its texts may come from anybody."""
    about = self.about
    began, ended = about.get("started_ns"), about.get("ended_ns")
    began = began if type(began) is int else None
    last = self.model.totals().latest_ns if not self.is_running else time.time_ns()
    end = ended if type(ended) is int else last
    rows: dict[str, Any] = {"last": {}, "media": {}}
    for key in self.model.versions():
      kind, value = self.model.ask(key, lambda panel: (bool(panel.media), panel.last))
      rows["media" if kind else "last"][key.label] = None if kind else _plain(value)
    return {
      "id": self.id, "name": _text(about.get("name", self.id)), "state": _text(about.get("state")),
      "error": _text(about.get("error") or self.problem), "started_ms": began and began // 10**6,
      "seconds": max(0.0, (end - began) * 1e-9) if began and end else None,
      "notes": _text(about.get("notes") or ""), "tags": list(map(_text, _listed(about, "tags"))),
      "config": _flat(about.get("config")), "summary": _flat(about.get("summary")),
      "knobs": _flat(about.get("knobs")), "last": rows["last"], "media": list(rows["media"]),
      "alerts": [_alert(one) for one in _listed(about, "alerts")[-20:]],
      "alert_count": len(_listed(about, "alerts")),
      "checks": [_alert(one) for one in _listed(about, "checks")[-20:]],
      "records": self.model.totals().records, "version": sum(self.model.versions().values()),
    }  # fmt: skip


class RunsFollower(threading.Thread):
  """Follows all runs of some folders, on a thread of its own."""

  def __init__(self, folders: Sequence[str]) -> None:
    super().__init__(name="callgate-watch-runs", daemon=True)
    self._folders = [Path(os.path.abspath(folder)) for folder in folders]
    self._depth = _depth({one.parent if _is_run(one) else one for one in self._folders})
    self._runs: dict[Path, WatchedRun] = {}
    self._lock = threading.Lock()
    self._ending = threading.Event()

  def look(self) -> None:
    """Finds new runs, forgets deleted ones, and reads new data, the newest run first."""
    found = [path for folder in self._folders for path in _runs_in(folder)]
    with self._lock:
      for path in found:
        if path not in self._runs:
          self._runs[path] = WatchedRun(path, self._id_of(path))
      runs = list(self._runs.items())
    for path, run in sorted(runs, key=lambda one: _began(one[0]), reverse=True):
      if self._ending.is_set():
        return
      if not run.look(self._ending):
        run.close()
        with self._lock:
          self._runs.pop(path, None)

  def run(self) -> None:
    while not self._ending.is_set():
      self.look()
      self._ending.wait(_PERIOD)

  def stop(self) -> None:
    self._ending.set()
    self.join()
    for run in self.runs():
      run.close()

  def runs(self) -> list[WatchedRun]:
    """Returns the runs, the newest first."""
    with self._lock:
      runs = list(self._runs.values())
    began = [(run.about.get("started_ns"), run) for run in runs if run.about]
    key = [(at if type(at) is int else 0, run) for at, run in began]
    return [run for _, run in sorted(key, key=lambda one: one[0], reverse=True)]

  def states(self) -> list[str]:
    return [
      f"{_end(folder, self._depth)}: {len(_runs_in(folder))} runs" for folder in self._folders
    ]

  def _id_of(self, path: Path) -> str:
    """The run's name, behind as much of its folder's path as tells the folders apart."""
    return path.name if len(self._folders) == 1 else _end(path, self._depth + 1)


def _is_run(folder: Path) -> bool:
  return (folder / files.FILE).is_file()


def _depth(folders: set[Path]) -> int:
  """How many of the last parts of their paths tell folders apart."""
  depth = 1
  while len({_end(folder, depth) for folder in folders}) < len(folders):
    depth += 1
  return depth


def _end(path: Path, count: int) -> str:
  return "/".join(path.parts[-count:])


def _runs_in(folder: Path) -> list[Path]:
  """Returns the folder itself if it is a run's; else the folders of the runs in it."""
  if _is_run(folder):
    return [folder]
  try:
    return sorted(filter(_is_run, folder.iterdir()))
  except OSError:  # missing: not there yet, or deleted
    return []


def _began(path: Path) -> float:
  try:
    return path.stat().st_ctime
  except OSError:
    return 0.0


def _listed(about: dict[str, Any], name: str) -> list[Any]:
  value = about.get(name)
  return value if isinstance(value, list) else []


def _flat(value: Any) -> dict[str, Any]:
  found = opened.flat(value) if isinstance(value, dict) else {}
  return {_text(key): _plain(one) for key, one in found.items()}


def _alert(one: Any) -> dict[str, Any]:
  """Returns an alert, or a failed check, for the page."""
  about = one if isinstance(one, dict) else {}
  at, left_out = about.get("time_ns"), about.get("left_out")
  return {
    "time_ms": at // 10**6 if type(at) is int else None,
    "text": _text(about.get("text", "")),
    "left_out": left_out if type(left_out) is int else 0,
  }


def _plain(value: Any) -> Any:
  if value is None or isinstance(value, (bool, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)
  return _text(", ".join(map(str, value)) if isinstance(value, list) else value)


def _text(value: Any) -> str:
  text = str(value)
  return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"
