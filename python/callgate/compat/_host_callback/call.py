"""`call` of `host_callback_2023`: a gate around the user's function, one for equal calls.

The gate has flat arguments and results; here the pytrees are put together, and what the function
returned is compared with what was declared, leaf by leaf. Runs on a thread of callgate's own, under
the GIL, while the program waits.
"""

from __future__ import annotations

import dataclasses
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
from callgate._gate.options import GateOptions
from callgate._jax import dispatch, tracing
from callgate._tap import target
from callgate._tap.records import leaf_paths
from callgate.compat._host_callback.tapped import Arrays, name_of

Report = Callable[[BaseException], None]
_gates: weakref.WeakValueDictionary[Any, Gate] = weakref.WeakValueDictionary()


def call(
  function: Callable[..., Any],
  arg: Any,
  result_shape: Any,
  device_index: int | None,
  report: Report,
) -> Any:
  """Calls `function(arg)` from the program; see `host_callback_2023.call`.

  With a `device_index`, also passes `device=`: where several share a call, the one at that index.
  `report` is told of what the function raises, before the program fails.
  """
  given = Arrays("call: arg", arg, copied=True)
  structs, tree = _result_types(result_shape)
  key = (function, given.tree, given.dtypes, tree, structs, device_index)

  def make() -> Gate:
    return _gate(_Body(function, given.tree, given.dtypes, tree, structs, device_index, report))

  results = target.shared(_gates, key, make)(*given.operands)
  own = [x.astype(struct.dtype) for x, struct in zip(results, structs, strict=True)]
  return jax.tree.unflatten(tree, own)


def device_of(device: int | None, index: int) -> Any:
  """The jax.Device of an id; where it is not known, the one at `index`."""
  for one in dispatch.cpu_devices():
    if one.id == device:
      return one
  return jax.devices()[index]


def _gate(body: _Body) -> Gate:
  if body.device_index is not None:

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
  options = GateOptions(
    name=registry.unique_name(body.function, prefix="call:"),
    out=tuple(jax.ShapeDtypeStruct(x.shape, dtypes.carrier(x.dtype)) for x in body.structs),
    effect="io",
    style="return" if body.device_index is None else "context",
    thread="own",
    vmap=_no_vmap,
  )
  gate = Gate(function, options)
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
  structs: tuple[jax.ShapeDtypeStruct, ...]
  device_index: int | None
  report: Report

  def __call__(self, leaves: Sequence[Any], device: int | None) -> tuple[Any, ...]:
    try:
      # The function may keep its argument: the views are XLA's.
      arrays = [_own(leaf, name) for leaf, name in zip(leaves, self.arg_dtypes, strict=True)]
      arg = jax.tree.unflatten(self.arg_tree, arrays)
      if self.device_index is None:
        return self._checked(self.function(arg))
      where = device_of(device, self.device_index)
      return self._checked(self.function(arg, device=where))
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
    for array, struct, (path, _) in zip(arrays, self.structs, leaf_paths(tree), strict=True):
      if array.shape != struct.shape or array.dtype != struct.dtype:
        raise ResultError(
          f"{who}: result{path}: expected {struct.dtype.name}{list(struct.shape)}, got "
          f"{array.dtype.name}{list(array.shape)}"
        )
    return tuple(array.astype(dtypes.carrier(array.dtype), copy=False) for array in arrays)


def _own(view: Any, dtype: str | None) -> np.ndarray:
  array = np.array(view)
  return array if dtype is None else array.astype(jnp.dtype(dtype))


def _result_types(result_shape: Any) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
  leaves, tree = jax.tree.flatten(result_shape)
  structs: list[jax.ShapeDtypeStruct] = []
  for leaf, (path, _) in zip(leaves, leaf_paths(tree), strict=True):
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
  return tuple(structs), tree
