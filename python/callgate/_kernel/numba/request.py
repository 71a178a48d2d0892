"""What is to be compiled, without Numba: a variant's types, and static values as text."""

from __future__ import annotations

import types as pytypes
from typing import Any, NamedTuple, cast

import numpy as np

from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.parameters import Parameter
from callgate._kernel.variants import CallTypes, Type


def frozen(label: str, name: str, value: Any) -> Any:
  """The value, if a program can hold it."""
  try:
    to_json(value)
  except TypeError:
    raise GateDefinitionError(
      f"{label}: static value '{name}': expected a number, a string, None or a tuple of these, got "
      f"{value!r}"
    ) from None
  return value


def to_json(value: Any) -> Any:
  """A static value as a program's name of a variant holds it."""
  if isinstance(value, np.generic):
    kept = cast("Any", value)
    return {kept.dtype.name: to_json(kept.item())}
  if isinstance(value, complex):
    return {"complex": [value.real, value.imag]}
  if isinstance(value, tuple):
    return [to_json(item) for item in cast("tuple[Any, ...]", value)]
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise TypeError


def from_json(value: Any) -> Any:
  """What `to_json` was given."""
  if isinstance(value, dict):
    ((kind, held),) = cast("dict[str, Any]", value).items()
    return complex(*held) if kind == "complex" else np.dtype(kind).type(from_json(held))
  if isinstance(value, list):
    return tuple(from_json(item) for item in cast("list[Any]", value))
  return value


def types_of(text: str) -> tuple[Type, ...]:
  """Types from "float32:2,bool:0"."""
  pairs = (part.split(":") for part in text.split(",") if part)
  return tuple((dtype_named(d), int(rank)) for d, rank in pairs)


class Slot(NamedTuple):
  """What one parameter of the user's function takes."""

  # "out" (the result, or the tuple of them), "result" (a pointer to one), "operand", "rest" (a
  # tuple of operands) or "static".
  kind: str
  indices: tuple[int, ...] = ()  # of results or operands
  value: Any = None  # the static one


class Request(NamedTuple):
  """A variant to compile."""

  label: str  # the kernel, for messages
  function: pytypes.FunctionType  # the user's
  options: dict[str, Any]  # Numba's, of its compilation
  slots: tuple[Slot, ...]  # of the function's parameters, in their order
  cast: bool  # results that it returns may be cast
  # The types of its parameters where it takes pointers (a cfunc), else None.
  pointers: tuple[Any, ...] | None
  types: CallTypes  # of the call
  parameters: tuple[Parameter, ...]  # of the native function, for the runtime
