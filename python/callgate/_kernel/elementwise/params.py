# SPDX-License-Identifier: Apache-2.0
"""The parameters of `callgate.elementwise`, "T x, raw float32 y", and their values in a call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import static_values
from callgate._core.dtypes import dtype_code, dtype_named, is_packed, type_text
from callgate._core.errors import GateDefinitionError
from callgate._core.masked import shown

Bindings = Mapping[str, np.dtype[Any]]  # from a letter to its dtype in a call
_PACKED = "{} has several elements in a byte, which kernels don't support"
_LETTER = re.compile(r"[A-Z][0-9]*")
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
# Types with different sizes in C and NumPy.
_UNCLEAR = {
  "float": "float32 or float64", "complex": "complex64 or complex128",
  "int": "int32 or int64", "long": "int32 or int64", "uint": "uint32 or uint64",
}  # fmt: skip
_KEYWORDS = """
  alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
  char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
  constinit continue decltype default delete do double dynamic_cast else enum explicit export
  extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
  nullptr operator or or_eq private protected public register reinterpret_cast requires return
  short signed sizeof static static_assert static_cast struct switch template this thread_local
  throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
  xor xor_eq
"""


@dataclasses.dataclass(frozen=True)
class Param:
  name: str  # its name in the element's code
  type: str  # a dtype's name, or a letter
  raw: bool = False  # True if the code indexes the whole array itself

  @property
  def own_dtype(self) -> np.dtype[Any] | None:
    """Its dtype in all calls; None for a letter."""
    return None if is_letter(self.type) else dtype_named(self.type)

  def dtype(self, bindings: Bindings) -> np.dtype[Any]:
    return self.own_dtype or bindings[self.type]


def is_letter(name: str) -> bool:
  return _LETTER.fullmatch(name) is not None


def parse(label: str, option: str, text: str) -> tuple[Param, ...]:
  """Reads the parameters of a text such as "T x, raw float32 y"."""
  found: list[Param] = []
  for words in map(str.split, text.split(",") if text.strip() else ()):
    if fault := _fault(option, words):
      raise GateDefinitionError(f"{label}: {option}: '{' '.join(words)}': {fault}")
    *qualifiers, kind, name = words
    found.append(Param(name, kind, "raw" in qualifiers))
  return tuple(found)


def _fault(option: str, words: list[str]) -> str | None:
  if len(words) < 2 or not {"raw", "const"}.issuperset(words[:-2]):
    return "expected a type and a name, such as 'T x', 'float32 x' or 'raw T x'"
  *qualifiers, kind, name = words
  reserved = name in _KEYWORDS.split()
  if reserved or not _NAME.fullmatch(name):
    what = "a name of letters, digits and underscores that begins with a letter"
    why = "is a C++ keyword" if reserved else "is not one"
    return f"expected {what}; '{name}' {why}"
  if name in ("i", "n"):
    return "expected another name: 'i' is the element's index and 'n' their number"
  if "raw" in qualifiers and option == "out_params":
    why = "each result's element is written at its own index"
    return f"expected no raw result: {why}; use callgate.cpp to write anywhere"
  if is_letter(kind):
    return None
  if kind in _UNCLEAR:
    return f"'{kind}' is ambiguous; use {_UNCLEAR[kind]}"
  try:
    dtype_code(dtype_named(kind))
  except (TypeError, GateDefinitionError):
    what = "a dtype's name, such as float32, or a letter, such as T, that stands for any dtype"
    return f"expected {what}; got '{kind}'"
  return _PACKED.format(kind) if is_packed(kind) else None


def convert(
  label: str, inputs: Sequence[Param], values: Sequence[Any], given: Bindings
) -> list[Any]:
  """Returns a call's arguments as arrays of the parameters' dtypes; `given` has letters' dtypes."""
  arrays = [_as_array(label, p, v) for p, v in zip(inputs, values, strict=True)]
  bindings = bind(label, inputs, [None if _is_weak(v) else v for v in arrays], given)
  for letter in {p.type for p in inputs if is_letter(p.type)} - bindings.keys():
    weak = [v for p, v in zip(inputs, arrays, strict=True) if p.type == letter]
    bindings[letter] = np.dtype(jnp.result_type(*weak))
  return [
    _weak_as(label, param, value, param.dtype(bindings)) if _is_weak(value) else value
    for param, value in zip(inputs, arrays, strict=True)
  ]


def bind(
  label: str, inputs: Sequence[Param], values: Sequence[Any], given: Bindings
) -> dict[str, np.dtype[Any]]:
  """Returns the letters' dtypes, from keywords and from the arguments that are not None."""
  bound = {name: (dtype, f"{name}={dtype.name}") for name, dtype in given.items()}
  pairs = zip(inputs, values, strict=True)
  for param, value in (pair for pair in pairs if pair[1] is not None):
    dtype, text = np.dtype(value.dtype), type_text(value.dtype, value.shape)
    own, what = param.own_dtype, f"argument '{param.name}'"
    if own not in (None, dtype):
      raise GateDefinitionError(f"{label}: {what}: expected {param.type}, got {text}")
    if own is None:
      known, first = bound.setdefault(param.type, (dtype, f"{what} is {text}"))
      if known != dtype:
        fault = f"expected one dtype for {param.type}, got two: {first}, but {what} is {text}"
        raise GateDefinitionError(f"{label}: {fault}")
      if is_packed(dtype):
        fault = f"{what}: {_PACKED.format(dtype.name)}; convert to int8 before the call"
        raise GateDefinitionError(f"{label}: {fault}")
  return {letter: dtype for letter, (dtype, _) in bound.items()}


def _is_literal(value: Any) -> bool:
  return type(value) in (bool, int, float, complex)


def _is_weak(value: Any) -> bool:
  return _is_literal(value) or bool(getattr(value, "weak_type", False))


def _as_array(label: str, param: Param, value: Any) -> Any:
  if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(value)
  if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or _is_literal(value):
    return value
  try:
    return jnp.asarray(value)
  except (TypeError, ValueError) as error:
    fault = f"argument '{param.name}': expected an array, got {shown(value)}"
    raise GateDefinitionError(f"{label}: {fault}") from error


def _weak_as(label: str, param: Param, value: Any, dtype: np.dtype[Any]) -> Any:
  text = repr(value) if _is_literal(value) else f"a weakly typed {value.dtype.name}"
  said = dtype.name if param.own_dtype else f"{param.type}, which is {dtype.name} here"
  what = f"{label}: argument '{param.name}': expected {said}"
  # Weakly typed values convert to a dtype of their own kind or a later one, as in JAX.
  kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
  have, wanted = (
    next(i for i, kind in enumerate(kinds) if jnp.issubdtype(each, kind))
    for each in (jnp.result_type(value), dtype)
  )
  if have > wanted:
    raise GateDefinitionError(f"{what}, got {text}")
  if isinstance(value, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(value.shape, dtype)
  if not _is_literal(value):
    return jnp.asarray(value, dtype)
  try:
    return jnp.asarray(static_values.in_dtype(value, dtype))
  except GateDefinitionError:
    raise GateDefinitionError(f"{what}, which can't hold {text}") from None
