"""Static values of kernels' calls: numbers, strings, arrays of numbers, dictionaries.

They are frozen, so that they are hashable, while a call is traced; a program holds them as FFI
attributes, and the runtime hands them to the kernel as include/callgate/kernel.h says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from callgate.errors import GateDefinitionError


class FrozenDict(dict[str, Any]):
  """A dictionary attribute; hashable, and not to be changed."""

  def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
    return hash(tuple(sorted(self.items())))


def number(label: str, name: str, value: Any, dtype: np.dtype[Any]) -> Any:
  """A number attribute of the declared dtype, exactly."""
  try:
    array = np.asarray(value)
    converted = array.astype(dtype)
    exact = array.ndim == 0 and array.dtype.kind in "biufc" and _same(array, converted)
  except (TypeError, ValueError, OverflowError):
    exact, converted = False, None
  if not exact or converted is None:
    raise GateDefinitionError(
      f"{label}: attribute '{name}': expected a number that {dtype.name} holds, got {value!r}"
    )
  return converted[()]


def numbers(label: str, name: str, value: Any, dtype: np.dtype[Any]) -> tuple[Any, ...]:
  """An array attribute of the declared dtype."""
  array = np.asarray(value) if not isinstance(value, (str, bytes)) else None
  if array is None or array.ndim != 1:
    raise GateDefinitionError(
      f"{label}: attribute '{name}': expected a one-dimensional array of numbers, got {value!r}"
    )
  return tuple(number(label, name, element, dtype) for element in array)


def string(label: str, name: str, value: Any) -> str:
  """A string attribute."""
  if not isinstance(value, str):
    raise GateDefinitionError(f"{label}: attribute '{name}': expected a string, got {value!r}")
  return value


def dictionary(label: str, name: str, value: Any) -> FrozenDict:
  """A dictionary attribute; its values keep their own types."""
  if not isinstance(value, Mapping):
    raise GateDefinitionError(f"{label}: attribute '{name}': expected a dict, got {value!r}")
  entries = cast("Mapping[Any, Any]", value)
  return FrozenDict({str(key): _entry(label, f"{name}.{key}", entries[key]) for key in entries})


def _entry(label: str, name: str, value: Any) -> Any:
  if isinstance(value, (str, FrozenDict)):
    return value
  if isinstance(value, Mapping):
    return dictionary(label, name, value)
  array = np.asarray(value)
  if array.dtype.kind not in "biufc" or array.ndim > 1:
    raise GateDefinitionError(
      f"{label}: attribute '{name}': expected a number, a string, an array of numbers or a dict, "
      f"got {value!r}"
    )
  return array[()] if array.ndim == 0 else tuple(array)


def _same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
  if a.dtype.kind == "f" and b.dtype.kind in "fc":
    return True  # rounded to the parameter's precision, as in C++
  return bool(a == b)


def for_program(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """A frozen value as a program's FFI attribute."""
  return _converted(value, dtype, scalars=True)


def for_runtime(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """A frozen value as the runtime's bindings take it: numbers are NumPy arrays of rank 0."""
  return _converted(value, dtype, scalars=False)


def _converted(value: Any, dtype: np.dtype[Any] | None, *, scalars: bool) -> Any:
  if isinstance(value, str):
    return value
  if isinstance(value, dict):
    entries = cast("dict[str, Any]", value)
    return {key: _converted(entries[key], None, scalars=scalars) for key in sorted(entries)}
  if isinstance(value, tuple):
    items = cast("tuple[Any, ...]", value)
    return np.array(items, dtype if dtype is not None else (None if items else np.int64))
  return value if scalars else np.asarray(value)
