"""The API of `jax.experimental.host_callback` in its last form (2021 to 2024), on callgate.

`id_tap` is a tap with an effect: it runs even if its result is unused, in program order on each
device, and the program goes on meanwhile. Functions are called on callgate's thread; what they
raise is kept for `barrier_wait`. `call` is a gate: the program waits for its result.

```python
import jax
from callgate.compat import host_callback_2023 as hcb

seen = []

@jax.jit
def f(x):
  hcb.id_tap(lambda value, transforms: seen.append(float(value)), x * 2)
  return x + 1

f(3.0)
hcb.barrier_wait()
assert seen == [6.0]
```
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

from callgate._jax import dispatch
from callgate._tap.consumers import check_not_forked
from callgate._tap.tap import bind
from callgate._tap.target import start_channel
from callgate.compat._host_callback import call as _call
from callgate.compat._host_callback import layout
from callgate.compat._host_callback.call import device_of
from callgate.compat._host_callback.receiver import finish
from callgate.compat._host_callback.tapped import CHANNEL, Arrays, Tapped, exact, name_of, tap_of

__all__ = [
  "CallbackException",
  "CallbackFlavor",
  "TapFunctionException",
  "barrier_wait",
  "call",
  "id_print",
  "id_tap",
]
_logger = logging.getLogger("callgate")
_lock = threading.Lock()


class CallbackException(Exception):
  """Functions of taps or calls raised; the text ends with the last one's traceback."""


TapFunctionException = CallbackException  # its name in the forms of 2020


class CallbackFlavor(enum.Enum):
  """Which of JAX's own callbacks stood for a call, in programs that had left this module's behind.

  Here all are served alike, as they were by default.
  """

  IO_CALLBACK = 1
  PURE = 2
  DEBUG = 3


# Since the last barrier: how many exceptions were raised, and the last one with its traceback.
_raised_count = 0
_raised_last: tuple[BaseException, str] | None = None


def id_tap(
  tap_func: Callable[..., Any],
  arg: Any,
  *,
  result: Any = None,
  tap_with_device: bool = False,
  device_index: int = 0,
  callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
  **kwargs: Any,
) -> Any:
  """Calls `tap_func(arg, transforms)` on the host, and returns `arg`, or `result` if given.

  Under differentiation the primal values are sent, once; under `jax.checkpoint` in both passes. A
  tap of what is itself a tangent sends the cotangent under reverse mode, with 'transpose'.

  Args:
    tap_func: called with the pytree of NumPy arrays and the transformations that were applied: a
      tuple of `(name, parameters)`, such as `("batch", {"batch_dims": (0,)})`.
    arg: a pytree of arrays.
    result: what to return instead.
    tap_with_device: also pass `device=`, the jax.Device that the value comes from.
    device_index: index among `jax.devices()` of the device that is named for an array that is
      partitioned over several.
    callback_flavor: for JAX's own callbacks; see CallbackFlavor.
    **kwargs: an error, which says what stands for them.

  Returns:
    `arg` or `result`.

  Raises:
    TypeError: for further keywords, if `tap_func` is not callable, if a leaf is not an array, or
      for a `callback_flavor` that is none.
  """
  if kwargs:
    names = ", ".join(kwargs)
    raise TypeError(
      f"id_tap: unexpected keyword(s) {names}. Support for **kwargs in ``id_tap`` ended with the "
      f"form of 2020; expected functools.partial(tap_func, {names.split(', ')[0]}=...)"
    )
  _check_flavor("id_tap", callback_flavor)
  if not callable(tap_func):
    raise TypeError(f"id_tap: tap_func: expected a callable, got {tap_func!r}")
  given = Arrays("id_tap: arg", arg)
  site = given.site(name_of(tap_func), effect="ordered", transposed=True)
  consumer = _Consumer(tap_func, device_index if tap_with_device else None)
  target = tap_of(("host_callback_2023", consumer), given.tree, consumer, tap_func)
  results = bind(target, site, given.operands)
  return given.rebuild(results) if result is None else result


@dataclasses.dataclass(frozen=True)
class _Consumer:
  """Calls the function of a tap, on the channel's thread."""

  function: Callable[..., Any]
  device_index: int | None  # with one, `device=` is passed, too

  def __call__(self, tapped: Tapped, device: int | None) -> None:
    try:
      if self.device_index is None:
        self.function(tapped.value, tapped.transforms)
      else:
        where = device_of(device, self.device_index)
        self.function(tapped.value, tapped.transforms, device=where)
    except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
      _keep(error, name_of(self.function))


def _keep(error: BaseException, name: str) -> None:
  global _raised_count, _raised_last
  text = "".join(traceback.format_exception(error)).rstrip()
  _logger.error("callgate: %s raised; barrier_wait() will raise it too\n%s", name, text)
  with _lock:
    _raised_count += 1
    _raised_last = error, text


def id_print(
  arg: Any,
  *,
  result: Any = None,
  tap_with_device: bool = False,
  device_index: int = 0,
  output_stream: Any = None,
  threshold: int = 1024,
  callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
  **kwargs: Any,
) -> Any:
  """Prints `arg` on the host, as `id_tap` calls a function; returns `arg`, or `result` if given.

  First comes a line of sorted `key: value`, if there are keywords, a device or transformations,
  then the value: on one line where it fits.

  Args:
    arg: a pytree of arrays.
    result: what to return instead.
    tap_with_device: also print the device that the value comes from.
    device_index: as for `id_tap`.
    output_stream: where to `write`; None for standard output.
    threshold: elements above which `numpy.array2string` summarises an array.
    callback_flavor: for JAX's own callbacks; see CallbackFlavor.
    **kwargs: printed as they are.

  Returns:
    `arg` or `result`.
  """
  named = tuple(sorted(kwargs.items()))
  return id_tap(
    _Printer(output_stream, threshold, named, tuple(exact(value) for _, value in named)),
    arg,
    result=result,
    tap_with_device=tap_with_device,
    device_index=device_index,
    callback_flavor=callback_flavor,
  )


@dataclasses.dataclass(frozen=True)
class _Printer:
  """Prints a record; equal to others that print the same, so that JAX's caches hit."""

  output_stream: Any
  threshold: int
  entries: tuple[tuple[str, Any], ...]
  key: tuple[Any, ...]

  def __call__(self, arg: Any, transforms: Any, *, device: Any = None) -> None:
    entries = dict(self.entries)
    if transforms:
      entries["transforms"] = [(name, how) if how else name for name, how in transforms]
    if device is not None:
      entries["device"] = device
    layout.write(self.output_stream, entries, layout.text_of(arg, self.threshold, width=80))


def call(
  callback_func: Callable[..., Any],
  arg: Any,
  *,
  result_shape: Any = None,
  call_with_device: bool = False,
  device_index: int = 0,
  callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
) -> Any:
  """Calls `callback_func(arg)` on the host, and returns what it returns, as jax.Arrays.

  The program waits. The function runs on a thread of callgate's, so it may itself run JAX programs,
  on another device too.

  Args:
    callback_func: called with the pytree of NumPy arrays; returns a pytree like `result_shape`.
    arg: a pytree of arrays.
    result_shape: the result: a pytree of anything with `.shape` and `.dtype`, or of scalars; None
      for no result.
    call_with_device: also pass `device=`, the jax.Device that calls.
    device_index: as for `id_tap`.
    callback_flavor: for JAX's own callbacks; see CallbackFlavor.

  Returns:
    A pytree of arrays like `result_shape`.

  Raises:
    TypeError: `callback_func` is not callable, or `callback_flavor` is none.
    ValueError: `result_shape` is not such a pytree.
    NotImplementedError: under `jax.vmap`, or when differentiated (use `jax.custom_vjp`).
    jax.errors.JaxRuntimeError: where the program's results are looked at: `callback_func` raised or
      returned something else; `barrier_wait` says what.
  """
  _check_flavor("call", callback_flavor)
  if not callable(callback_func):
    raise TypeError(f"call: callback_func: expected a callable, got {callback_func!r}")
  report = functools.partial(_keep, name=name_of(callback_func))
  index = device_index if call_with_device else None
  return _call.call(callback_func, arg, result_shape, index, report)


def _check_flavor(function: str, flavor: object) -> None:
  if not isinstance(flavor, CallbackFlavor):
    raise TypeError(f"{function}: callback_flavor: expected a CallbackFlavor, got {flavor!r}")


def barrier_wait(logging_name: str | None = None) -> None:
  """Waits until every program started so far, by any thread, has run, and its taps are through.

  Several threads may wait at once; what was raised meanwhile is raised in one of them.

  Args:
    logging_name: for the message.

  Raises:
    CallbackException: functions raised since the last barrier.
  """
  global _raised_count, _raised_last
  check_not_forked()
  finish(None)
  with _lock:
    count, last = _raised_count, _raised_last
    _raised_count, _raised_last = 0, None
  if last is not None:
    error, text = last
    where = f"barrier_wait({logging_name!r})" if logging_name is not None else "barrier_wait"
    raise CallbackException(  # programs match how it begins
      "There were exceptions during callback processing. Last one was: "
      f"[{where}; the last of ({count})] {text}"
    ) from error


def _flush_taps() -> None:
  """Lets the functions of taps finish; what they raised is for `barrier_wait`."""
  start_channel(CHANNEL).flush(None)


dispatch.after_effects_barrier.append(_flush_taps)
