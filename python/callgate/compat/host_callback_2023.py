# SPDX-License-Identifier: Apache-2.0
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
  """Functions of taps or calls raised; the text ends with the last one's traceback."""


TapFunctionException = CallbackException  # its name in the forms of 2020


class CallbackFlavor(enum.Enum):
  """Names the callback of JAX's that a program asked for: all are alike here."""

  IO_CALLBACK, PURE, DEBUG = 1, 2, 3


# Since the last barrier: how many exceptions were raised, and the last one with its traceback.
_raised: tuple[int, BaseException | None, str] = (0, None, "")  # guarded by _lock


def id_tap(
  tap_func: Callable[..., Any], arg: Any, *, result: Any = None, tap_with_device: bool = False,
  device_index: int = 0, callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
  **kwargs: Any,
) -> Any:  # fmt: skip
  """Calls `tap_func(arg, transforms)` on the host, and returns `arg`, or `result` if given.

  Under differentiation the primal values are sent, once; under `jax.checkpoint` in both passes. A
  tap of a tangent sends the cotangent under reverse mode, with 'transpose'.

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

  Raises:
    TypeError: for further keywords, if `tap_func` is not callable, if a leaf is not an array, or
      for a `callback_flavor` that is none.
  """
  if kwargs:
    ended = "Support for **kwargs in ``id_tap`` ended with the form of 2020"
    expected = f"{ended}; expected functools.partial(tap_func, {next(iter(kwargs))}=...)"
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
  """One tap for equal keys, to the function; with a device's `index` it gets `device=`, too."""
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
  """Prints `arg` on the host, as `id_tap` calls a function; returns `arg`, or `result` if given.

  First comes a line of sorted `key: value`, of keywords, device and transformations, then the
  value: on one line where it fits. Arguments are as for `id_tap`, and:

  Args:
    tap_with_device: also print the device that the value comes from.
    output_stream: where to `write`; None for standard output.
    threshold: elements above which `numpy.array2string` summarises an array.
    **kwargs: printed as they are.
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
  """Calls `callback_func(arg)` on the host, and returns what it returns, as jax.Arrays.

  The program waits. The function runs on a thread of callgate's: it may itself run JAX programs.

  Args:
    callback_func: called with the pytree of NumPy arrays; returns a pytree like `result_shape`.
    arg: a pytree of arrays.
    result_shape: the result: a pytree of anything with `.shape` and `.dtype`, or of scalars; None
      for no result.
    call_with_device: also pass `device=`, the jax.Device that calls.
    device_index: with `callback_flavor` as for `id_tap`.

  Raises:
    TypeError: `callback_func` is not callable, or `callback_flavor` is none.
    ValueError: `result_shape` is not such a pytree.
    NotImplementedError: under `jax.vmap`, or when differentiated (use `jax.custom_vjp`).
    jax.errors.JaxRuntimeError: where the program's results are looked at: `callback_func` raised or
      returned something else; `barrier_wait` says what.
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
  """The jax.Device of an id; where it is not known, the one at `index`."""
  known = (one for one in dispatch.cpu_devices() if one.id == device)
  return next(known, None) or jax.devices()[index]


def _gate(
  function: Callable[..., Any], given: Any, dtype_names: tuple[str | None, ...], tree: Any,
  structs: tuple[jax.ShapeDtypeStruct, ...], index: int | None,
) -> GateCallee:  # fmt: skip
  """The gate of flat arguments and results: the function has pytrees, and its result is checked."""
  name = tapped.name_of(function)

  def checked(result: Any) -> list[np.ndarray]:
    leaves, got = jax.tree.flatten(result)
    if got != tree:
      old = f"Callback func {name} should have returned a result with pytree {tree}"  # its words
      raise ResultError(f"call: {old}: expected a result of structure {tree}, got {got}")
    arrays = [tracing.canonicalize_value(np.asarray(leaf)) for leaf in leaves]
    for array, struct, (path, _) in zip(arrays, structs, leaf_paths(tree), strict=True):
      expected, got = (dtypes.type_text(it.dtype, it.shape) for it in (struct, array))
      if got != expected:
        raise ResultError(f"call: function {name}: result{path}: expected {expected}, got {got}")
    return arrays

  def run(context: Any, out: Sequence[Any], *leaves: Any) -> None:
    # JAX's own callback doesn't say which device calls; and one calls for all that share a
    # partitioned program.
    alone = isinstance(context, Context) and context.size == 1
    try:
      # The function may keep its argument: the views are XLA's.
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

  outside = "a call outside of jax.vmap, or callgate.gate, which has vmap= for it"
  inside = "the call inside a jax.custom_jvp or custom_vjp, or callgate.gate with defjvp or defvjp"
  options = GateOptions(
    name=registry.unique_name(function, prefix="call:"), effect="io", style="context",
    out=tuple(jax.ShapeDtypeStruct(x.shape, dtypes.carrier(x.dtype)) for x in structs),
    thread="own", vmap=functools.partial(_refuse, "batching rules", outside),
  )  # fmt: skip
  gate = GateCallee(run, options)
  gate.set_jvp(functools.partial(_refuse, "derivatives", inside))
  return gate


def _refuse(what: str, expected: str, *_: Any) -> Any:
  only = f"{what} are implemented only for id_tap, not for call"
  raise NotImplementedError(f"host_callback: {only}; expected {expected}")


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
  """Waits until every program started so far, by any thread, has run, and its taps are through.

  Args:
    logging_name: for the message.

  Raises:
    CallbackException: functions raised since the last barrier; of threads that wait, one gets it.
  """
  global _raised
  check_not_forked()
  tapped.finish(None)
  with _lock:
    (count, error, text), _raised = _raised, (0, None, "")
  if error is not None:
    where = f"barrier_wait({logging_name!r})" if logging_name is not None else "barrier_wait"
    begin = "There were exceptions during callback processing."  # programs match it
    last = f"[{where}; the last of ({count})] {text}"
    raise CallbackException(f"{begin} Last one was: {last}") from error


# `barrier_wait` raises the errors of taps' functions.
_part.on("effects barrier", lambda: start_channel(tapped.CHANNEL).flush(None))

shown.show(*map(globals().get, __all__))
