# SPDX-License-Identifier: Apache-2.0
"""`jax.experimental.host_callback` in its last form (2021 to 2024), on callgate.

`id_tap` is a tap with an effect: it runs even if its result is unused, in program order on each
device, and the program doesn't wait. Functions run on callgate's thread; `barrier_wait` raises
their exceptions. `call` is a gate: the program waits for its result.

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

import enum
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _part
from callgate._callgate import Context
from callgate._core import dtypes, exact, foreign, registry, shown
from callgate._core.errors import ResultError
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import dispatch, tracing
from callgate._tap.consumers import check_not_forked
from callgate._tap.records import leaf_paths
from callgate._tap.target import shared, start_channel
from callgate.compat import _host_callback as tapped

__all__ = [
  "CallbackException", "CallbackFlavor", "TapFunctionException", "barrier_wait", "call", "id_print",
  "id_tap",
]  # fmt: skip
_logger, _lock = logging.getLogger("callgate"), threading.Lock()
# Gates of equal calls. Guarded by target._lock.
_gates: weakref.WeakValueDictionary[Any, GateCallee] = weakref.WeakValueDictionary()


class CallbackException(Exception):
  """Functions of taps or calls have raised exceptions; the text ends with the last traceback."""


TapFunctionException = CallbackException  # its name of 2020


class CallbackFlavor(enum.Enum):
  """The kind of JAX callback that a program asked for; all have the same effect here."""

  IO_CALLBACK, PURE, DEBUG = 1, 2, 3


# The number of exceptions since the last barrier, and the last one with its traceback.
_raised: tuple[int, BaseException | None, str] = (0, None, "")  # guarded by _lock


def id_tap(
  tap_func: Callable[..., Any], arg: Any, *, result: Any = None, tap_with_device: bool = False,
  device_index: int = 0, callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
  **kwargs: Any,
) -> Any:  # fmt: skip
  """Calls `tap_func(arg, transforms)` on the host, and returns `arg`, or `result` if given.

  Differentiation sends the primal values once; `jax.checkpoint` sends them in both passes. If the
  tapped value is a tangent, reverse mode sends its cotangent, with 'transpose'.

  Args:
    tap_func: a function that gets the pytree as NumPy arrays, and the applied transformations: a
      tuple of `(name, parameters)`, such as `("batch", {"batch_dims": (0,)})`.
    arg: a pytree of arrays.
    result: the pytree to return. Default: `arg`.
    tap_with_device: True also passes `device=`, the jax.Device of the value.
    device_index: the index in `jax.devices()` of the device to report for an array that is
      partitioned over several.
    callback_flavor: selects JAX's callback; has no effect here.
    **kwargs: raise an error that names the replacement.

  Raises:
    TypeError: for further keywords, if `tap_func` is not callable, if a leaf is not an array, or
      for a wrong `callback_flavor`.
  """
  if kwargs:
    ended = "Support for **kwargs in ``id_tap`` ended with the form of 2020"
    expected = f"{ended}; use functools.partial(tap_func, {next(iter(kwargs))}=...)"
    raise TypeError(f"id_tap: unexpected keyword(s) {', '.join(kwargs)}. {expected}")
  _check("id_tap", "tap_func", tap_func, callback_flavor)
  key = exact.identity(tap_func)
  return _tap(tap_func, key, arg, result, device_index if tap_with_device else None)


def _check(api: str, parameter: str, function: object, flavor: object) -> None:
  if not isinstance(flavor, CallbackFlavor):
    raise TypeError(f"{api}: callback_flavor: expected a CallbackFlavor, got {flavor!r}")
  if not callable(function):
    raise TypeError(f"{api}: {parameter}: expected a callable, got {function!r}")


def _tap(function: Callable[..., Any], key: Any, arg: Any, result: Any, index: int | None) -> Any:
  """Taps `arg` to the function; equal keys share a tap. With `index` it passes `device=`."""
  name = tapped.name_of(function)

  def consume(value: Any, transforms: tapped.Transforms, device: int | None) -> None:
    try:
      where = {} if index is None else {"device": _device_of(device, index)}
      function(value, transforms, **where)
    except BaseException as error:  # noqa: BLE001 - kept, and raised where the user waits
      _keep(error, name)

  given = tapped.Arrays("id_tap: arg", arg)
  key = ("host_callback_2023", *key, index)
  results = tapped.bind_tap(function, key, given, consume, effect="ordered", transposed=True)
  return given.rebuild(results) if result is None else result


def _keep(error: BaseException, name: str) -> None:
  global _raised
  text = foreign.traceback_of(error)
  _logger.error("callgate: %s raised; barrier_wait() will raise it too\n%s", name, text)
  with _lock:
    _raised = _raised[0] + 1, error, text


def id_print(
  arg: Any, *, result: Any = None, tap_with_device: bool = False, device_index: int = 0,
  output_stream: Any = None, threshold: int = 1024,
  callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK, **kwargs: Any,
) -> Any:  # fmt: skip
  """Prints `arg` on the host; returns `arg`, or `result` if given.

  The first line has sorted `key: value` pairs of keywords, device and transformations; then comes
  the value, on the same line if it fits. Other arguments are as for `id_tap`.

  Args:
    tap_with_device: True also prints the device of the value.
    output_stream: an object with `write`. Default: standard output.
    threshold: the number of elements above which `numpy.array2string` summarizes an array.
    **kwargs: printed unchanged.
  """
  _check("id_tap", "tap_func", _print, callback_flavor)
  function = functools.partial(_print, output_stream, threshold, kwargs)
  stream = exact.identity(output_stream)
  key = ("print", *stream, threshold, tapped.exact_items(kwargs))
  return _tap(function, key, arg, result, device_index if tap_with_device else None)


def _print(
  stream: Any, threshold: int, entries: dict[str, Any], arg: Any, transforms: tapped.Transforms,
  **device: Any,
) -> None:  # fmt: skip
  entries = entries | device
  if transforms:
    entries["transforms"] = [(name, how) if how else name for name, how in transforms]
  tapped.write(stream, entries, tapped.text_of(arg, threshold, width=80))


def call(
  callback_func: Callable[..., Any], arg: Any, *, result_shape: Any = None,
  call_with_device: bool = False, device_index: int = 0,
  callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
) -> Any:  # fmt: skip
  """Calls `callback_func(arg)` on the host, and returns its result as jax.Arrays.

  The program waits for the result. The function runs on a thread of callgate, and may itself run
  JAX programs.

  Args:
    callback_func: a function that gets the pytree as NumPy arrays and returns a pytree like
      `result_shape`.
    arg: a pytree of arrays.
    result_shape: the types of the result: a pytree of scalars, or of anything with `.shape` and
      `.dtype`; None for no result.
    call_with_device: True also passes `device=`, the jax.Device that calls.
    device_index: as for `id_tap`.
    callback_flavor: as for `id_tap`.

  Raises:
    TypeError: `callback_func` is not callable, or `callback_flavor` has a wrong value.
    ValueError: `result_shape` is not such a pytree.
    NotImplementedError: under `jax.vmap`, or for a derivative (use `jax.custom_vjp`).
    jax.errors.JaxRuntimeError: when you use the program's results: `callback_func` raised or
      returned something else; `barrier_wait` raises the exception.
  """
  _check("call", "callback_func", callback_func, callback_flavor)
  given = tapped.Arrays("call: arg", arg, copied=True)
  structs, tree = _result_types(result_shape)
  index = device_index if call_with_device else None
  parts = (callback_func, given.tree, given.dtypes, tree, structs, index)
  trees = (exact.exact_tree(given.tree).key, exact.exact_tree(tree).key)
  key = (*exact.identity(callback_func), *trees, given.dtypes, structs, index)
  results = shared(_gates, key, lambda: _gate(*parts))(*given.operands)
  own = [x.astype(struct.dtype) for x, struct in zip(results, structs, strict=True)]
  return jax.tree.unflatten(tree, own)


def _device_of(device: int | None, index: int) -> Any:
  """Returns the jax.Device of an id, or the one at `index` if the id is unknown."""
  known = (one for one in dispatch.cpu_devices() if one.id == device)
  return next(known, None) or jax.devices()[index]


def _gate(
  function: Callable[..., Any], given: Any, dtype_names: tuple[str | None, ...], tree: Any,
  structs: tuple[jax.ShapeDtypeStruct, ...], index: int | None,
) -> GateCallee:  # fmt: skip
  """Makes the gate of flat arguments and results; the function gets pytrees."""
  name = tapped.name_of(function)

  def checked(result: Any) -> list[np.ndarray]:
    leaves, got = jax.tree.flatten(result)
    if got != tree:
      old = f"Callback func {name} should have returned a result with pytree {tree}"  # JAX's words
      raise ResultError(f"call: {old}: expected a result of structure {tree}, got {got}")
    arrays = [tracing.canonicalize_value(np.asarray(leaf)) for leaf in leaves]
    for array, struct, (path, _) in zip(arrays, structs, leaf_paths(tree), strict=True):
      expected, got = (dtypes.type_text(it.dtype, it.shape) for it in (struct, array))
      if got != expected:
        raise ResultError(f"call: function {name}: result{path}: expected {expected}, got {got}")
    return arrays

  def run(context: Any, out: Sequence[Any], *leaves: Any) -> None:
    # JAX's own callback doesn't report the calling device, and one device calls for all in a
    # partitioned program.
    alone = isinstance(context, Context) and context.size == 1
    try:
      # The function may keep its argument, but the views are XLA's memory.
      pairs = zip(leaves, dtype_names, strict=True)
      arrays = [np.array(leaf, dtype and jnp.dtype(dtype)) for leaf, dtype in pairs]
      device = context.device if alone else None
      where = {} if index is None else {"device": _device_of(device, index)}
      result = function(jax.tree.unflatten(given, arrays), **where)
      for view, array in zip(out, checked(result), strict=True):
        view[...] = array
    except BaseException as error:
      _keep(error, name)
      raise

  outside = "a call outside jax.vmap, or callgate.gate, which has vmap="
  inside = "the call inside a jax.custom_jvp or custom_vjp, or callgate.gate with defjvp or defvjp"
  options = GateOptions(
    name=registry.unique_name(function, prefix="call:"), effect="io", style="context",
    out=tuple(jax.ShapeDtypeStruct(x.shape, dtypes.carrier(x.dtype)) for x in structs),
    run_on="own", vmap=functools.partial(_refuse, "batching rules", outside),
  )  # fmt: skip
  gate = GateCallee(run, options)
  gate.set_jvp(functools.partial(_refuse, "derivatives", inside))
  return gate


def _refuse(what: str, expected: str, *_: Any) -> Any:
  only = f"{what} are implemented only for id_tap, not for call"
  raise NotImplementedError(f"host_callback: {only}; use {expected}")


def _result_types(result_shape: Any) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
  leaves, tree = jax.tree.flatten(result_shape)
  structs: list[jax.ShapeDtypeStruct] = []
  for leaf, (path, _) in zip(leaves, leaf_paths(tree), strict=True):
    try:
      if isinstance(leaf, str):
        raise TypeError("text")
      dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
      structs.append(jax.ShapeDtypeStruct(np.shape(leaf), tracing.canonical_dtype(dtype)))
    except (TypeError, ValueError) as error:
      old = "either numeric scalars, or must have 'shape' and 'dtype' attributes"
      expected = f"expected a pytree like the result; The values must be {old}"
      raise ValueError(f"call: result_shape{path}: {expected}. Got {leaf!r}") from error
  return tuple(structs), tree


def barrier_wait(logging_name: str | None = None) -> None:
  """Waits until all programs started so far, by any thread, have run and their taps are delivered.

  Args:
    logging_name: a name for the message.

  Raises:
    CallbackException: functions raised since the last barrier. If several threads wait, one gets
      it.
  """
  global _raised
  check_not_forked()
  tapped.finish(None)
  with _lock:
    (count, error, text), _raised = _raised, (0, None, "")
  if error is not None:
    where = f"barrier_wait({logging_name!r})" if logging_name is not None else "barrier_wait"
    begin = "There were exceptions during callback processing."  # users match this text
    last = f"[{where}; the last of ({count})] {text}"
    raise CallbackException(f"{begin} Last one was: {last}") from error


# `barrier_wait` raises the errors of taps' functions.
_part.on("effects barrier", lambda: start_channel(tapped.CHANNEL).flush(None))

shown.show(*map(globals().get, __all__))
