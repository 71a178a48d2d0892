# SPDX-License-Identifier: Apache-2.0
"""`callgate.knob`: numbers that compiled programs read and the host sets while they run."""

from __future__ import annotations

import math
import pickle
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._call.function import ArrayFunction
from callgate._core import options, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Public, Uncopied, core
from callgate._core.where import Where, where
from callgate._jax import execution
from callgate._steer.cell import CellGate, agreed
from callgate._tap import site as _site
from callgate._tap.channel import Channel, has_stream, open_channels, tap_of

Per = Literal["read", "execution"]
Scale = Literal["linear", "log"]
_knobs: weakref.WeakValueDictionary[str, Knob] = weakref.WeakValueDictionary()  # guarded by _lock
_lock = threading.RLock()


class KnobNumber(Uncopied):
  """The core of a knob: the number, its options, and the runtime's cell that programs read.

  Attributes:
    cell: the runtime's cell.
    place, line: where the knob is defined.
  """

  def __init__(
    self,
    name: str,
    dtype: np.dtype[Any],
    value: Any,
    range: tuple[Any, Any] | None,
    scale: Scale,
    before: KnobNumber | None,
  ) -> None:
    self.name, self.dtype = name, dtype
    self.scale: Scale = "linear"
    self.take(value, range, scale)
    if before is not None:  # a knob of another dtype: programs that read it keep it
      before.cell.give_up_name()
    self.cell = _callgate.Knob(f"callgate.knob:{name}", _bits(self.as_array()))
    self.defined_at, self.line = registry.current_place(), ""

  def take(self, value: Any, range: Any, scale: Any) -> None:
    """Takes all three values, or raises and takes none."""
    label = f"knob '{self.name}'"
    chosen: Scale = options.choice(label, "scale", scale, ("linear", "log"))
    limits: tuple[Any, Any] | None = None
    if range is not None:
      if not isinstance(range, (tuple, list)) or len(range) != 2:
        options.refuse(label, "range", "a pair (least, greatest)", range)
      least, greatest = (self._held("range", end) for end in range)
      if self.dtype == np.bool_ or not least < greatest:
        options.refuse(label, "range", "two numbers, the first less than the second", range)
      if scale == "log" and least <= 0:
        options.refuse(label, "range", "numbers above 0 with scale='log'", range)
      limits = least, greatest
    elif scale == "log":
      raise GateDefinitionError(f"{label}: scale: 'log' needs range=, got none")
    number = self.within(limits, value)
    with _lock:
      self.scale, self.range, self.value = chosen, limits, number

  def within(self, limits: tuple[Any, Any] | None, value: Any) -> Any:
    number = self._held("value", value)
    if limits is None:
      return number
    # Compares in the programs' dtype, in which a value at the end of the range is within it.
    least, held, greatest = np.asarray((limits[0], number, limits[1])).astype(self.dtype)
    if not least <= held <= greatest:
      options.refuse(f"knob '{self.name}'", "value", f"{limits[0]} to {limits[1]}", value)
    return min(max(number, limits[0]), limits[1])

  def _held(self, what: str, value: Any) -> Any:
    """Returns the value as a Python number that the knob may hold."""
    label, kind = f"knob '{self.name}'", self.dtype.kind
    wanted = {"b": "a bool", "i": "an integer", "u": "an integer"}.get(kind, "a number")
    expected = f"{wanted} for {self.dtype.name}"
    array = np.asarray(value)
    fits = array.shape == () and (array.dtype.kind == "b") == (kind == "b")
    if not fits or array.dtype.kind not in {"b": "b", "f": "iuf"}.get(kind, "iu"):
      options.refuse(label, what, expected, value)
    number = array.item()
    if kind in "iu":
      held = np.iinfo(self.dtype)
      if not held.min <= number <= held.max:
        options.refuse(label, what, f"{expected}, {held.min} to {held.max}", value)
    elif kind == "f":
      number = float(number)
      with np.errstate(over="ignore"):
        held = float(np.float64(number).astype(self.dtype))
      if math.isfinite(number) and not math.isfinite(held):
        options.refuse(label, what, f"{wanted} that {self.dtype.name} can hold", value)
    return number

  def as_array(self) -> Any:
    """Returns the current value in the knob's dtype."""
    return np.asarray(self.value, self.dtype)

  def put(self, number: Any) -> None:
    with _lock:
      self.value = number
      self.cell.set(_bits(self.as_array()))


class _Execution(execution.Watcher):
  """The value that all reads of one execution get, in a program that uses JAX's callbacks."""

  def __init__(self) -> None:
    self._number: Any = None

  def before(self, devices: Any) -> None:
    del devices
    self._number = None

  def first(self, knob: Knob) -> Any:
    with _lock:
      if self._number is None:
        self._number = core(knob).as_array()
      return self._number


class _Read(CellGate):
  """The gate behind a knob's reads."""

  def __init__(self, knob: Knob, per: Per) -> None:
    self._cell, self._knob, self.once = core(knob).cell, knob, per == "execution"
    each = f", for each {per}" if self.once else ""
    name = registry.free_name(f"read of {core(knob).cell.name}{each}")
    if self.once:
      self.watcher_of_jax = _Execution()
    super().__init__(name, self._read_on_host, knob.dtype)

  def _read_on_host(self) -> Any:
    return self.watcher_of_jax.first(self._knob) if self.once else core(self._knob).as_array()

  def cell(self) -> _callgate.Knob:
    return self._cell


class Knob(Public[KnobNumber]):
  """A number that compiled programs read, and that you set while they run; made by `knob`."""

  _makers = "callgate.knob"

  def __init__(self, core: KnobNumber) -> None:
    super().__init__(core)
    self._reads: dict[Per, ArrayFunction[..., Any]] = {}

  def __reduce__(self) -> Any:
    return _named, (self.name,)

  def __repr__(self) -> str:
    limits = "" if self.range is None else f", {self.range[0]} to {self.range[1]}"
    return f"<knob '{self.name}': {self.value} ({self.dtype.name}{limits})>"

  @property
  def name(self) -> str:
    """The knob's name."""
    return self._core.name

  @property
  def dtype(self) -> np.dtype[Any]:
    """The dtype that programs read."""
    return self._core.dtype

  @property
  def range(self) -> tuple[Any, Any] | None:
    """The least and the greatest value, or None."""
    return self._core.range

  @property
  def scale(self) -> Scale:
    """The slider's scale: "linear" or "log"."""
    return self._core.scale

  @property
  def value(self) -> Any:
    """The current value, as a Python number."""
    return self._core.value

  def set(self, value: Any) -> None:
    """Sets the number, which programs get from their next read on; thread-safe.

    Each change is a record named `knob:NAME` in every open channel that has a stream.

    Args:
      value: a number of the knob's kind and in its range.

    Raises:
      GateDefinitionError: the number has another kind, or is out of the range.
    """
    _put(self, self._core.within(self.range, value))

  def read(self, *, per: Per = "read", consistent: bool = False) -> jax.Array:
    """Reads the number, in compiled code (in a fraction of a microsecond) or outside.

    On several devices all get the same number at the same read. In a multi-host program that XLA
    partitions, all processes get process 0's number. Inside `jax.shard_map` each process reads its
    own number, unless you pass `consistent=True`.

    Args:
      per: "read": each read gets the current number. "execution": all reads of one execution get
        the number of its first read.
      consistent: inside `jax.shard_map`, all devices get the number of the first device, by a
        collective.

    Returns:
      An array of shape () and of the knob's dtype.

    Raises:
      GateDefinitionError: an option is wrong.
    """
    label = f"knob '{self.name}'"
    options.choice(label, "per", per, ("read", "execution"))
    options.boolean(label, "consistent", consistent)
    with _lock:
      if per not in self._reads:
        self._reads[per] = ArrayFunction(_Read(self, per))
    return agreed(self._reads[per](), always=consistent)


def _put(knob: Knob, number: Any) -> None:
  core(knob).put(number)
  for channel in open_channels().values():
    if not has_stream(channel):
      continue
    record = channel, knob.name, core(knob).as_array()
    if _callgate.delivers_here():  # a full channel may wait for this thread
      threading.Thread(target=_send, args=record, name="callgate knob").start()
    else:
      _send(*record)


def _send(channel: Channel, name: str, number: Any) -> None:
  """Sends a knob's value to the readers of the run, as `knob:NAME`."""
  site = _site.TapSite(tree=jax.tree.structure(0), name=f"knob:{name}", dtypes=(None,))
  _site.send(tap_of(channel), site, [number])


def live() -> dict[str, Knob]:
  """Returns the live knobs by name."""
  with _lock:
    return dict(sorted(_knobs.items()))


def set_all(values: Mapping[str, Any]) -> None:
  """Sets several knobs by name: all of them, or none if a value is wrong.

  Raises:
    GateDefinitionError: as for `Knob.set`; or there is no knob of a name.
  """
  known, numbers = live(), list[tuple[Knob, Any]]()
  for name, value in values.items():
    if name not in known:
      there = ", ".join(map(repr, known)) or "no knob"
      raise GateDefinitionError(f"knob: expected one of {there}, got {name!r}")
    knob = known[name]
    numbers.append((knob, core(knob).within(knob.range, value)))
  for knob, number in numbers:
    _put(knob, number)


def _is_again(known: KnobNumber, line: str, place: Where | None) -> bool:
  return known.line == line or (place is not None and place.redefines(known.defined_at))


def _bits(array: Any) -> int:
  return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little")


def _named(name: str) -> Knob:
  """Returns the knob of a pickled knob's name."""
  if (found := _knobs.get(name)) is not None:
    return found
  raise pickle.UnpicklingError(
    f"knob '{name}': expected a knob of this name in the process that loads the pickle, got "
    f"none; define it first: cg.knob({name!r}, ...)"
  )


def knob(
  name: str,
  value: Any,
  *,
  range: tuple[Any, Any] | None = None,
  scale: Scale = "linear",
) -> Knob:
  """Makes a knob: a number that compiled programs read, and that you set while they run.

  ```python
  import callgate as cg, jax

  rate = cg.knob("rate", 0.1, range=(1e-4, 1.0), scale="log")

  @jax.jit
  def step(x):
    return x - rate.read() * 2 * x

  assert abs(step(1.0) - 0.8) < 1e-6
  rate.set(0.25)  # no new compilation
  assert step(1.0) == 0.5
  ```

  If a definition runs again, in a notebook's cell or a function, it returns the same knob with the
  new number, and existing programs read that number. If the number has another kind (1.5 instead of
  1), it returns a new knob of that name, which later programs read.

  Args:
    name: the name in programs, streams and the live page.
    value: a number or bool. Its JAX dtype becomes the knob's dtype.
    range: the least and the greatest value.
    scale: the slider's scale: "linear" or "log".

  Returns:
    A `Knob`.

  Raises:
    GateDefinitionError: an option is wrong.
    ValueError: a live knob with another definition has the name.
  """
  options.name("knob", options.text("knob", "name", name, "a line of text"))
  if np.ndim(value) != 0 or np.asarray(value).dtype.kind not in "biuf":
    options.refuse(f"knob '{name}'", "value", "a number or a bool", value)
  dtype = np.dtype(jnp.result_type(value))
  here = where()
  line, place = str(here), here.definition()
  with _lock, registry.defining(place):
    known = _knobs.get(name)
    again = known is not None and _is_again(core(known), line, place)
    if known is not None and not again:
      raise ValueError(
        f"callgate: the name '{name}' is taken by a live knob that is defined at "
        f"{core(known).line}; choose another name, or use that one"
      )
    whole_for_real = known is not None and known.dtype.kind == "f" and type(value) is int
    if known is not None and (known.dtype == dtype or whole_for_real):
      core(known).take(value, range, scale)
      known.set(value)  # and sends a record of the change
    else:
      before = None if known is None else core(known)
      known = _knobs[name] = Knob(KnobNumber(name, dtype, value, range, scale, before))
    core(known).defined_at, core(known).line = place, line
  return known
