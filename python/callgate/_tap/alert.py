# SPDX-License-Identifier: Apache-2.0
"""`callgate.alert`: messages from compiled programs, sent when a predicate is True.

A tap sends the values. Its consumer, on callgate's thread, formats the text and passes the alert to
the open run, to trackers and pages (the event "alert"), and to the callbacks of `on_alert`.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from callgate import _callgate, _part
from callgate._call import shapes
from callgate._core import dtypes, failures, foreign, masked, opened, options, signatures, split
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Closing
from callgate._jax import refs
from callgate._part import Part, Wait
from callgate._runtime import barrier
from callgate._tap import kinds, tap, target
from callgate._tap.records import TapInfo
from callgate._tap.site import TapSite, send

# The limit of each text: the number at once, and then the number a second.
_BURST, _A_SECOND = 100, 1.0
_TEXTS = 1024  # the most texts with a limit of their own
_NAME = "tap:callgate.alert"
# Guarded by _lock; emptied by `AlertListener.close`.
_listeners: list[AlertListener] = []
_lock = threading.Lock()
_logger = logging.getLogger("callgate")


class Alert(str):
  """The text of an alert, with its values; functions of `callgate.on_alert` get one.

  Attributes:
    message: the format string that `callgate.alert` got.
    values: the values by name, as NumPy arrays.
    time_ns: wall clock, in nanoseconds since the Unix epoch.
    lane: the index in each vmapped level, outermost first; () without vmap.
    device: global id of the device.
    left_out: the number of earlier alerts of this message that the rate limit suppressed. If no
      alert follows suppressed ones, the next `barrier()` or the end of the run's block delivers the
      last of them.
  """

  message: str
  values: dict[str, Any]
  time_ns: int
  lane: tuple[int, ...]
  device: int
  left_out: int

  def __new__(
    cls, text: str, message: str = "", values: dict[str, Any] | None = None, time_ns: int = 0,
    lane: tuple[int, ...] = (), device: int = -1, left_out: int = 0,
  ) -> Self:  # fmt: skip
    self = super().__new__(cls, text)
    self.message, self.values, self.time_ns = message, values or {}, time_ns
    self.lane, self.device, self.left_out = lane, device, left_out
    return self

  def __getnewargs__(self) -> Any:
    about = self.message, self.values, self.time_ns, self.lane, self.device, self.left_out
    return (str(self), *about)


class AlertListener(Closing):
  """A registered function of `on_alert`; a context manager that removes it."""

  def __init__(self, function: Callable[[Alert], Any]) -> None:
    self.function = function
    with _lock:
      _listeners.append(self)

  def __exit__(self, *exception: object) -> None:
    # A program may wait for an event that the exception prevents.
    self._close(waits=exception[0] is None)

  def close(self) -> None:
    """Waits for the alerts of all programs dispatched so far, and then removes the function.

    Called in a consumer, it removes the function at once, because a program may wait for the
    consumer.
    """
    self._close(waits=True)

  def _close(self, *, waits: bool) -> None:
    try:
      if self in _listeners and _may_deliver():
        if waits:
          barrier.wait_for_programs()
        deliver(Wait(None))
    finally:
      with _lock:
        if self in _listeners:
          _listeners.remove(self)


def on_alert(function: Callable[[Alert], Any]) -> AlertListener:
  """Registers a function that callgate calls with each `alert` of this process, on its own thread.

  ```python
  import callgate as cg, jax

  seen = []
  with cg.on_alert(seen.append):
    jax.jit(lambda x: cg.alert(x > 1, "x is {x}", x=x))(2.0)
    cg.barrier()
  assert seen == ["x is 2.0"] and seen[0].values["x"] == 2.0
  ```

  Args:
    function: called with an `Alert`, a `str` that also has the values. `barrier()` raises its
      exceptions.

  Returns:
    An `AlertListener`, a context manager. The end of the block, or `close()`, removes the function,
    after it has got the alerts of all programs dispatched so far.
  """
  options.function("on_alert", "function", function)
  signatures.refuse_unrun("on_alert: function: expected a function", function)
  return AlertListener(function)


def alert(predicate: Any, text: str, /, **values: Any) -> None:
  """Sends a message from a compiled program whenever a predicate is True; the program continues.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @jax.jit
  def step(loss):
    cg.alert(~jnp.isfinite(loss), "the loss is {loss}", loss=loss)
    return loss

  with cg.on_alert(print):
    step(jnp.inf)
    cg.barrier()                     # the loss is inf
  ```

  An alert goes to

  - the functions of `on_alert`;
  - the open `run`, and so to the page of `python -m callgate watch`;
  - the run's trackers (W&B shows it as a W&B alert);
  - without a run, the logger "callgate", as a warning.

  Alerts have a rate limit: of each text, one hundred at once, and then one a second. The next alert
  has the number of suppressed ones in `Alert.left_out`. If none follows, `barrier()` delivers the
  last suppressed alert.

  Args:
    predicate: a traced bool of shape (). Under `jax.vmap` each lane has its own.
    text: a format string. Fields such as `{loss}` are filled from `values`.
    **values: arrays.

  Raises:
    GateDefinitionError: while tracing: the predicate is not a bool of shape (), a field is not
      among the values, or a format doesn't fit the type of its array.
  """
  failures.raise_deferred()
  options.template("alert", "text", text)
  where, values = shapes.predicate("alert", "predicate", predicate), refs.read(values)
  for name, value in values.items():
    try:
      values[name] = jax.tree.map(jax.numpy.asarray, value)
    except (TypeError, ValueError, OverflowError) as error:
      what = f"alert: {name}: expected an array or a pytree of arrays, got {masked.shown(value)}"
      raise GateDefinitionError(what) from error
  kinds.check_fields("alert: text", text, (), values)
  node = split.Static((text, tuple(sorted(np.get_printoptions().items()))))
  leaves, tree = jax.tree.flatten((node, values))
  carried = [dtypes.carried(leaf) for leaf in leaves]
  names = tuple(name for _, name in carried)
  site = TapSite(tree=tree, name="alert", where=True, dtypes=names)
  tap.bind(_tap(), site, [x for x, _ in carried], [where])


class _Counts:
  """Limits the rate of alerts of each text, and counts the suppressed ones."""

  def __init__(self) -> None:
    # By text: (alerts left at once, their time, number of suppressed alerts, the last of these).
    self._by_text: collections.OrderedDict[str, tuple[float, int, int, Any]] = (
      collections.OrderedDict()
    )
    self._evicted: list[tuple[Any, int]] = []
    # The number of suppressed alerts that no later alert reports. Any thread may read it.
    self.waiting = 0

  def left_out(self, text: str, time_ns: int, given: Any = None) -> int | None:
    """Returns how many alerts were suppressed before this one; None if it is suppressed, too."""
    room, before, count, _ = self._by_text.pop(text, (float(_BURST), time_ns, 0, None))
    room = min(float(_BURST), room + max(0, time_ns - before) * 1e-9 * _A_SECOND)
    comes = room >= 1
    self.waiting += -count if comes else 1
    self._by_text[text] = (
      (room - 1, time_ns, 0, None) if comes else (room, time_ns, count + 1, given)
    )
    if len(self._by_text) > _TEXTS:
      _, (_, _, waiting, last) = self._by_text.popitem(last=False)
      if waiting:
        self._evicted.append((last, waiting))
    return count if comes else None

  def take(self, *, of_all: bool) -> list[tuple[Any, int]]:
    """Returns (last suppressed alert, number of suppressed ones) of each evicted text.

    With `of_all` also those of the other texts. Resets the returned counts.
    """
    taken, self._evicted = self._evicted, []
    for text, (room, before, count, last) in self._by_text.items() if of_all else ():
      if count:
        taken.append((last, count))
        self._by_text[text] = room, before, 0, None
    self.waiting -= sum(count for _, count in taken)
    return taken

  def clear(self) -> None:
    """Resets all limits, after `take`."""
    self._by_text.clear()


_counts = _Counts()  # one thread: that of taps to functions


def _take(value: Any, info: TapInfo) -> None:
  """Delivers the alert of a record, unless the rate limit suppresses it.

  A record that holds a bool instead delivers the suppressed alerts of all texts; True also resets
  the limits.
  """
  given = split.joined(value)
  is_report = isinstance(given, bool)
  if not is_report:
    left_out = _counts.left_out(given[0][0], info.time_ns, (given, info))
    if left_out is not None:
      _tell(given, info, left_out)
  for (last, about), count in _counts.take(of_all=is_report):
    _tell(last, about, count - 1)
  if is_report and given:
    _counts.clear()


def _tell(given: Any, info: TapInfo, left_out: int) -> None:
  """Passes an alert to the log, the run and the functions."""
  (message, shown), values = given
  try:
    with np.printoptions(**dict(shown)):
      text = message.format(**values)
  except Exception as error:  # noqa: BLE001 - the alert says so
    text = f"{message} (the values can't be formatted: {foreign.said_by(error)})"
  one = Alert(text, message, values, info.time_ns, info.lane, info.device, left_out)
  if opened.run() is None:
    _logger.warning("callgate.alert: %s", text)
  _part.tell("alert", one)
  with _lock:
    functions = [listener.function for listener in _listeners]
  for function in functions:
    try:
      function(one)
    except BaseException as error:  # noqa: BLE001 - the other functions are still called
      where = f"callgate: raised in {foreign.qualified_name(function)}, of on_alert, given {text!r}"
      failures.keep_consumer_error(error, where)


def _may_deliver() -> bool:
  """True if there may be alerts, and this thread can wait for them."""
  here = _callgate.delivers_here() or _callgate.channels_abandoned()
  return _callgate.is_registered(_NAME) and not here


def deliver(wait: Wait, *, anew: bool = False) -> None:
  """Delivers all alerts that programs have sent, and the suppressed ones.

  With `anew` it also resets the rate limits. On a channel's thread, which would wait for itself, it
  does nothing.
  """
  if not _may_deliver():
    return
  records = target.start_channel(target.DEFAULT)
  there = wait.until(_callgate.drain_devices) and wait.until(records.flush)
  if there and (_counts.waiting or anew):
    tree = jax.tree.structure(split.Static(anew))
    send(_tap(), TapSite(tree=tree, name="alert", dtypes=()), [])  # `_take` delivers the alerts
    wait.until(records.flush)


# Locks itself: `_part.once`.
_tap = target.own(_NAME, "alert", _take)


@_part.joins("alerts")
class Alerts(Part):
  """Defines the alerts of programs of other processes."""

  def define(self, name: str) -> Any:
    return _tap() if name == _NAME else None

  def settle(self, wait: Wait) -> bool:
    deliver(wait)
    return True  # the barrier reports records that still wait
