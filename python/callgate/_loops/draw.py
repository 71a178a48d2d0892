"""Draws progress bars: one thread of the process, which polls the board some ten times a second.

It starts with the first bar that begins while nobody draws, and ends a while after the last one is
gone; `stop` ends it before Python does. It alone touches the bars. Programs never wait for it.

`_make` may be replaced (`use`) to draw by other means: a function with tqdm's own arguments
(total, desc, file, position, leave, mininterval) that gives an object with `n`, `start_t`,
`update`, `reset`, `set_postfix`, `refresh` and `close`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from callgate import _callgate
from callgate._loops.progress import file_of, noted
from callgate._runtime.barrier import at_barrier

_PERIOD = 0.1
_BARRIER_SECONDS = 10.0  # that a barrier waits for bars at most
_LINGER = 20  # polls without a bar, after which the thread ends
_MOST_SHOWN = 6  # values behind a bar, when none are named


class _State(NamedTuple):
  """What the board says of a bar; see src/core/progress.h."""

  handle: int
  bar: int
  text: str
  run: int
  total: int
  steps: int
  age: float  # seconds since it began
  seconds: float  # the same, until its end
  phase: str

  @property
  def depth(self) -> int:
    """Of its loop in others with bars."""
    return int(json.loads(self.text).get("depth", 0))


@dataclasses.dataclass(eq=False, repr=False)
class _Drawn:
  """A bar on the screen."""

  handle: int
  bar: Any
  show: list[str] | None
  began: float  # on the clock of notes
  depth: int
  shown: str = ""


class _Drawer:
  """The thread and its bars."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._polled = threading.Condition(self._lock)
    self._polls = 0
    self._running = 0  # threads: one that ends may not be gone when the next one starts
    self._thread: threading.Thread | None = None
    self._stirred = threading.Event()
    self._stopped = False
    self._bars: dict[int, _Drawn] = {}

  def start(self) -> None:
    """Starts the thread; called by the board when a bar begins that nobody draws."""
    with self._lock:
      if self._stopped:
        return
      self._running += 1
      self._thread = threading.Thread(
        target=self._run, args=(self._thread,), name="callgate-progress", daemon=True
      )
      self._thread.start()

  def flush(self, timeout: float | None = None) -> bool:
    """Waits until what the board has now is drawn. False when the time was over."""
    with self._lock:
      last = self._polls + 2  # the poll that is under way may have begun too early

      def is_drawn() -> bool:
        if self._polls >= last or not self._running:
          return True
        self._stirred.set()
        return False

      return self._polled.wait_for(is_drawn, timeout)

  def stop(self, seconds: float) -> None:
    """Ends the thread and closes all bars where they stand: the process ends."""
    with self._lock:
      self._stopped = True
      self._stirred.set()
      thread = self._thread
    if thread is not None and thread is not threading.current_thread():
      thread.join(timeout=seconds)

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
        while self._bars:
          self._bars.popitem()[1].bar.close()
        break
      self._stirred.wait(_PERIOD)
      self._stirred.clear()
    with self._lock:
      self._running -= 1
      self._polled.notify_all()

  def _poll(self) -> None:
    try:
      draws = jax.process_index() == 0
      polled = time.monotonic()  # before the poll: no note of a bar's own may seem older than it
      states = [_State(*state) for state in _callgate.progress_poll()]
      for state in sorted(states, key=lambda s: s.bar):
        if draws:
          self._draw(state, polled)
      for state in states:
        if state.phase == "live" or self._is_parked(state, states):
          continue
        drawn = self._bars.pop(state.bar, None)
        _callgate.progress_release(state.handle)
        if drawn is not None:
          drawn.bar.close()
    except Exception:  # noqa: BLE001 - a bar that can't be drawn must not end the program
      traceback.print_exc()
      self._bars.clear()
      for state in _callgate.progress_poll():  # those that have ended
        _callgate.progress_release(state[0])

  def _draw(self, state: _State, polled: float) -> None:
    drawn = self._bars.get(state.bar)
    total = None if state.total < 0 else state.total
    if drawn is None:
      drawn = self._bars[state.bar] = _open(state, total, polled - state.age)
    elif drawn.handle != state.handle:  # a nested loop, begun again
      drawn.bar.reset(total)
      drawn.handle = state.handle
    _show_notes(drawn)
    drawn.bar.start_t = time.time() - state.seconds
    # tqdm takes a bar whose last print came before its start for one that was never shown.
    drawn.bar.last_print_t = max(getattr(drawn.bar, "last_print_t", 0.0), drawn.bar.start_t)
    drawn.bar.update(max(state.steps - drawn.bar.n, 0))

  def _is_parked(self, state: _State, states: list[_State]) -> bool:
    """Whether a nested loop's bar waits for its next turn."""
    drawn = self._bars.get(state.bar)
    return drawn is not None and any(
      other.phase == "live" and other.run == state.run and other.depth < drawn.depth
      for other in states
    )


def _open(state: _State, total: int | None, began: float) -> _Drawn:
  options = json.loads(state.text)
  bar = _make(
    total=total,
    desc=options.get("desc"),
    file=file_of(options.get("file")) or sys.stderr,
    position=options.get("position"),
    leave=bool(options.get("leave", True)) and state.depth == 0,
    mininterval=float(options.get("mininterval", 0.1)),
  )
  return _Drawn(state.handle, bar, options.get("show"), began, state.depth)


def _show_notes(drawn: _Drawn) -> None:
  """The latest values behind the bar: those named, else those noted since it began."""
  latest = noted()
  if drawn.show is not None:
    names = [name for name in drawn.show if name in latest]
  else:
    names = [name for name, (when, _) in latest.items() if when >= drawn.began][:_MOST_SHOWN]
  if not names:
    return
  values = {name: _text_of(latest[name][1]) for name in names}
  shown = ", ".join(f"{name}={text}" for name, text in values.items())
  if shown != drawn.shown:
    drawn.shown = shown
    drawn.bar.set_postfix(values, refresh=False)


def _text_of(value: Any) -> str:
  try:
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
  except (TypeError, ValueError):
    return str(value)


def _make_with_tqdm(**arguments: Any) -> Any:
  from callgate._loops import bars

  return bars.make(**arguments)


_make: Callable[..., Any] = _make_with_tqdm
_drawer = _Drawer()
flush = _drawer.flush
stop = _drawer.stop


@contextmanager
def use(make: Callable[..., Any]) -> Generator[None]:
  """Draws bars that begin in the block by `make`; see the top of this file."""
  global _make
  before, _make = _make, make
  try:
    yield
    flush()
  finally:
    _make = before


def start() -> None:
  """Lets the board wake the thread; called once by `import callgate`."""
  _callgate.progress_set_wake(_drawer.start)
  at_barrier(lambda: flush(_BARRIER_SECONDS))
