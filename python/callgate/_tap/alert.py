# SPDX-License-Identifier: Apache-2.0
"""`callgate.alert`: a text for people, from a (compiled) program, where a predicate holds.

A tap sends the values; its consumer, on callgate's thread, makes the text and hands the alert to
the open run, to trackers and pages (the event "alert"), and to the callbacks.
"""

from __future__ import annotations

import collections
import functools
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
from callgate._part import Part
from callgate._tap import delivery, kinds, tap, target
from callgate._tap.records import TapInfo
from callgate._tap.site import TapSite

_BURST, _A_SECOND = 100, 1.0  # alerts of one text: so many at once, then so many a second
_TEXTS = 1024  # of which the counts are kept
_NAME = "tap:callgate.alert"
# Guarded by _lock; emptied by `AlertListener.close`.
_listeners: list[AlertListener] = []
_lock = threading.Lock()
_logger = logging.getLogger("callgate")


class Alert(str):
  """The text of an alert, and what is known of it; `callgate.on_alert` functions get it.

  Attributes:
    message: the text as `callgate.alert` was given it, with its fields.
    values: the values by name, as NumPy arrays.
    time_ns: wall clock, in nanoseconds since the Unix epoch.
    lane: the index in each vmapped level, outermost first; () without vmap.
    device: global id of the device.
    left_out: how many alerts of this message were left out before it, as they came too fast.
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
  """A function that gets all alerts until this is closed, or its block ends."""

  def __init__(self, function: Callable[[Alert], Any]) -> None:
    self.function = function
    with _lock:
      _listeners.append(self)

  def close(self) -> None:
    """The function gets no more alerts."""
    with _lock:
      if self in _listeners:
        _listeners.remove(self)


def on_alert(function: Callable[[Alert], Any]) -> AlertListener:
  """Has a function called with each `alert` of this process, on callgate's thread.

  ```python
  import callgate as cg, jax

  seen = []
  with cg.on_alert(seen.append):
    jax.jit(lambda x: cg.alert(x > 1, "x is {x}", x=x))(2.0)
    cg.barrier()
  assert seen == ["x is 2.0"] and seen[0].values["x"] == 2.0
  ```

  Args:
    function: called with the `Alert`, a `str` that has the values, too. Its exception is a
      consumer's: `barrier()` raises it.

  Returns:
    A context manager, at whose end the function is taken out, with `close()`, which does it, too.
  """
  options.function("on_alert", "function", function)
  signatures.refuse_unrun("on_alert: function: expected a function", function)
  return AlertListener(function)


def alert(predicate: Any, text: str, /, **values: Any) -> None:
  """Tells people where a predicate is True, from (compiled) code; the program goes on.

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

  An alert goes to the functions of `on_alert`, to the open `run` and so to the page of
  `python -m callgate watch`, and to the run's trackers, to W&B as its own kind of alert. Outside of
  a run it is a warning of the logger "callgate", too.

  Args:
    predicate: a traced bool of shape (); under vmap each lane's. Each time it is True is an alert;
      of one text a hundred at once and then one a second, which says how many were left out.
    text: what it says. Fields such as `{loss}` are filled from `values`.
    **values: arrays.

  Raises:
    GateDefinitionError: while tracing: the predicate is not a bool of shape (), or the text has a
      field that is not among the values, or a format that arrays of their types don't have.
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
  """How many alerts of each text may come yet, and how many were left out."""

  def __init__(self) -> None:
    # By text: the room that is left, as of which time, and how many were left out.
    self._by_text: collections.OrderedDict[str, tuple[float, int, int]] = collections.OrderedDict()

  def left_out(self, text: str, time_ns: int) -> int | None:
    """How many were left out before this one; None if it is, too."""
    room, before, count = self._by_text.pop(text, (float(_BURST), time_ns, 0))
    room = min(float(_BURST), room + max(0, time_ns - before) * 1e-9 * _A_SECOND)
    comes = room >= 1
    self._by_text[text] = (room - 1, time_ns, 0) if comes else (room, time_ns, count + 1)
    if len(self._by_text) > _TEXTS:
      self._by_text.popitem(last=False)
    return count if comes else None


_counts = _Counts()  # one thread: that of taps to functions


def _take(value: Any, info: TapInfo) -> None:
  """Makes an alert of a record, and hands it on."""
  (message, shown), values = split.joined(value)
  if (left_out := _counts.left_out(message, info.time_ns)) is None:
    return
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
    except BaseException as error:  # noqa: BLE001 - the others are called all the same
      where = f"callgate: raised in {foreign.qualified_name(function)}, of on_alert, given {text!r}"
      failures.keep_consumer_error(error, where)


@functools.cache
def _tap() -> target.Tap:
  _take.__name__ = _take.__qualname__ = "alert"  # in messages
  consume = functools.partial(delivery.call_with_rows, delivery.Attached(_take))
  target.start_channel(target.DEFAULT)
  return target.Tap(_NAME, target.DEFAULT, _callgate.python_consumer(consume))


@_part.joins("alerts")
class Alerts(Part):
  """Defines the alerts of programs of other processes."""

  def define(self, name: str) -> Any:
    return _tap() if name == _NAME else None
