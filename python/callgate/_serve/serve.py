# SPDX-License-Identifier: Apache-2.0
"""`callgate.serve`: a live page of this process's channels, with its knobs and a stop button."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from callgate import _part
from callgate._core import options, paths
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Closing
from callgate._core.weak import members
from callgate._gate.stats import stats
from callgate._part import Part, Phase, Wait
from callgate._serve.local import LocalFeed
from callgate._steer import knob
from callgate._steer.knob import Knob
from callgate._steer.stop import stop, stop_reason
from callgate._tap.alert import Alert
from callgate._tap.tap import channel_stats
from callgate._watch.answers import PageAnswers
from callgate._watch.model import Model
from callgate._watch.server import PageServer, Query, RequestError

_MOST_TOLD = 100  # the most messages
_MOST_EXACT = 2**53  # browsers read JSON's numbers as float64
_servers: weakref.WeakSet[Server] = weakref.WeakSet()  # atomic: single steps
StrPath = str | os.PathLike[str]


class Server(Closing):
  """A live page of this process; made by `callgate.serve`. A context manager that closes it.

  Attributes:
    url: the page's address, which contains the secret that gives access.
  """

  def __init__(self, control: bool, port: int, file: str | None) -> None:
    self._control, self._file = control, None if file is None else Path(file)
    self._process = os.getpid()
    self._lock = threading.Lock()
    self._closed = False
    self._checks, self._alerts = _Told("check"), _Told("alert")
    self._feed: LocalFeed | None = None
    model = Model()
    self._answers = PageAnswers(model, lambda: [] if self._feed is None else self._feed.states())
    gets = self._answers.gets() | {"state": lambda query: self._state(), "knobs": self._get_knobs}
    posts = {"knobs": self._set_knobs, "stop": self._stop}
    self._page = PageServer(gets, posts, port=port, option="port=")
    self.url = self._page.url
    _servers.add(self)
    try:
      self._write_file()
      _part.on("check failed", self._checks.note)
      _part.on("alert", self._note_alert)
      self._feed = LocalFeed(model)
    except BaseException:
      self.close()
      raise

  def __repr__(self) -> str:
    what = "closed" if self._closed else "with control" if self._control else "without control"
    return f"<callgate server at 127.0.0.1:{self._page.port}, {what}>"

  def close(self) -> None:
    """Closes the page and frees the port; waits for consumers as `Channel.remove` does.

    In a fork's child it does nothing, since the page belongs to the parent.
    """
    self._end(wait=True)

  def _end(self, *, wait: bool) -> None:
    with self._lock:
      if self._closed or os.getpid() != self._process:
        return
      self._closed = True
    self._page.close()
    if self._file is not None:
      with contextlib.suppress(OSError):
        if (
          self._file.read_text(encoding="utf-8") == self._file_text()
        ):  # else another server has replaced it
          self._file.unlink()
    _part.off("check failed", self._checks.note)
    _part.off("alert", self._note_alert)
    if self._feed is not None:
      self._feed.stop(wait=wait)

  def _note_alert(self, one: Alert) -> None:
    self._alerts.note(one.message, str(one))

  def _file_text(self) -> str:
    return f"{self.url}\n"

  def _write_file(self) -> None:
    if self._file is None:
      return
    with paths.replaced(self._file) as made:
      flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
      with open(os.open(made, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(self._file_text())

  # -- answers -----------------------------------------------------------------------------------
  def _state(self) -> dict[str, Any]:
    control = None
    if self._control:
      control = {"knobs": _knobs(), "stop_reason": stop_reason()}
    channels = [{"channel": name} | counts for name, counts in channel_stats().items()]
    gates = [
      {"gate": name} | {key: round(value, 3) for key, value in counts.items()}
      for name, counts in stats().items()
    ]
    called = [one for one in gates if one["calls"] or one["errors"]]
    mine = {"control": control, "checks": self._checks.rows(), "alerts": self._alerts.rows()}
    return self._answers.state() | mine | {"channels": channels, "gates": called}

  def _get_knobs(self, query: Query) -> dict[str, Any]:
    del query
    self._expect_control()
    return {"knobs": _knobs()}

  def _set_knobs(self, values: dict[str, Any]) -> dict[str, Any]:
    self._expect_control()
    try:
      knob.set_all({name: _as_sent(name, value) for name, value in values.items()})
    except GateDefinitionError as error:
      raise RequestError(400, str(error)) from error
    return {"knobs": [one for one in _knobs() if one["name"] in values]}

  def _stop(self, sent: dict[str, Any]) -> dict[str, Any]:
    self._expect_control()
    if set(sent) - {"reason"} or not isinstance(reason := sent.get("reason", ""), str):
      raise RequestError(400, f"stop: expected an object with a string 'reason', got {sent!r}")
    try:
      stop(reason)
    except GateDefinitionError as error:
      raise RequestError(400, str(error)) from error
    return {"stop_reason": reason}

  def _expect_control(self) -> None:
    if not self._control:
      raise RequestError(403, "control is off; pass callgate.serve(control=True)")


def serve(*, control: bool = False, port: int = 0, file: StrPath | None = None) -> Server:
  """Serves a live page of this process, on the loopback interface.

  ```python
  import callgate as cg

  rate = cg.knob("rate", 0.1, range=(1e-4, 1.0), scale="log")
  with cg.serve(control=True) as server:
    assert server.url.startswith("http://127.0.0.1:")
  ```

  The page shows the curves of every channel with a consumer, the counters of channels and gates,
  alerts and failed checks. With `control` it has a field for each `knob` and a button for `stop`;
  the commands `python -m callgate knobs`, `set` and `stop` do the same.

  The address contains a random secret. Everybody who has it can see the page and, with `control`,
  change the program. The server refuses requests of other web pages.

  Args:
    control: lets the page and the commands set knobs and stop programs.
    port: the port of 127.0.0.1; 0 for any free one.
    file: a file that contains the address until the server is closed; only you can read it.

  Returns:
    A `Server`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong.
    OSError: the port is taken, or the file can't be written.
  """
  options.boolean("serve", "control", control)
  number = options.count("serve", "port", port, most=65535, what="a port, 0 for any")
  return Server(control, number, options.or_none(options.path, "serve", "file", file))


def _knobs() -> list[dict[str, Any]]:
  return [_described(one) for one in knob.live().values()]


def _described(one: Knob) -> dict[str, Any]:
  ends = None if one.range is None else [_plain(end) for end in one.range]
  about = {"name": one.name, "value": _plain(one.value), "dtype": one.dtype.name}
  return about | {"range": ends, "scale": one.scale}


def _plain(number: Any) -> Any:
  """Converts a number to JSON; NaN, infinities and numbers beyond float64 become text."""
  if isinstance(number, float) and not abs(number) < float("inf"):
    return str(number)
  return str(number) if isinstance(number, int) and abs(number) > _MOST_EXACT else number


def _as_sent(name: str, value: Any) -> Any:
  """Returns a knob's value from JSON; a text becomes the number or bool that it stands for."""
  if isinstance(value, float) and math.isnan(value):  # as Python reads JSON
    value = "NaN"
  if not isinstance(value, str):
    return value
  if value in ("true", "false"):
    return value == "true"
  for kind in (int, float):
    with contextlib.suppress(ValueError):
      if not math.isnan(number := kind(value)):
        return number
  raise RequestError(400, f"knob {name!r}: value: expected a number, true or false, got {value!r}")


class _Told:
  """Failed checks or alerts by message: their number, the time of the last one, and its text."""

  def __init__(self, title: str) -> None:
    self._title = title
    self._lock = threading.Lock()
    self._held: dict[str, tuple[int, datetime.datetime, str]] = {}

  def note(self, message: str, text: str) -> None:
    with self._lock:
      if message in self._held or len(self._held) < _MOST_TOLD:
        times, *_ = self._held.get(message, (0,))
        self._held[message] = times + 1, datetime.datetime.now(), text[:1000]

  def rows(self) -> list[dict[str, Any]]:
    with self._lock:
      held = list(self._held.values())
    names = ("times", "last", self._title)
    return [dict(zip(names, (n, f"{at:%H:%M:%S}", text), strict=True)) for n, at, text in held]


@_part.joins("serve")
class _ServedPages(Part):
  """Closes the pages, after programs have ended, so that they can be stopped until then."""

  def end(self, phase: Phase, wait: Wait) -> None:
    del wait
    for server in members(_servers) if phase == "join" else ():
      server._end(wait=False)  # pyright: ignore[reportPrivateUsage]

  def forked(self) -> None:
    for server in members(_servers):
      server._page.forget()  # pyright: ignore[reportPrivateUsage]
