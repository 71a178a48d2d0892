"""Static values of Numba kernels' calls, and the text that programs hold of a variant's types."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np

from callgate.errors import GateDefinitionError
from callgate.kernel import Type


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
  return tuple((np.dtype(getattr(ml_dtypes, d, d)), int(rank)) for d, rank in pairs)
