"""`call` of `host_callback_2023`: a gate around the user's function, one for equal calls.

The gate has flat arguments and results; here the pytrees are put together, and what the function
returned is compared with what was declared, leaf by leaf. Runs on a thread of callgate's own, under
the GIL, while the program waits.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._callgate import Context
from callgate._core import dtypes, registry
from callgate._core.errors import ResultError
from callgate._gate.gate import Gate
from callgate._jax import tracing
from callgate.compat._host_callback.tapped import Arrays, name_of

Report = Callable[[BaseException], None]
_gates: weakref.WeakValueDictionary[Any, Gate] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Options:
  """How a function is called.

  Attributes:
    with_device: pass `device=`.
    device_index: the device to name where several share a call.
  """

  with_device: bool
  device_index: int


def call(
  function: Callable[..., Any], arg: Any, result_shape: Any, options: Options, report: Report
) -> Any:
  """Calls `function(arg)` from the program; see `host_callback_2023.call`.

  Args:
    function: the user's.
    arg: a pytree of arrays.
    result_shape: what the function returns.
    options: how it is called.
    report: told of what it raises, before the program fails.
  """
  given = Arrays("call: arg", arg, copied=True)
  structs, tree = _result_types(result_shape)
  paths = tuple(_paths(result_shape))
  types = tuple((struct.shape, np.dtype(struct.dtype)) for struct in structs)
  key = (function, given.tree, given.dtypes, tree, types, options)

  def make() -> Gate:
    body = _Body(function, given.tree, given.dtypes, tree, types, paths, options, report)
    return _gate(body, tuple(map(_as_it_travels, structs)))

  results = _shared(key, make)(*given.operands)
  own = [x.astype(struct.dtype) for x, struct in zip(results, structs, strict=True)]
  return jax.tree.unflatten(tree, own)


def _as_it_travels(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(struct.shape, dtypes.carrier(struct.dtype))


def device_of(device: int | None, index: int) -> Any:
  """The jax.Device of an id; where it is not known, the one at `index`."""
  for one in jax.local_devices(backend="cpu"):
    if one.id == device:
      return one
  return jax.devices()[index]


def _shared(key: Any, make: Callable[[], Gate]) -> Gate:
  with _lock:
    try:
      gate = _gates.get(key)
    except TypeError:  # not hashable
      return make()
    if gate is None:
      gate = _gates[key] = make()
    return gate


def _gate(body: _Body, structs: tuple[Any, ...]) -> Gate:
  if body.options.with_device:

    def in_context(context: Any, out: Sequence[Any], *leaves: Any) -> None:
      # JAX's own callback doesn't say which device calls; and one calls for all that share a
      # partitioned program.
      alone = isinstance(context, Context) and context.size == 1
      device = context.device if alone else None
      for view, result in zip(out, body(leaves, device), strict=True):
        view[...] = result

    function: Callable[..., Any] = in_context
  else:

    def returning(*leaves: Any) -> tuple[Any, ...]:
      return body(leaves, None)

    function = returning
  name = registry.unique_name(body.function, prefix="call:")
  style = "context" if body.options.with_device else "return"
  gate = Gate(
    function, name=name, out=structs, effect="io", style=style, thread="own", vmap=_no_vmap
  )
  gate.defjvp(_no_jvp)
  return gate


def _no_vmap(*_: Any) -> Any:
  raise NotImplementedError(
    "host_callback: batching rules are implemented only for id_tap, not for call; expected a call "
    "outside of jax.vmap, or callgate.gate, which has vmap= for it"
  )


def _no_jvp(*_: Any) -> Any:
  raise NotImplementedError(
    "host_callback: derivatives are implemented only for id_tap, not for call; expected the call "
    "inside a jax.custom_jvp or jax.custom_vjp, or callgate.gate, which has defjvp and defvjp"
  )


@dataclasses.dataclass(frozen=True)
class _Body:
  """Calls the user's function with pytrees, and checks what it returns."""

  function: Callable[..., Any]
  arg_tree: Any
  arg_dtypes: tuple[str | None, ...]
  tree: Any
  types: tuple[tuple[tuple[int, ...], Any], ...]
  paths: tuple[str, ...]
  options: Options
  report: Report

  def __call__(self, leaves: Sequence[Any], device: int | None) -> tuple[Any, ...]:
    try:
      # The function may keep its argument: the views are XLA's.
      arrays = [_own(leaf, name) for leaf, name in zip(leaves, self.arg_dtypes, strict=True)]
      arg = jax.tree.unflatten(self.arg_tree, arrays)
      if self.options.with_device:
        where = device_of(device, self.options.device_index)
        return self._checked(self.function(arg, device=where))
      return self._checked(self.function(arg))
    except BaseException as error:
      self.report(error)
      raise

  def _checked(self, result: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(result)
    who = f"call: function {name_of(self.function)}"
    if tree != self.tree:
      raise ResultError(  # the first words are those of the old module
        f"call: Callback func {name_of(self.function)} should have returned a result with pytree "
        f"{self.tree}: expected a result of structure {self.tree}, got {tree}"
      )
    arrays = [tracing.canonicalize_value(np.asarray(leaf)) for leaf in leaves]
    for array, (shape, dtype), path in zip(arrays, self.types, self.paths, strict=True):
      if array.shape != shape or array.dtype != dtype:
        raise ResultError(
          f"{who}: result{path}: expected {dtype.name}{list(shape)}, got "
          f"{array.dtype.name}{list(array.shape)}"
        )
    return tuple(array.astype(dtypes.carrier(array.dtype), copy=False) for array in arrays)


def _own(view: Any, dtype: str | None) -> np.ndarray:
  array = np.array(view)
  return array if dtype is None else array.astype(jnp.dtype(dtype))


def _result_types(result_shape: Any) -> tuple[list[jax.ShapeDtypeStruct], Any]:
  leaves, tree = jax.tree.flatten(result_shape)
  paths = _paths(result_shape)
  structs: list[jax.ShapeDtypeStruct] = []
  for leaf, path in zip(leaves, paths, strict=True):
    try:
      dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
      if isinstance(leaf, str):
        raise TypeError("text")
      structs.append(jax.ShapeDtypeStruct(np.shape(leaf), tracing.canonical_dtype(dtype)))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"call: result_shape{path}: expected a pytree like the result; The values must be either "
        f"numeric scalars, or must have 'shape' and 'dtype' attributes. Got {leaf!r}"
      ) from error
  return structs, tree


def _paths(tree: Any) -> list[str]:
  return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
