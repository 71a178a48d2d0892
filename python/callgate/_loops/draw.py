# SPDX-License-Identifier: Apache-2.0
"""Draws progress bars on one thread of the process, which polls the board about ten times a second.

The thread starts with the first bar, and ends a while after the last bar has ended. The end of the
process waits for it. Only this thread touches the bars. Programs never wait for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from callgate import _callgate
from callgate._core import foreign, names
from callgate._core.errors import GateDefinitionError
from callgate._loops.progress import noted
from callgate._part import Part, Phase, Wait, join

# Seconds: between polls; the longest wait of a barrier for bars.
_PERIOD, _BARRIER_SECONDS = 0.1, 10.0
_TAPS_SECONDS = 0.5  # seconds: the longest wait of an ending bar for its values
_LINGER = 20  # the thread ends after so many polls without a bar
_MOST_SHOWN = 6  # the most values behind a bar that names none


class _State(NamedTuple):
  """A bar's state on the board; see src/cells/progress.h."""

  handle: int
  bar: int
  text: str
  run: int
  total: int
  steps: int
  age: float  # seconds since the bar began
  seconds: float  # seconds from the bar's beginning to its end, or to now
  phase: str
  lane: int  # -1 for a bar of all lanes
  first: float  # for a bar by value: its first, last and present value; else NaN
  last: float
  at: float

  @property
  def depth(self) -> int:
    """The number of loops with bars around it."""
    return json.loads(self.text)["depth"]

  @property
  def is_due(self) -> bool:
    """True once it has enough steps to be drawn."""
    return max(self.total, self.steps) >= json.loads(self.text).get("least", 0)

  @property
  def by_value(self) -> bool:
    return self.last == self.last

  @property
  def whole(self) -> float | None:
    """The length of the bar, from 0; None if it isn't known."""
    if self.by_value:
      return abs(self.last - self.first)
    return None if self.total < 0 else self.total

  @property
  def done(self) -> float:
    """The progress so far."""
    if not self.by_value:
      return self.steps
    way = math.copysign(1.0, self.last - self.first) * (self.at - self.first)
    return min(max(0.0, way), abs(self.last - self.first))  # `max` treats NaN as less than 0

  def where(self, done: float) -> str | None:
    """Returns the value at progress `done`, and its end, as text; None for a bar of steps."""
    at = self.first + math.copysign(done, self.last - self.first)
    return f"{at:.4g}/{self.last:.4g}" if self.by_value else None


class _Drawn:
  """A bar on the screen; `began` is its start on the clock of notes."""

  def __init__(self, state: _State, began: float) -> None:
    options = json.loads(state.text)
    self._handle, self._began = state.handle, began
    self._show: list[str] | None = options.get("show")
    self._shown: dict[str, str] = {}
    desc, position = options.get("desc"), options.get("position")
    if state.lane >= 0:
      desc = f"{desc or 'lane'} {state.lane}"
      position = None if position is None else position + state.lane
    self._desc = desc
    self._bar = _make(
      total=state.whole, desc=desc, file=_file_of(options),
      position=position, leave=options["leave"] and state.depth == 0,
      mininterval=options["mininterval"], style=options["style"],
    )  # fmt: skip

  def draw(self, state: _State) -> None:
    """Updates the bar, with the latest values behind it."""
    bar = self._bar
    if self._handle != state.handle:  # a nested loop that runs again
      bar.reset(state.whole)
      self._handle = state.handle
    shown = self._latest(state.lane)
    if shown and shown != self._shown:
      self._shown = shown
      bar.set_postfix(shown, refresh=False)
    bar.start_t = time.time() - state.seconds
    # tqdm treats a bar whose last print came before its start as one that was never shown.
    bar.last_print_t = max(getattr(bar, "last_print_t", 0.0), bar.start_t)
    done = max(state.done, bar.n)
    bar.where = state.where(done)
    bar.update(done - bar.n)

  def _latest(self, lane: int) -> dict[str, str]:
    """Returns the latest values, the lane's own first: the named ones, or all since it began."""
    values = noted.copy()
    latest = {name: it for own in (None, lane) for (name, of), it in values.items() if of == own}
    if self._show is not None:
      show = [name for name in self._show if name in latest]
    else:
      show = [name for name, (when, _) in latest.items() if when >= self._began][:_MOST_SHOWN]
    return {_label(name): _text_of(latest[name][1]) for name in show}

  def close(self) -> None:
    try:
      self._bar.close()
    except Exception as error:  # noqa: BLE001 - as in `Bars._draw`
      _tell(self._desc, error)


def _file_of(options: dict[str, Any]) -> Any:
  if (name := options.get("file")) is None:
    return sys.stderr
  try:
    return names.find(name, "file").value
  except GateDefinitionError:
    return io.StringIO()  # the file no longer exists


def _tell(desc: str | None, error: BaseException) -> None:
  """Reports on standard error that a bar isn't drawn."""
  bar = "a progress bar" if desc is None else f"the progress bar '{desc}'"
  said = f"{bar} is no longer drawn; its loop continues"
  print(f"callgate: {said}: {foreign.said_by(error)}", file=sys.stderr)


def _label(name: str) -> str:
  """Returns the label behind the bar for a tap's name, which may be that of a lambda."""
  return "value" if name == "<lambda>" else name


def _text_of(value: Any) -> str:
  try:
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
  except (TypeError, ValueError):
    return str(value)


class Bars(Part):
  """The drawing thread and its bars."""

  name = "bars"

  def __init__(self) -> None:
    self._lock, self._stirred = threading.Lock(), threading.Event()
    self._polled = threading.Condition(self._lock)
    self._polls, self._stopped = 0, False
    self._running = 0  # the number of threads: one that ends may overlap with the next
    self._thread: threading.Thread | None = None
    self._bars: dict[int, _Drawn | None] = {}  # None for a bar that can't be drawn

  def start(self) -> None:
    """Starts the thread; the board calls it when a bar begins and no thread draws."""
    with self._lock:
      if self._stopped:
        return
      self._running += 1
      self._thread = threading.Thread(
        target=self._run, args=(self._thread,), name="callgate-progress", daemon=True
      )
      self._thread.start()

  def flush(self, timeout: float | None = None) -> bool:
    """Waits until the board's present state is drawn. False if the time ran out."""
    with self._lock:
      last = self._polls + 2  # the current poll may have begun too early

      def is_drawn() -> bool:
        self._stirred.set()
        return self._polls >= last or not self._running

      return self._polled.wait_for(is_drawn, timeout)

  def settle(self, wait: Wait) -> bool:
    """Waits for the bars. A bar that isn't drawn in time doesn't delay the barrier."""
    self.flush(min(wait.left, _BARRIER_SECONDS))
    return True

  def end(self, phase: Phase, wait: Wait) -> None:
    """Ends the thread; bars of programs that still run stop as they are."""
    if phase != "draw":
      return
    with self._lock:
      self._stopped = True
      self._stirred.set()
      thread = self._thread
    if thread is not None and thread is not threading.current_thread():
      thread.join(timeout=wait.left)

  def _run(self, before: threading.Thread | None) -> None:
    if before is not None:
      before.join()
    idle = 0
    while idle < _LINGER or not _callgate.progress_retire():
      self._poll()
      idle = 0 if self._bars else idle + 1
      with self._lock:
        self._polls += 1
        self._polled.notify_all()
        has_stopped = self._stopped
      if has_stopped:
        self._poll()  # bars may have ended or begun meanwhile
        for bar in [*self._bars]:
          self._close(bar)
        break
      self._stirred.wait(_PERIOD)
      self._stirred.clear()
    with self._lock:
      self._running -= 1
      self._polled.notify_all()

  def _poll(self) -> None:
    try:
      # Before the poll, so that no note of a bar seems older than the bar.
      polled = time.monotonic()
      states = [_State(*state) for state in _callgate.progress_poll()]
      if ended := _ended(states):  # they show their last values
        _callgate.flush_channels(_TAPS_SECONDS)
      if jax.process_index() == 0:
        for state in sorted(states, key=lambda s: (s.bar, s.lane)):
          self._draw(state, polled - state.age)
      for state in ended:
        _callgate.progress_release(state.handle)
        self._close(state.bar)
    except Exception as error:  # noqa: BLE001 - a bar that can't be drawn must not end the program
      foreign.print_traceback(error)
      self._bars.clear()
      for state in _callgate.progress_poll():  # the ended bars
        _callgate.progress_release(state[0])

  def _draw(self, state: _State, began: float) -> None:
    """Draws a bar. If it can't be drawn, reports that once, and the other bars continue."""
    try:
      if state.bar not in self._bars and state.is_due:
        self._bars[state.bar] = _Drawn(state, began)
      if (drawn := self._bars.get(state.bar)) is not None:
        drawn.draw(state)
    except Exception as error:  # noqa: BLE001 - from the file, tqdm or rich
      self._bars[state.bar] = None
      _tell(json.loads(state.text).get("desc"), error)

  def _close(self, bar: int) -> None:
    if (drawn := self._bars.pop(bar, None)) is not None:
      drawn.close()


def _ended(states: Sequence[_State]) -> list[_State]:
  """Returns the bars that have ended, except a nested loop's bars, which may run again."""
  around: dict[int, int] = {}  # by run: the depth of the outermost bar whose loop runs
  for it in states:
    if it.phase == "live":
      around[it.run] = min(it.depth, around.get(it.run, it.depth))
  return [it for it in states if it.phase != "live" and around.get(it.run, it.depth) >= it.depth]


def _make(*, file: Any, position: int | None, mininterval: float, style: str, **what: Any) -> Any:
  """Makes the kind of bar that suits the file and the environment.

  The other options are `total`, `desc` and `leave`. Its `where` is set to the text of a bar by
  value.
  """
  from callgate._loops import bars  # needs tqdm

  ipython: Any = sys.modules.get("IPython")
  notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
  if not notebook and not (hasattr(file, "isatty") and file.isatty()):
    return bars.Lines(file=file, **what)
  if style == "rich":
    from callgate._loops import rich

    return rich.RichBar(file=file, **what)
  if notebook and file is sys.stderr:
    with contextlib.suppress(ImportError):  # if ipywidgets is missing
      from tqdm.notebook import tqdm as widget

      kind: Any = type("Widget", (bars.Redrawn, widget), {})
      return kind(mininterval=mininterval, miniters=0, **what)
  return bars.Redrawn(
    file=file, position=position, mininterval=mininterval, miniters=0, dynamic_ncols=True, **what
  )


_drawer = Bars()  # locks itself: `Bars._lock`, and its bars are its thread's
start = _drawer.start  # called by the board, which has a bar to draw
flush = _drawer.flush
join(_drawer)
