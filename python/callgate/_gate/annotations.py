# SPDX-License-Identifier: Apache-2.0
"""Declares a gate's results by jaxtyping annotations of its function.

`def f(x: Float[Array, "n"]) -> Float[Array, "n 3"]` replaces `out=`. Arguments are checked against
their annotations, which also give the dimensions their sizes. The code needs no import of
jaxtyping: it reads `dtypes` and `dim_str` of an annotation.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import shapes
from callgate._core import signatures
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing

_NAME = re.compile(r"[A-Za-z_]\w*\Z")
# The dtype that JAX gives to Python numbers of each kind in 64-bit mode.
_USUAL = tuple(map(np.dtype, ("float64", "int64", "complex128", "uint32", "bool")))
# From evaluating names that only type checkers know, and from objects without annotations.
_UNKNOWN = (NameError, AttributeError, ImportError, TypeError, ValueError)


def refuse_generators(label: str, function: Any) -> None:
  """Raises for generator functions: a call of one returns no results."""
  if signatures.is_generator_function(function):
    raise GateDefinitionError(
      f"{label}: fn: expected a function that returns its results, got a generator function; use "
      "callgate.feed for generators"
    )


def results(label: str, function: Callable[..., Any], skip: int) -> Annotated | None:
  """Returns the function for `out=` that the annotations declare; None if they declare no results.

  Args:
    label: the gate, for messages.
    function: the callable.
    skip: the number of its first parameters that a call does not pass.
  """
  plain = getattr(function, "func", function)  # functools.partial
  try:
    if "return" not in inspect.get_annotations(plain):
      return None
    hints = typing.get_type_hints(plain)
  except _UNKNOWN:
    return None
  result = hints.pop("return")
  parts = typing.get_args(result) if typing.get_origin(result) is tuple else (result,)
  if not parts or not all(map(_arrays, parts)):
    return None
  names = [p.name for p in signatures.positional(function, skip)]
  return Annotated(label, names, hints, result)


class Annotated:
  """A function for `out=`: takes ShapeDtypeStructs and static values, returns ShapeDtypeStructs."""

  def __init__(
    self, label: str, names: Sequence[str], hints: Mapping[str, Any], result: Any
  ) -> None:
    self._label, self._names, self._hints, self._result = label, names, hints, result

  def of_method(self) -> Annotated:
    """Returns the same for calls without the first argument, the object."""
    return Annotated(self._label, self._names[1:], self._hints, self._result)

  def __call__(self, *args: Any, **named: Any) -> Any:
    given = {**dict(zip(self._names, args, strict=False)), **named}
    sizes = {name: value for name, value in given.items() if type(value) is int}
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(list(given.values())) if shapes.is_type(leaf)]
    for _ in range(2):  # the second time all names have sizes
      for name, value in given.items():
        options = _arrays(self._hints.get(name))
        raw = any(map(_is_key, options)) and not _is_key_type(getattr(value, "dtype", None))
        if shapes.is_type(value) and options and not raw:
          self._bind(name, value, options, sizes)
    if typing.get_origin(self._result) is not tuple:
      return self._struct(self._result, sizes, dtypes)
    return tuple(self._struct(part, sizes, dtypes) for part in typing.get_args(self._result))

  def _bind(self, name: str, value: Any, options: Sequence[Any], sizes: dict[str, Any]) -> None:
    """Gives the dimensions of an argument's annotation their sizes.

    Raises:
      GateDefinitionError: the argument does not match the annotation.
    """
    for option in options:
      bound = dict(sizes)
      if _allows(option, value.dtype) and _matches(option.dim_str.split(), value.shape, bound):
        sizes.update(bound)
        return
    expected = " or ".join(map(_text, options))
    known = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
    where = f" where {known}" if known else ""
    got = type_text(value.dtype, value.shape)
    raise GateDefinitionError(
      f"{self._label}: argument '{name}': expected {expected}{where}, got {got}"
    )

  def _struct(
    self, annotation: Any, sizes: dict[str, Any], dtypes: Sequence[Any]
  ) -> jax.ShapeDtypeStruct:
    option = _arrays(annotation)[0]
    shape: list[Any] = []
    for dim in option.dim_str.split():
      if (size := _size(dim, sizes)) is None:
        raise GateDefinitionError(
          f"{self._label}: the annotation of the result, {_text(option)}: expected dimensions of "
          f"the arguments' annotations, got {dim!r}; use out= for other shapes"
        )
      shape += size if isinstance(size, tuple) else [size]
    return jax.ShapeDtypeStruct(tuple(shape), self._dtype(option, dtypes))

  def _dtype(self, option: Any, dtypes: Sequence[Any]) -> Any:
    """Returns the annotation's only dtype; else the arguments', if allowed; else JAX's default."""
    if _is_key(option):
      new = jax.eval_shape(jax.random.key, 0).dtype
      return next((dtype for dtype in dtypes if _is_key_type(dtype)), new)
    if isinstance(option.dtypes, (tuple, list)) and len(option.dtypes) == 1:
      return jnp.dtype(option.dtypes[0])
    own = [dtype for dtype in dtypes if _allows(option, dtype)]
    if own and _allows(option, common := jnp.result_type(*own)):
      return common
    likely = [dtype for dtype in map(tracing.canonical_dtype, _USUAL) if _allows(option, dtype)]
    if own or not likely:
      raise GateDefinitionError(
        f"{self._label}: the annotation of the result, {_text(option)}, leaves the dtype open; "
        "use one with a single dtype (such as Float32), or out="
      )
    return likely[0]


def _arrays(annotation: Any) -> Sequence[Any]:
  """Returns jaxtyping's array types in an annotation, also in a union; () for others."""
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    found = [_arrays(part) for part in typing.get_args(annotation)]
    return [one for part in found for one in part] if all(found) else []
  is_one = isinstance(annotation, type) and hasattr(annotation, "dim_str")
  return [annotation] if is_one and hasattr(annotation, "dtypes") else []


def _is_key(option: Any) -> bool:
  return option.dtypes == ("prng_key",)


def _is_key_type(dtype: Any) -> bool:
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _allows(option: Any, dtype: Any) -> bool:
  listed = option.dtypes
  name = "prng_key" if _is_key_type(dtype) else np.dtype(dtype).name
  return not isinstance(listed, (tuple, list)) or name in listed


def _text(option: Any) -> str:
  return f"{option.__name__.split('[')[0]}[{option.dim_str!r}]"


def _matches(dims: Sequence[str], shape: Sequence[Any], sizes: dict[str, Any]) -> bool:
  """Returns True if a shape has these dimensions; adds the sizes of new names to `sizes`."""
  several = [i for i, dim in enumerate(dims) if dim.startswith(("*", "#*")) or dim == "..."]
  if not several:
    return len(dims) == len(shape) and all(
      _match(dim, size, sizes) for dim, size in zip(dims, shape, strict=True)
    )
  at, rest = several[0], len(dims) - several[0] - 1
  if len(shape) < at + rest:
    return False
  middle = tuple(shape[at : len(shape) - rest])
  before = zip(dims[:at], shape, strict=False)
  after = zip(dims[at + 1 :], shape[len(shape) - rest :], strict=True)
  if not all(_match(dim, size, sizes) for dim, size in [*before, *after]):
    return False
  name = dims[at].lstrip("*#")
  if dims[at] == "..." or name == "_":
    return True
  if name not in sizes:
    sizes[name] = middle
  return "#" in dims[at] or sizes[name] == middle


def _match(dim: str, size: Any, sizes: dict[str, Any]) -> bool:
  """Returns True if a dimension may have a size; adds the size of a new name to `sizes`."""
  name = dim.lstrip("#")
  if name.startswith("_") or ("#" in dim and size == 1):
    return True
  if _NAME.match(name):
    sizes.setdefault(name, size)
  known = _size(name, sizes)
  return known is None or bool(known == size)  # an expression of later names


def _size(dim: str, sizes: Mapping[str, Any]) -> Any:
  """Returns a dimension's size, a tuple for `*name`; None if names in it have no size yet."""
  text = dim.lstrip("#*").rpartition("=")[2].replace("{", "(").replace("}", ")")
  if text == "...":
    return None
  try:
    return eval(text, {"__builtins__": {}}, dict(sizes))  # the user's own annotation
  except (NameError, SyntaxError, TypeError):
    return None
