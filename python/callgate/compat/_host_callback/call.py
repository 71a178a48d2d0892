"""`call` of `host_callback_2023`: a gate around the user's function, one for equal calls.

The gate has flat arguments and results; here the pytrees are put together, and what the function
returned is compared with what was declared, leaf by leaf. Runs on a thread of callgate's own, under
the GIL, while the program waits.
"""

from __future__ import annotations

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
  results = target.shared(_gates, key, lambda: _gate(*key, report))(*given.operands)
  own = [x.astype(struct.dtype) for x, struct in zip(results, structs, strict=True)]
  return jax.tree.unflatten(tree, own)


def device_of(device: int | None, index: int) -> Any:
  """The jax.Device of an id; where it is not known, the one at `index`."""
  for one in dispatch.cpu_devices_or_none():
    if one.id == device:
      return one
  return jax.devices()[index]


def _gate(
  function: Callable[..., Any],
  arg_tree: Any,
  arg_dtypes: tuple[str | None, ...],
  tree: Any,
  structs: tuple[jax.ShapeDtypeStruct, ...],
  device_index: int | None,
  report: Report,
) -> Gate:
  """Calls the user's function with pytrees, and checks what it returns."""

  def run(leaves: Sequence[Any], device: int | None) -> tuple[Any, ...]:
    try:
      # The function may keep its argument: the views are XLA's.
      arrays = [
        np.array(leaf) if dtype is None else np.array(leaf).astype(jnp.dtype(dtype))
        for leaf, dtype in zip(leaves, arg_dtypes, strict=True)
      ]
      arg = jax.tree.unflatten(arg_tree, arrays)
      where = {} if device_index is None else {"device": device_of(device, device_index)}
      return _checked(name_of(function), function(arg, **where), tree, structs)
    except BaseException as error:
      report(error)
      raise

  def returning(*leaves: Any) -> tuple[Any, ...]:
    return run(leaves, None)

  def in_context(context: Any, out: Sequence[Any], *leaves: Any) -> None:
    # JAX's own callback doesn't say which device calls; and one calls for all that share a
    # partitioned program.
    alone = isinstance(context, Context) and context.size == 1
    for view, result in zip(out, run(leaves, context.device if alone else None), strict=True):
      view[...] = result

  options = GateOptions(
    name=registry.unique_name(function, prefix="call:"),
    out=tuple(jax.ShapeDtypeStruct(x.shape, dtypes.carrier(x.dtype)) for x in structs),
    effect="io",
    style="return" if device_index is None else "context",
    thread="own",
    vmap=_no_vmap,
  )
  gate = Gate(returning if device_index is None else in_context, options)
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


def _checked(
  name: str, result: Any, expected: Any, structs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Any, ...]:
  """The leaves of what the function returned, as they travel."""
  leaves, tree = jax.tree.flatten(result)
  if tree != expected:
    raise ResultError(  # the first words are those of the old module
      f"call: Callback func {name} should have returned a result with pytree {expected}: expected "
      f"a result of structure {expected}, got {tree}"
    )
  arrays = [tracing.canonicalize_value(np.asarray(leaf)) for leaf in leaves]
  for array, struct, (path, _) in zip(arrays, structs, leaf_paths(tree), strict=True):
    if array.shape != struct.shape or array.dtype != struct.dtype:
      raise ResultError(
        f"call: function {name}: result{path}: expected "
        f"{dtypes.type_text(struct.dtype, struct.shape)}, got "
        f"{dtypes.type_text(array.dtype, array.shape)}"
      )
  return tuple(array.astype(dtypes.carrier(array.dtype), copy=False) for array in arrays)


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
      raise ValueError(
        f"call: result_shape{path}: expected a pytree like the result; The values must be either "
        f"numeric scalars, or must have 'shape' and 'dtype' attributes. Got {leaf!r}"
      ) from error
  return tuple(structs), tree
