"""Shapes and dtypes of a call: what goes in, what comes out, checked while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.site import Callee, CallSite
from callgate._core import registry
from callgate._core.dtypes import is_packed
from callgate._core.errors import GateDefinitionError
from callgate._core.masked import is_masked, shown
from callgate._core.signatures import accepted
from callgate._jax import tracing


def result_types(
  gate: Callee, in_tree: Any, structs: list[Any], static: tuple[tuple[str, Any], ...]
) -> tuple[tuple[Any, ...], Any]:
  args, kwargs = jax.tree.unflatten(in_tree, structs)
  declared, like = gate.out, gate.like
  if declared is None:
    assert like is not None
    declared = jax.eval_shape(
      lambda *args, **kwargs: gate.call_rule(like, (), args, kwargs, static), *args, **kwargs
    )
  elif callable(declared) and not is_type(declared):
    rule = declared
    declared = gate.call_rule(rule, (), args, accepted(rule, kwargs), static)
  leaves, out_tree = jax.tree.flatten(declared, is_leaf=is_type)
  return tuple(_result_type(gate, leaf, i) for i, leaf in enumerate(leaves)), out_tree


def _result_type(gate: Callee, leaf: Any, index: int) -> Any:
  if not is_type(leaf):
    raise GateDefinitionError(
      f"{gate.label}: out: result {index}: expected a value with .shape and .dtype, got {leaf!r}"
    )
  dtype = np.dtype(leaf.dtype)
  if tracing.canonical_dtype(dtype) != dtype:
    raise GateDefinitionError(
      f"{gate.label}: out: result {index}: {dtype.name} needs jax_enable_x64; expected "
      f"{tracing.canonical_dtype(dtype).name} without it"
    )
  shape = tuple(leaf.shape)
  if not all(isinstance(extent, (int, np.integer)) for extent in shape):
    raise GateDefinitionError(
      f"{gate.label}: out: result {index}: expected known extents, got {shape}"
    )
  return tuple(int(extent) for extent in shape), dtype


_ELSE_STATIC = "pass anything else as a keyword argument, which is static"


def as_array(gate: Callee, leaf: Any, index: int) -> Any:
  if isinstance(leaf, jax.Array):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(leaf)
    return leaf
  try:
    return jnp.asarray(leaf)
  except (TypeError, ValueError, OverflowError) as error:
    raise GateDefinitionError(
      f"{gate.label}: argument {index}: expected an array or a pytree of arrays, got "
      + (shown(leaf) if is_masked(leaf) else f"{shown(leaf)}; {_ELSE_STATIC}")
    ) from error


def check_arrays(gate: Callee, args: tuple[Any, ...]) -> None:
  """Raises where a leaf is no array, before JAX's custom derivatives say so in their words."""
  for index, leaf in enumerate(jax.tree.leaves(args)):
    plain = type(leaf) is np.ndarray and leaf.dtype.kind != "O"
    if not (plain or isinstance(leaf, (jax.Array, np.generic, bool, int, float, complex))):
      as_array(gate, leaf, index)


def check_call(gate: Callee, site: CallSite, structs: Sequence[Any]) -> None:
  if gate.arrays == "numpy":
    for index, struct in enumerate(structs):
      if is_packed(struct.dtype):
        _refuse_packed(
          gate, f"argument {registry.argument(gate.name, site.spec, index)}", struct.dtype
        )
    for index, (_, dtype) in enumerate(site.results):
      if is_packed(dtype):
        _refuse_packed(gate, f"result {index}", dtype)
  for i, o in gate.aliases.items():
    _check_alias(gate, i, o, structs, site.results)


def _refuse_packed(gate: Callee, what: str, dtype: Any) -> None:
  raise GateDefinitionError(
    f"{gate.label}: {what}: {np.dtype(dtype).name} has several elements in a byte, so there "
    "is no zero-copy NumPy view of it; use arrays='buffer' with Buffer.unpack() and Buffer.pack(), "
    "or convert to int8 before the call"
  )


def _check_alias(
  gate: Callee, i: int, o: int, structs: Sequence[Any], results: Sequence[Any]
) -> None:
  if not 0 <= i < len(structs):
    raise GateDefinitionError(
      f"{gate.label}: aliases: input {i} is outside the range [0, {len(structs)})"
    )
  if not 0 <= o < len(results):
    raise GateDefinitionError(
      f"{gate.label}: aliases: output {o} is outside the range [0, {len(results)})"
    )
  have, want = (structs[i].shape, structs[i].dtype), results[o]
  if have != (want[0], want[1]):
    raise GateDefinitionError(
      f"{gate.label}: aliases: input {i} is {have[1]}{list(have[0])} but output {o} is "
      f"{want[1]}{list(want[0])}; expected the same shape and dtype"
    )


def to_positional(
  gate: Callee, args: tuple[Any, ...], arrays: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Array keywords as positional arguments, since derivative rules are positional."""
  out = list(args)
  rest = dict(arrays)
  for parameter in gate.parameters[len(args) :]:
    if parameter not in rest:
      break
    out.append(rest.pop(parameter))
  if rest:
    raise GateDefinitionError(
      f"{gate.label}: array argument(s) {sorted(rest)} were passed by keyword, but the gate "
      "has derivative rules, which are positional; expected positional arguments"
    )
  return tuple(out), rest


def split_static(
  label: str, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
  """Keyword arguments that hold arrays, and the static rest in a fixed order."""
  arrays: dict[str, Any] = {}
  static: list[tuple[str, Any]] = []
  for key, value in sorted(kwargs.items()):
    if any(map(_is_array, jax.tree.leaves(value))):
      arrays[key] = value
      continue
    try:
      hash(value)
    except TypeError as error:
      raise GateDefinitionError(
        f"{label}: keyword argument '{key}': expected an array or a hashable static value, "
        f"got {type(value).__name__}"
      ) from error
    static.append((key, value))
  return arrays, tuple(static)


def is_type(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
