# SPDX-License-Identifier: Apache-2.0
"""Shared by both forms of `host_callback`: taps of pytrees, and the receivers of 2020.

Equal calls share a tap, so that JAX's caches hit. Records go through their own channel, `CHANNEL`.
They are unpacked on that channel's thread, under the GIL, where consumers report their exceptions.
Programs with taps check for a receiver before each execution, in their caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import dtypes, errors, exact, foreign
from callgate._core.failures import keep_consumer_error
from callgate._core.masked import shown
from callgate._jax import execution, tracing
from callgate._part import Wait
from callgate._runtime.barrier import wait_for_programs
from callgate._tap import delivery
from callgate._tap.consumers import check_not_forked
from callgate._tap.site import TapSite
from callgate._tap.tap import bind, uncarried
from callgate._tap.target import of_rows, start_channel

CHANNEL = "host_callback"
# The (name, parameters) of each transformation of a tap, in order of application.
Transforms = tuple[tuple[str, dict[str, Any]], ...]


class Arrays:
  """A pytree for a tap: the leaves to send, and the information to rebuild the pytree."""

  def __init__(self, api: str, value: Any, *, copied: bool = False) -> None:
    leaves, self.tree = jax.tree.flatten(value)
    self.arrays = [_as_array(api, leaf, index, copied) for index, leaf in enumerate(leaves)]
    carried = [dtypes.carried(array) for array in self.arrays]
    self.operands = [array for array, _ in carried]
    self.dtypes = tuple(name for _, name in carried)

  def rebuild(self, results: Sequence[Any]) -> Any:
    """Returns the pytree of a tap's results, in the user's dtypes."""
    return jax.tree.unflatten(self.tree, map(uncarried, self.arrays, results))


def bind_tap(
  function: Callable[..., Any], key: tuple[Any, ...], given: Arrays,
  consume: Callable[[Any, Transforms, int | None], None], *, extra: Sequence[Any] = (),
  masked: bool = False, eager: bool = False, **options: Any,
) -> Sequence[Any]:  # fmt: skip
  """Taps `given` to `consume`, which equal keys and structures share; returns the tap's results.

  `consume` gets each record's value (arrays of its own), transformations and device's global id (-1
  if unknown) on the channel's thread, where it must not raise. With `eager`, outside compiled code,
  it runs in the caller's thread and gets None for the device. `function` is the user's function.
  """
  check_not_forked()
  tree = given.tree

  def unpack(text: str, arrays: Sequence[np.ndarray], device: int | None) -> None:
    about = delivery.description(text)
    value = jax.tree.unflatten(tree, about.value(arrays))
    transforms = (
      (met, {"logical_shapes": _logical_shapes(about, arrays)} if met == "mask" else _as_tuple(how))
      for met, how in about.transforms
    )
    consume(value, tuple(transforms), device)

  def rows(source: Any, rows: Sequence[Any]) -> None:
    for row in rows:
      unpack(source[3], row[6], row[3])

  def at_once(text: str, arrays: Sequence[Any]) -> None:
    unpack(text, [np.array(array) for array in arrays], None)

  name, flat = name_of(function), jax.tree.structure((0,) * len(given.operands))
  site = TapSite(tree=flat, name=name, dtypes=given.dtypes, whole=True, **options)
  now = at_once if eager else None
  key = (*key, exact.exact_tree(tree).key)
  tap = of_rows(key, function, rows, name, channel=CHANNEL, eager=now)
  return bind(tap, site, given.operands, extra, (("mask", ()),) if masked else ())


def name_of(function: Callable[..., Any]) -> str:
  """Returns a callable's name for messages and records, as one line."""
  function = getattr(function, "func", function)  # functools.partial
  name = getattr(function, "__qualname__", None) or type(function).__qualname__
  return str(name).replace("\n", " ") or "tap"


def exact_items(kwargs: dict[str, Any]) -> Any:
  """Returns a key of keywords, valid while they live."""
  return exact.exact(tuple(sorted(kwargs.items(), key=lambda item: item[0]))).key


def _as_tuple(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _as_tuple(one) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
  return tuple(map(_as_tuple, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _logical_shapes(
  about: delivery.TapDescription, arrays: Sequence[np.ndarray]
) -> tuple[Any, ...]:
  """Returns each leaf's logical shape; sizes that differ between lanes are arrays."""
  shapes: list[Any] = [array.shape for array in arrays[: about.values]]
  for index, sizes in zip(about.logical, arrays[about.values :], strict=True):
    of_axes = np.moveaxis(sizes, -1, 0)
    shapes[index] = tuple(map(int, of_axes) if sizes.ndim == 1 else of_axes)
  return tuple(shapes)


def _as_array(api: str, leaf: Any, index: int, copied: bool) -> Any:
  if isinstance(leaf, jax.Array):
    return leaf
  try:
    if copied and type(leaf) is np.ndarray and tracing.in_no_trace():  # otherwise it would compile
      return jax.device_put(leaf.copy())  # the array may change, and `device_put` may share it
    return jnp.asarray(leaf)
  except (TypeError, ValueError) as error:
    raise TypeError(f"{api}: leaf {index}: expected an array, got {shown(leaf)}") from error


# -- id_print's text -----------------------------------------------------------------------------
def write(output_stream: Any, entries: Mapping[str, Any], body: str) -> None:
  """Writes a line of sorted `key: value`, if there are entries, then the body."""
  first = " ".join(f"{key}: {value}" for key, value in sorted(entries.items()))
  text = f"{first}\n{body}\n" if first else f"{body}\n"
  if output_stream is None:
    print(text, end="", flush=True)
  else:
    output_stream.write(text)


def text_of(value: Any, threshold: int, width: int = 0, column: int = 0) -> str:
  """Formats a value: 2020's lines, an element each; with a width 2023's, on one line if it fits."""
  if isinstance(value, (tuple, list)):
    start, end = ("( ", " )") if width and isinstance(value, tuple) else ("[ ", " ]")
    items: list[tuple[str, Any]] = [("", one) for one in value]  # pyright: ignore[reportUnknownVariableType]
  elif isinstance(value, dict):
    start, end = "{ ", " }"
    items = [(f"{key}=", one) for key, one in sorted(value.items())]  # pyright: ignore
  elif isinstance(value, np.ndarray):
    return np.array2string(value, threshold=threshold)
  else:
    return str(value)
  inner = column + len(start)
  parts = [_hang(label, text_of(one, threshold, width, inner + len(label))) for label, one in items]
  line = start + " ".join(parts) + end
  if "\n" in line or column + len(line) > width:
    return _hang(start, "\n".join(parts)) + end
  return line


def _hang(label: str, text: str) -> str:
  """Returns `text` after `label`, with its further lines aligned to its first."""
  return label + text.replace("\n", "\n" + " " * len(label))


# -- receivers -------------------------------------------------------------------------------------
_lock = threading.Lock()
# By the device's id. Guarded by _lock; emptied by the end of each receiver.
_started: dict[int, Receiver] = {}
# The running consumer. Atomic: single steps; emptied by the end of each call.
_calling: list[str] = []


class TapFunctionException(Exception):
  """Functions of taps have raised exceptions.

  Attributes:
    exceptions: all their exceptions, in order.
  """

  def __init__(self, message: str, exceptions: Sequence[BaseException]) -> None:
    super().__init__(message)
    self.exceptions = tuple(exceptions)

  def __reduce__(self) -> tuple[Any, ...]:
    return errors.reduced(self)


class Receiver:
  """Receives the taps of some devices; a context manager."""

  def __init__(self, name: str, timeout: float, devices: Sequence[Any]) -> None:
    self._name, self.timeout, self._devices = name, timeout, tuple(devices)
    self.raised: list[BaseException] = []  # consumers' exceptions, until the end of the block

  def __repr__(self) -> str:
    return f"<outfeed receiver '{self._name}' of {_names(self._devices)}>"

  def __enter__(self) -> Receiver:
    check_not_forked()
    start_channel(CHANNEL)
    with _lock:
      if taken := [device for device in self._devices if device.id in _started]:
        got = f"{_names(taken)}, for which {_started[taken[0].id]!r} is started"
        raise ValueError(f"outfeed_receiver: expected devices without a receiver, got {got}")
      _started.update({device.id: self for device in self._devices})
    return self

  def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
    outstanding, failure = self._end(), None
    with _lock:
      for device in self._devices:
        _started.pop(device.id, None)
      raised = list(self.raised)
    if raised:
      shown = "".join(f"\n  {foreign.said_by(error)}" for error in raised[:10])
      more = f"\n  and {len(raised) - 10} more" if len(raised) > 10 else ""
      text = f"functions of {len(raised)} tap(s) raised:{shown}{more}"
      failure = TapFunctionException(text, raised)
    if error is not None:  # don't hide the block's own exception
      for what in filter(None, (outstanding, failure)):
        foreign.add_note(error, f"callgate: {what}")
    elif outstanding:
      raise TimeoutError(outstanding) from failure
    elif failure is not None:
      raise failure from raised[0]

  def _end(self) -> str:
    """Waits for programs and consumers; returns what is unfinished after the time, or ""."""
    whose = f"{self!r}: after {self.timeout:g} s"
    try:
      if finish(self.timeout):
        return ""
    except TimeoutError:
      return f"{whose} programs still ran"
    calling = f"; {_calling[-1]} was being called" if _calling else ""
    pending = start_channel(CHANNEL).stats()["pending"]
    return f"{whose} {pending} record(s) still waited for their functions{calling}"


def finish(timeout: float | None) -> bool:
  """Waits for all programs and taps, including those that functions start; False if late."""
  wait, handle, before = Wait(timeout), start_channel(CHANNEL), -1
  while True:
    wait_for_programs(wait)  # or TimeoutError
    if (sent := handle.stats()["sent"]) == before:
      return True
    # A marker after all records: the channel reports when it has passed.
    if not handle.flush(wait.left):
      return False
    before = sent


class NeedsReceiver(execution.Watcher):
  """Kept by programs with taps: rejects an execution on devices without a receiver."""

  def before(self, devices: Sequence[Any]) -> None:
    if missing := [device for device in devices if device.id not in _started]:
      old = "(in the first form's words: outfeed_consumer is not started)"
      fault = f"a compiled program with taps was called for {_names(missing)}"
      hint = "whose outfeed receiver is not started; call it inside `with outfeed_receiver():`"
      raise ValueError(f"host_callback: outfeed_receiver is not started {old}: {fault}, {hint}")


NEEDS_RECEIVER = NeedsReceiver()


def run(consumer: Callable[[], None], name: str, device: int | None) -> None:
  """Calls a record's consumer and keeps its exception; without a device it raises the exception."""
  if device is None:
    with _lock:
      receiver = next(iter(_started.values()), None)
    handle = start_channel(CHANNEL)
    if receiver is not None and handle.stats()["pending"]:  # it may depend on earlier records
      handle.flush(receiver.timeout)  # a function may itself wait for the caller
    try:
      return consumer()
    except Exception as error:
      raise TapFunctionException(
        f"tap function {name} raised {foreign.repr_of(error)}", [error]
      ) from error
  _calling.append(name)
  try:
    consumer()
  except BaseException as error:  # noqa: BLE001 - kept, and raised where the receiver ends
    where = f"callgate: raised in tap function {name}"
    with _lock:
      if (receiver := _started.get(device) or next(iter(_started.values()), None)) is not None:
        receiver.raised.append(error)
        foreign.add_note(error, where)
    if receiver is None:  # it gave up waiting
      keep_consumer_error(error, where)
  finally:
    _calling.remove(name)


def _names(devices: Sequence[Any]) -> str:
  return ", ".join(map(str, devices))
