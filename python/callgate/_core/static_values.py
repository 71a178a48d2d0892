"""Static values of kernels' calls: numbers, strings, arrays of numbers, dictionaries.

They are frozen while a call is traced: hashable, and equal only where they are the same to the last
bit and in type, since 1, 1.0 and True, or 0.0 and -0.0, make different programs. A program holds
them as FFI attributes, and the runtime hands them to the kernel as include/callgate/kernel.h says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from jax.core import Tracer

from callgate._core.dtypes import dtype_code
from callgate._core.errors import GateDefinitionError
from callgate._core.masked import is_masked, shown


@dataclasses.dataclass(frozen=True)
class Frozen:
  """A static value of a call.

  Attributes:
    value: a NumPy scalar, a one-dimensional array, or a dict of these and of strings.
    key: what tells it from others.
  """

  value: Any = dataclasses.field(compare=False)
  key: tuple[Any, ...]

  def __repr__(self) -> str:
    return repr(self.value)


def thaw(value: Any) -> Any:
  """A static value as the user's functions get it: numbers are Python's, which promote weakly."""
  value = _raw(value)
  if isinstance(value, dict):
    entries = cast("dict[str, Any]", value)
    return {name: thaw(entry) for name, entry in entries.items()}
  return value.item() if isinstance(value, np.generic) else value


def _raw(value: Any) -> Any:
  return value.value if isinstance(value, Frozen) else value


def number(
  label: str, name: str, value: Any, dtype: np.dtype[Any] | None, what: str = "attribute"
) -> Frozen:
  """A number attribute of the declared dtype, exactly; None where it is not known yet."""
  kind = "a number" if dtype is None else f"a number that {dtype.name} holds"
  return _declared(f"{label}: {what} '{name}'", kind, value, dtype, 0)


def numbers(label: str, name: str, value: Any, dtype: np.dtype[Any] | None) -> Frozen:
  """An array attribute of the declared dtype, exactly; None where it is not known yet."""
  kind = "numbers" if dtype is None else f"numbers that {dtype.name} holds"
  kind = f"a one-dimensional array of {kind}"
  return _declared(f"{label}: attribute '{name}'", kind, value, dtype, 1)


def _declared(where: str, kind: str, value: Any, dtype: np.dtype[Any] | None, rank: int) -> Frozen:
  array = _array(value)
  if array is None or array.ndim != rank or not _fits(array, dtype):
    raise GateDefinitionError(f"{where}: expected {kind}, got {_shown(value)}")
  return _frozen(_cast(array, dtype))


def string(label: str, name: str, value: Any) -> str:
  """A string attribute."""
  if not isinstance(value, str):
    raise GateDefinitionError(
      f"{label}: attribute '{name}': expected a string, got {_shown(value)}"
    )
  return value


def dictionary(label: str, name: str, value: Any) -> Frozen:
  """A dictionary attribute; its values keep their own types."""
  value = _raw(value)
  if not isinstance(value, Mapping):
    raise GateDefinitionError(f"{label}: attribute '{name}': expected a dict, got {_shown(value)}")
  entries: dict[str, Any] = {}
  for key, entry in cast("Mapping[Any, Any]", value).items():
    if not isinstance(key, str):
      raise GateDefinitionError(
        f"{label}: attribute '{name}': expected strings as keys, got {key!r}"
      )
    entries[key] = _entry(label, f"{name}.{key}", entry)
  key = tuple((name, entries[name]) for name in sorted(entries))
  return Frozen({name: _raw(entry) for name, entry in key}, key)


def _entry(label: str, name: str, value: Any) -> Any:
  if isinstance(value, str):
    return value
  if isinstance(value, Mapping):
    return dictionary(label, name, value)
  array = _array(value)
  if array is None or array.ndim > 1:
    raise GateDefinitionError(
      f"{label}: attribute '{name}': expected a number, a string, an array of numbers or a dict, "
      f"got {_shown(value)}"
    )
  return _frozen(array)


def _array(value: Any) -> np.ndarray[Any, Any] | None:
  """The value as an array of numbers, if it is one."""
  value = _raw(value)
  if isinstance(value, (str, bytes, Mapping)):
    return None
  if is_masked(value):
    return None
  try:
    array = np.asarray(value)
  except (TypeError, ValueError, OverflowError):
    return None  # a traced array among them
  # ml_dtypes' kind is "V", but other void types have fields or no cast to float.
  known = array.dtype.kind in "biufc" or (array.dtype.kind == "V" and array.dtype.fields is None)
  return array if known and array.dtype.type is not np.void else None


def _shown(value: Any) -> str:
  if isinstance(value, Tracer):
    return (
      f"a traced array ({value}); attributes are fixed when the program is traced. An operand by "
      "value ('float a' rather than 'cg::Attr<float> a') takes arrays"
    )
  return shown(value) if is_masked(value) else repr(value)


def _fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any] | None) -> bool:
  """Whether the numbers are the same in `dtype`, but for rounding of real and complex ones."""
  if dtype is None or array.size == 0:
    return True
  if array.dtype.kind == "c" and dtype.kind != "c" and bool(np.any(array.imag != 0)):
    return False
  with np.errstate(all="ignore"):
    converted, array = (
      _cast(array, dtype),
      _cast(array, None if dtype.kind == "c" else _real(array)),
    )
    if dtype.kind in "biu":
      finite = array.dtype.kind in "biu" or bool(np.all(_finite(array)))
      return finite and bool(np.all(converted.astype(array.dtype) == array))
    # Rounded to the parameter's precision, as in C++; an overflow is no rounding.
    return bool(np.all(_finite(converted) | ~_finite(array)))


def _cast(array: np.ndarray[Any, Any], dtype: np.dtype[Any] | None) -> np.ndarray[Any, Any]:
  if dtype is None or array.dtype == dtype:
    return array
  return (array.real if array.dtype.kind == "c" and dtype.kind != "c" else array).astype(dtype)


def _real(array: np.ndarray[Any, Any]) -> np.dtype[Any]:
  return array.real.dtype if array.dtype.kind == "c" else array.dtype


def _finite(array: np.ndarray[Any, Any]) -> Any:
  return np.isfinite(array if array.dtype.kind == "c" else array.astype(np.float64))


def _frozen(array: np.ndarray[Any, Any]) -> Frozen:
  array = np.array(array)
  array.setflags(write=False)
  key = (array.dtype.name, array.ndim, array.tobytes())
  return Frozen(array[()] if array.ndim == 0 else array, key)


def for_program(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """A frozen value as a program's FFI attribute."""
  return _converted(_raw(value), dtype, scalars=True)


def for_runtime(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """A frozen value as the runtime's bindings take it: numbers are NumPy arrays of rank 0."""
  return _converted(_raw(value), dtype, scalars=False)


def _converted(value: Any, dtype: np.dtype[Any] | None, *, scalars: bool) -> Any:
  if isinstance(value, str):
    return value
  if isinstance(value, Mapping):
    entries = cast("Mapping[str, Any]", value)
    return {key: _converted(entries[key], None, scalars=scalars) for key in sorted(entries)}
  array = np.asarray(value, dtype)
  if not scalars:
    return array
  if array.dtype.name in (_IN_ARRAYS if array.ndim else _IN_SCALARS):
    return array if array.ndim else array[()]
  return {  # its bytes, which src/xla/decode.h puts together
    "callgate:dtype": np.int32(dtype_code(array.dtype)),
    f"callgate:number{'s' if array.ndim else ''}": np.frombuffer(array.tobytes(), np.uint8),
  }


# What XLA's attributes hold.
_IN_ARRAYS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {
  "float32",
  "float64",
}
_IN_SCALARS = _IN_ARRAYS | {"bool"}
