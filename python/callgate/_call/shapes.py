# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of a call's arguments and results, checked during tracing."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.site import Callee, CallSite
from callgate._call.site import Static as StaticArguments
from callgate._core import foreign, registry, split
from callgate._core.dtypes import MOST_DIMENSIONS, check_rank, is_packed, type_text
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError, GateError
from callgate._core.masked import is_masked, shown
from callgate._core.signatures import accepted, parameters_text
from callgate._core.split import Static
from callgate._core.where import users_stack
from callgate._jax import refs, tracing

_NUMBERS = (bool, int, float, complex, np.generic)
_MOST_BYTES = 2**63 - 1  # XLA counts in 64 bits


def result_types(
  gate: Callee, in_tree: Any, structs: list[Any], static: StaticArguments
) -> tuple[tuple[Any, ...], Any]:
  args, kwargs = given = jax.tree.unflatten(in_tree, structs)
  declared, like = gate.out, gate.like
  if declared is not None and gate.is_of_object(args):
    args = args[1:]
    declared = getattr(declared, "of_method", lambda: declared)()
  if declared is None:
    assert like is not None
    declared = jax.eval_shape(
      lambda *args, **kwargs: gate.call_rule(like, (), args, kwargs, static), *args, **kwargs
    )
  elif callable(declared) and not is_type(declared):
    try:
      declared = gate.call_rule(declared, (), args, accepted(declared, kwargs), static)
    except GateError:
      raise
    except TypeError as error:
      check_parameters(gate, gate.call_signature, given[0], {**kwargs, **dict(static)})
      raise _wrong_function(gate, args, error) from error
    except Exception as error:
      foreign.add_note(error, f"callgate: raised in out= of {gate.label}")
      raise
  declared = jax.tree.map(_without_keys, declared, is_leaf=is_type)
  leaves, out_tree = jax.tree.flatten(declared, is_leaf=is_type)
  return tuple(_result_type(gate, leaf, i) for i, leaf in enumerate(leaves)), out_tree


def _without_keys(leaf: Any) -> Any:
  """Returns the declared type of a result, or of a PRNG key's data."""
  if not is_type(leaf) or isinstance(leaf.dtype, np.dtype):
    return leaf
  is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return split.KeyNode.of(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if is_key else leaf


def _wrong_function(gate: Callee, args: Any, error: TypeError) -> GateDefinitionError:
  shown = ", ".join(
    type_text(leaf.dtype, leaf.shape) if is_type(leaf) else type(leaf).__name__
    for leaf in split.joined(args)
  )
  expected = "expected a function of the arguments' types that returns the results' types"
  raised = f"raised {foreign.said_by(error)}"
  if gate.call_signature is None and len(gate.parameters) != len(args):
    raised += f". The {gate.kind} has the parameters ({', '.join(gate.parameters)})"
  return GateDefinitionError(
    f"{gate.label}: out: {expected}, got a function that, called with ({shown}), {raised}"
  )


def check_parameters(
  gate: Callee,
  signature: inspect.Signature | None,
  args: tuple[Any, ...],
  kwargs: Mapping[str, Any],
) -> None:
  """Raises if Python could not call a function of the signature with these arguments."""
  if signature is None:
    return
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    shown = [_kind_of(value) for value in args]
    shown += [f"{name}={_kind_of(value)}" for name, value in kwargs.items()]
    line = "".join(f", at {file}:{line}" for file, line, _ in users_stack()[-1:])
    hint = ""
    if next(iter(signature.parameters), "") in ("self", "cls") and not gate.is_of_object(args):
      hint = ". Pass the method's object, or its class, as the first argument"
    raise GateDefinitionError(
      f"{gate.label}: {error}: expected the arguments {parameters_text(signature)}, got "
      f"({', '.join(shown)}){line}{hint}"
    ) from None


def _kind_of(value: Any) -> str:
  value = value.value if isinstance(value, Static) else value
  return type_text(value.dtype, value.shape) if is_type(value) else type(value).__name__


def _result_type(gate: Callee, leaf: Any, index: int) -> Any:
  where = f"{gate.label}: out: result {index}"
  if not is_type(leaf):
    hint = f"; for a number pass jnp.asarray({leaf!r})" if isinstance(leaf, _NUMBERS) else ""
    raise GateDefinitionError(
      f"{where}: expected a value with .shape and .dtype, got {leaf!r}{hint}"
    )
  dtype = np.dtype(leaf.dtype)
  if (narrow := tracing.canonical_dtype(dtype)) != dtype:
    raise GateDefinitionError(
      f"{where}: {dtype.name} needs jax_enable_x64; expected {narrow.name} without it"
    )
  shape = tuple(leaf.shape)
  if not all(isinstance(n, (int, np.integer)) or is_open(n) for n in shape):
    hint = ""
    if any(map(is_type, shape)):
      hint = ": an array argument has no value while tracing; pass a Python int by keyword"
    raise GateDefinitionError(f"{where}: expected known extents, got {shape}{hint}")
  extents = tuple(n if is_open(n) else int(n) for n in shape)
  known = [n for n in extents if not is_open(n)]
  if min(known, default=0) < 0:
    raise GateDefinitionError(f"{where}: expected extents of at least 0, got {extents}")
  # XLA ends the process if the product overflows before it reaches an extent of 0.
  if max(itertools.accumulate((dtype.itemsize, *known), operator.mul)) > _MOST_BYTES:
    got = type_text(dtype, extents)
    raise GateDefinitionError(f"{where}: expected at most {_MOST_BYTES} bytes, got {got}")
  return extents, dtype


def as_array(gate: Callee, leaf: Any, index: int, tree: Any) -> Any:
  """Returns a leaf of a call's arguments, of the structure `tree`, as an array."""
  if isinstance(leaf, jax.Array):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(leaf)
    return leaf
  try:
    return jnp.asarray(leaf)
  except (TypeError, ValueError, OverflowError) as error:
    if is_masked(leaf):
      hint = ""
    elif isinstance(leaf, np.generic):  # also as keywords: NumPy scalars are arrays
      hint = (
        "; NumPy's text and times are neither arrays nor static values; pass Python's own, "
        "from .item()"
      )
    else:
      hint = "; pass other values by keyword, as static arguments"
    name = registry.argument_in(gate.name, tree, index)
    if gate.live_owners and [name] == [f"'{first}'" for first in gate.parameters[:1]]:
      hint = _not_its_object(gate, leaf)
    where = f"argument {name}"
    raise GateDefinitionError(
      f"{gate.label}: {where}: expected an array or a pytree of arrays, got {shown(leaf)}{hint}"
    ) from error


def _not_its_object(gate: Callee, got: Any) -> str:
  owner, kind = gate.live_owners[0].__name__, type(got).__name__
  return (
    f". It is a method of {owner}: expected an object of that class, of a subclass, or of a "
    f"class with the gate as an attribute (in {kind}: name = {owner}.name). A decorator above a "
    "gate needs functools.wraps"
  )


def check_arrays(gate: Callee, args: tuple[Any, ...]) -> None:
  """Raises if a leaf is no array, before JAX's custom derivatives raise their own error."""
  leaves, tree = jax.tree.flatten((args, {}))
  for index, leaf in enumerate(leaves):
    plain = type(leaf) is np.ndarray and leaf.dtype.kind not in "OSUmM"
    if not (plain or isinstance(leaf, (jax.Array, np.generic, bool, int, float, complex))):
      as_array(gate, leaf, index, tree)


def check_call(gate: Callee, site: CallSite, structs: Sequence[Any]) -> None:
  if gate.arrays == "numpy":
    types = [*((struct.shape, struct.dtype) for struct in structs), *site.results]
    for index, (shape, dtype) in enumerate(types):
      if is_packed(dtype) or len(shape) > MOST_DIMENSIONS:
        what = f"result {index - len(structs)}"
        if index < len(structs):
          what = f"argument {registry.argument(gate.name, site.spec, index)}"
        check_rank(f"{gate.label}: {what}", shape)
        raise GateDefinitionError(
          f"{gate.label}: {what}: {np.dtype(dtype).name} has several elements in a byte, so "
          "there is no zero-copy NumPy view of it; use arrays='buffer' with Buffer.unpack() and "
          "Buffer.pack(), or convert to int8 before the call"
        )
  for i, o in gate.aliases.items():
    for what, index, count in (("input", i, len(structs)), ("output", o, len(site.results))):
      if not 0 <= index < count:
        raise GateDefinitionError(
          f"{gate.label}: aliases: {what} {index} is outside the range [0, {count})"
        )
    have, want = (structs[i].shape, structs[i].dtype), site.results[o]
    if have != want:
      raise GateDefinitionError(
        f"{gate.label}: aliases: input {i} is {have[1]}{list(have[0])} but output {o} is "
        f"{want[1]}{list(want[0])}; expected the same shape and dtype"
      )


def pair(rule: str, expected: str, found: Any) -> Any:
  """Checks and returns the pair that a user's rule returned."""
  if isinstance(found, (tuple, list)) and len(found) == 2:
    return found
  raise GateDefinitionError(
    f"{rule} returned a value of structure {jax.tree.structure(found)}; expected a pair {expected}"
  )


def numbers_as_arrays(values: Any) -> Any:
  """Returns a pytree with arrays in place of Python and NumPy numbers."""
  return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, _NUMBERS) else x, values)


def to_positional(gate: Callee, args: tuple[Any, ...], arrays: dict[str, Any]) -> tuple[Any, ...]:
  """Returns all array arguments by position, because derivative rules are positional."""
  names = list(itertools.takewhile(arrays.__contains__, gate.parameters[len(args) :]))
  if rest := sorted(arrays.keys() - set(names)):
    raise GateDefinitionError(
      f"{gate.label}: array argument(s) {rest} were passed by keyword, but the gate has "
      "derivative rules, which are positional; pass arrays by position"
    )
  return (*args, *(arrays[name] for name in names))


def split_static(label: str, kwargs: dict[str, Any]) -> tuple[dict[str, Any], StaticArguments]:
  """Splits keyword arguments into those with arrays and the static ones, in a fixed order."""
  arrays: dict[str, Any] = {}
  static: list[tuple[str, Any]] = []
  for key, value in sorted(kwargs.items()):
    leaves: list[Any] = jax.tree.leaves(value)
    if open_ := [leaf for leaf in leaves if is_open(leaf)]:
      raise GateDefinitionError(
        f"{label}: keyword argument '{key}': expected an array or a value that is known now, got "
        f"the symbolic dimension {open_[0]}; pass it through jax.numpy.asarray"
      )
    if any(isinstance(leaf, _ARRAYS) for leaf in leaves):
      arrays[key] = value
      continue
    try:
      hash(value)
    except TypeError as error:
      raise GateDefinitionError(
        f"{label}: keyword argument '{key}': expected an array, a pytree of arrays or a hashable "
        f"static value, got {type(value).__name__} ({error}). Register a class that holds arrays "
        "as a pytree (jax.tree_util.register_dataclass)"
      ) from error
    static.append((key, value))
  return arrays, tuple(static)


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_type(value: Any) -> bool:
  """Returns True for objects with a shape and a dtype, except for classes."""
  return not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype")


def predicate(label: str, option: str, value: Any) -> Any:
  """Returns a traced bool of shape () without derivatives, for checks, breakpoints and taps.

  Raises:
    GateDefinitionError: the value is no such array.
  """
  try:
    given = jnp.asarray(refs.read(value))
  except (TypeError, ValueError, OverflowError) as error:
    raise _no_predicate(label, option, shown(value)) from error
  if given.shape != () or given.dtype != jnp.bool_:
    raise _no_predicate(label, option, type_text(given.dtype, given.shape))
  return jax.lax.stop_gradient(given)


def _no_predicate(label: str, option: str, got: str) -> GateDefinitionError:
  return GateDefinitionError(f"{label}: {option}: expected a bool of shape (), got {got}")
