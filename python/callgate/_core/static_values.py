# SPDX-License-Identifier: Apache-2.0
"""Static values of kernels' calls: numbers, strings, arrays of numbers, dictionaries.

They are frozen during tracing: hashable, and equal only if type and bits are the same, because 1,
1.0 and True, or 0.0 and -0.0, make different programs. A program contains them as FFI attributes,
and the runtime passes them to the kernel in the form of include/callgate/kernel.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._core.dtypes import dtype_code
from callgate._core.errors import GateDefinitionError
from callgate._core.exact import Keyed
from callgate._core.masked import is_masked, shown


@dataclasses.dataclass(frozen=True)
class Frozen(Keyed):
  """A static value of a call: a NumPy scalar, an array of rank 1, or a dict of these and strings.

  `key` distinguishes it from others.
  """

  value: Any = dataclasses.field(compare=False)
  key: tuple[Any, ...]

  def __repr__(self) -> str:
    return repr(self.value)

  def exact_key(self) -> Any:
    return self.key


def thaw(value: Any) -> Any:
  """Returns a static value for the user's functions: numbers are Python's, which promote weakly."""
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
  """Returns a number attribute of the declared dtype, exactly; dtype None if not known yet."""
  return _declared(f"{label}: {what} '{name}'", "a number", value, dtype, 0)


def numbers(label: str, name: str, value: Any, dtype: np.dtype[Any] | None) -> Frozen:
  """Returns an array attribute of the declared dtype, exactly; dtype None if not known yet."""
  where = f"{label}: attribute '{name}'"
  return _declared(where, "a one-dimensional array of numbers", value, dtype, 1)


def _declared(where: str, kind: str, value: Any, dtype: np.dtype[Any] | None, rank: int) -> Frozen:
  array = _array(value)
  array = _fitting(array, dtype) if array is not None and array.ndim == rank else None
  if array is None:
    holds = "" if dtype is None else f" that {dtype.name} holds"
    raise GateDefinitionError(f"{where}: expected {kind}{holds}, got {_shown(value)}")
  return _frozen(array)


def in_dtype(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
  """Returns a number for a launch, in its parameter's dtype."""
  return np.asarray(_declared("a kernel's parameter", "a number", value, np.dtype(dtype), 0).value)


def string(label: str, name: str, value: Any) -> str:
  """Returns a string attribute."""
  if not isinstance(value, str):
    _refuse(label, name, "a string", value)
  if not _is_utf8(value):  # such as a file name from `os.fsdecode`
    _refuse(label, name, "text that can be encoded as UTF-8", value)
  return value


def _is_utf8(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def dictionary(label: str, name: str, value: Any) -> Frozen:
  """Returns a dictionary attribute; its values keep their types."""
  value = _raw(value)
  if not isinstance(value, Mapping):
    _refuse(label, name, "a dict", value)
  entries: dict[str, Any] = {}
  for key, entry in cast("Mapping[Any, Any]", value).items():
    if not isinstance(key, str):
      raise GateDefinitionError(
        f"{label}: attribute '{name}': expected strings as keys, got {key!r}"
      )
    string(label, name, key)
    entries[key] = _entry(label, f"{name}.{key}", entry)
  key = tuple((name, entries[name]) for name in sorted(entries))
  return Frozen({name: _raw(entry) for name, entry in key}, key)


def _entry(label: str, name: str, value: Any) -> Any:
  if isinstance(value, str):
    return string(label, name, value)
  if isinstance(value, Mapping):
    return dictionary(label, name, value)
  array = _array(value)
  if array is None or array.ndim > 1:
    _refuse(label, name, "a number, a string, an array of numbers or a dict", value)
  return _frozen(array)


def _refuse(label: str, name: str, expected: str, value: Any) -> NoReturn:
  raise GateDefinitionError(
    f"{label}: attribute '{name}': expected {expected}, got {_shown(value)}"
  )


def _array(value: Any) -> np.ndarray[Any, Any] | None:
  """Returns the value as an array of numbers; None if it is none."""
  value = _raw(value)
  if isinstance(value, (str, bytes, Mapping)) or is_masked(value):
    return None
  try:
    array = np.asarray(value)
    if array.dtype.kind == "f" and isinstance(value, (list, tuple)):
      numbers: list[Any] = array.tolist()
      if numbers != list(cast("Sequence[Any]", value)):  # NumPy rounded large integers
        return None
  except (TypeError, ValueError, OverflowError):
    return None  # the list contains a traced array
  # ml_dtypes' kind is "V", but other void types have fields or no cast to float.
  known = array.dtype.kind in "biufc" or (array.dtype.kind == "V" and array.dtype.fields is None)
  return array if known and array.dtype.type is not np.void else None


def _shown(value: Any) -> str:
  if isinstance(value, Tracer):
    return (
      f"a traced array ({value}); attributes are fixed when the program is traced. Pass arrays "
      "to an operand by value ('float a' instead of 'cg::Attr<float> a')"
    )
  return shown(value) if is_masked(value) else repr(value)


def _fitting(
  array: np.ndarray[Any, Any], dtype: np.dtype[Any] | None
) -> np.ndarray[Any, Any] | None:
  """Returns the numbers in `dtype`; None if they change, except by rounding of inexact numbers."""
  if dtype is None:
    return array
  if array.dtype.kind == "c" and dtype.kind != "c":
    if np.any(array.imag != 0):
      return None
    array = array.real
  limits = _limits(dtype)
  if limits is not None and not _within(array, *limits):
    return None
  with np.errstate(all="ignore"):
    converted = array.astype(dtype)
    # Rounds to the parameter's precision, as in C++; an overflow counts as a change.
    same = limits is not None or np.all(_finite(converted) | ~_finite(array))
  return converted if same else None


def _limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
  """Returns the least and the greatest integer of an integer dtype; None for other dtypes."""
  if dtype.kind == "b":
    return 0, 1
  if not jnp.issubdtype(dtype, jnp.integer):  # includes ml_dtypes
    return None
  limits = jnp.iinfo(dtype)
  return int(limits.min), int(limits.max)


def _within(array: np.ndarray[Any, Any], least: int, most: int) -> bool:
  """Returns True if all numbers are integers within these limits; a round trip can't check that."""
  if not array.size:
    return True
  if array.dtype.kind not in "biu":
    array = array.astype(np.float64)  # exact, because attributes have no wider floats
    if not np.all(np.isfinite(array)) or np.any(array != np.trunc(array)):
      return False
  return least <= int(array.min()) and int(array.max()) <= most


def _finite(array: np.ndarray[Any, Any]) -> Any:
  return np.isfinite(array if array.dtype.kind == "c" else array.astype(np.float64))


def _frozen(array: np.ndarray[Any, Any]) -> Frozen:
  array = np.array(array)
  array.setflags(write=False)
  key = (array.dtype.name, array.ndim, array.tobytes())
  return Frozen(array[()] if array.ndim == 0 else array, key)


def for_runtime(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """Returns a frozen value for the runtime's bindings: numbers are NumPy arrays of rank 0."""
  value = _raw(value)
  if isinstance(value, Mapping):
    entries = cast("Mapping[str, Any]", value)
    return {key: for_runtime(entries[key]) for key in sorted(entries)}
  return value if isinstance(value, str) else np.asarray(value, dtype)


def for_program(value: Any, dtype: np.dtype[Any] | None = None) -> Any:
  """Returns a frozen value as a program's FFI attribute."""
  held = for_runtime(value, dtype)
  if isinstance(held, str):
    return held
  if isinstance(held, dict):
    return {key: for_program(entry) for key, entry in cast("dict[str, Any]", held).items()}
  if held.dtype.name in (_IN_ARRAYS if held.ndim else _IN_SCALARS) and not _is_large(held):
    return held if held.ndim else held[()]
  return {  # its bytes, for src/xla/ffi.h
    "callgate:dtype": np.int32(dtype_code(held.dtype)),
    f"callgate:number{'s' if held.ndim else ''}": np.frombuffer(held.tobytes(), np.uint8),
  }


def _is_large(held: np.ndarray[Any, Any]) -> bool:
  """Returns True for a number that MLIR's Python bindings don't accept."""
  return held.ndim == 0 and held.dtype == np.uint64 and bool(held >= 1 << 63)


# The integer types of XLA's attributes.
_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_IN_ARRAYS = _INTEGERS | {"float32", "float64"}
_IN_SCALARS = _IN_ARRAYS | {"bool"}
