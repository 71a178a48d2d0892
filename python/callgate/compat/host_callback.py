# SPDX-License-Identifier: Apache-2.0
"""`jax.experimental.host_callback` as of 2020, on callgate's taps.

`id_tap` is part of the data flow: it runs if its result is used (in a loop, a branch or an inner
jit: if one of their results is used). Outside compiled code it calls the function at once, in the
caller's thread. In compiled code the program doesn't wait; the function runs on callgate's thread,
and an `outfeed_receiver` must be active for the device.

```python
import jax, jax.numpy as jnp
from callgate.compat import host_callback as hcb

seen = []

@jax.jit
def f(x):
  return hcb.id_tap(lambda value, what: seen.append((what, float(value))), x * 2, what="x * 2") + 1

with hcb.outfeed_receiver():
  f(3.0)
assert seen == [("x * 2", 6.0)]
```
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate import _callgate
from callgate._core import exact, options, shown
from callgate._core.signatures import accepted
from callgate._jax import dispatch, loop_rules, walk
from callgate._part import Wait
from callgate._tap import primitive
from callgate._tap.tap import logical_sizes
from callgate._tap.target import start_channel
from callgate.compat import _host_callback as tapped
from callgate.compat._host_callback import TapFunctionException

__all__ = ["TapFunctionException", "id_print", "id_tap", "outfeed_receiver", "outfeed_stream"]
loop_rules.keep_results(lambda eqn: primitive.dataflow_taps_in(walk.subjaxprs(eqn), whole=True))


class Transform(str):
  """The name of a transformation of a tap, with `["name"]` and its parameters by name."""

  parameters: dict[str, Any]

  def __new__(cls, name: str, parameters: dict[str, Any]) -> Transform:
    self = super().__new__(cls, name)
    self.parameters = parameters
    return self

  def __getitem__(self, key: Any) -> Any:
    if key == "name":
      return str(self)
    return self.parameters[key] if isinstance(key, str) else super().__getitem__(key)


def id_tap(
  func: Callable[..., Any],
  arg: Any,
  *,
  result: Any = None,
  logical_shape: Any = None,
  **kwargs: Any,
) -> Any:
  """Calls `func(arg, **kwargs)` on the host, and returns `arg`, or `result` if given.

  Args:
    func: a function that gets the pytree as NumPy arrays. Under transformations it also gets
      `transforms`, the names in order of application: 'batch', 'jvp', 'transpose' and 'mask'. If
      the function has parameters of these names, it also gets `batch_dims` (with 'batch': the
      batched axis of each leaf of `arg` and of `result`, or None) and `logical_shapes` (with
      'mask': the outermost shape of each leaf of `arg`). Each name in `transforms` has those of its
      transformation as items: `transforms[0]["batch_dims"]`.
    arg: a pytree of arrays.
    result: the pytree of arrays to return. Default: `arg`.
    logical_shape: the sizes of the valid part of padded arrays, as in `callgate.tap`. `func` gets
      that part, and the transformation 'mask'.
    **kwargs: passed to `func` unchanged; they never enter the program.

  Returns:
    `arg` or `result`. Use it: a compiled program drops the call if it uses no part of it.

  Raises:
    TapFunctionException: outside compiled code: `func` raised.
    ValueError: a compiled program runs on a device without an outfeed receiver.
    TypeError: `func` is not callable, or a leaf is not an array.
  """
  if not callable(func):
    raise TypeError(f"id_tap: func: expected a callable, got {func!r}")
  given = tapped.Arrays("id_tap: arg", arg)
  rest = tapped.Arrays("id_tap: result", result)
  sizes = logical_sizes("tap 'id_tap'", logical_shape, arg, given.arrays)
  results = tapped.bind_tap(
    func, ("host_callback", *exact.identity(func), tapped.exact_items(kwargs)), given,
    functools.partial(_consume, func, kwargs), extra=[*(size for _, size in sizes), *rest.operands],
    masked=bool(sizes), eager=True, effect="dataflow", roles=("primal", "tangent", "cotangent"),
    logical=tuple(index for index, _ in sizes), untapped=len(rest.operands),
    kept=tapped.NEEDS_RECEIVER,
  )  # fmt: skip
  return given.rebuild(results) if result is None else rest.rebuild(results[len(given.operands) :])


def _consume(
  function: Callable[..., Any], kwargs: dict[str, Any], value: Any, transforms: tapped.Transforms,
  device: int | None,
) -> None:  # fmt: skip
  """Calls a tap's function: at once in the caller's thread, or on the channel's."""

  def call() -> None:
    keywords = dict(kwargs)
    if transforms:
      keywords["transforms"] = tuple(Transform(name, how) for name, how in transforms)
      met = {key: value for _, how in transforms for key, value in how.items()}
      keywords |= accepted(function, met)
    function(value, **keywords)

  tapped.run(call, tapped.name_of(function), device)


def _unknown_testing_consumer(*_: Any, **__: Any) -> None:
  """Represents a function unknown to the receiver; for tests."""
  raise LookupError("host_callback: a record came for a tap function that is not known here")


_unknown_consumer = _unknown_testing_consumer  # its older name


def id_print(
  arg: Any, *, result: Any = None, output_stream: Any = None, threshold: int = 1024, **kwargs: Any
) -> Any:
  """Prints `arg` on the host; returns `arg`, or `result` if given.

  The first line has sorted `key: value` pairs of keywords and transformations; then comes the
  value.

  Args:
    arg: a pytree of arrays.
    result: the pytree to return. Default: `arg`.
    output_stream: an object with `write`. Default: standard output.
    threshold: the number of elements above which `numpy.array2string` summarizes an array.
    **kwargs: printed unchanged.
  """
  kwargs |= {"output_stream": output_stream, "threshold": threshold}
  return id_tap(_print_consumer, arg, result=result, **kwargs)


def _print_consumer(arg: Any, *, output_stream: Any, threshold: int, **entries: Any) -> None:
  tapped.write(output_stream, entries, tapped.text_of(arg, threshold))


def outfeed_receiver(
  *, receiver_name: str = "", timeout_sec: float = 10, backends: Sequence[str] | None = None,
  devices: Sequence[Any] | None = None,
) -> tapped.Receiver:  # fmt: skip
  """Returns a context manager in which compiled programs may run taps; its end waits for them.

  Args:
    receiver_name: a name for messages.
    timeout_sec: the longest wait at the end of the block, in seconds.
    backends: names of platforms, to receive from their local devices.
    devices: the devices to receive from. Default: all local ones.

  Raises:
    ValueError: both `backends` and `devices` are given. At the start of the block: a device already
      has a receiver.
    TapFunctionException: at the end of the block: functions raised; see its `exceptions`.
    TimeoutError: at the end of the block: the time ran out; the message lists what is unfinished.
  """
  label, what = "outfeed_receiver", "names of platforms"
  if backends is not None and devices is not None:
    both = f"{backends!r} and {devices!r}"
    raise ValueError(f"{label}: expected at most one of `backends` and `devices`, got both: {both}")
  options.seconds(label, "timeout_sec", timeout_sec, zero=True)
  if devices is None:
    platforms = options.or_none(options.strings, label, "backends", backends, what=what) or [None]
    devices = [device for name in platforms for device in jax.local_devices(backend=name)]
  elif not isinstance(devices, Sequence) or not all(isinstance(d, jax.Device) for d in devices):  # pyright: ignore[reportUnnecessaryIsInstance]
    options.refuse(label, "devices", "JAX's devices", devices)
  return tapped.Receiver(receiver_name, timeout_sec, devices)


class outfeed_stream(contextlib.ContextDecorator):
  """A context manager that writes tapped values to a file, in the format of the outfeed of 2020.

  At the end of the block the file has all values of compiled programs in the block, and an end
  marker.

  Args:
    path: the file, which is replaced.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self._path = options.path("outfeed_stream", "path", path)

  def __enter__(self) -> None:
    self._sink: Any = _callgate.outfeed_2020_sink(self._path)  # pyright: ignore
    self._handle = start_channel(tapped.CHANNEL)
    self._handle.add([self._sink])

  def __exit__(self, *exception: object) -> None:
    dispatch.wait_for_effects(Wait(None))
    self._handle.flush(None)
    self._handle.remove(self._sink)
    self._sink.close()  # with the end marker


shown.show(*map(globals().get, __all__))
