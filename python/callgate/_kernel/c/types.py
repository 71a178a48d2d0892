# SPDX-License-Identifier: Apache-2.0
"""C types and declarations, as far as `callgate.cfunc` supports them.

It also knows Cython's type names, which capsules of its modules have. A type that no array can hold
(structs, functions, pointers to pointers) is opaque: its value is passed only as an address.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from callgate._core.errors import GateDefinitionError
from callgate._kernel.source import INTEGERS, element_dtype, split_arguments

_QUALIFIERS = {"const", "volatile", "restrict", "__restrict", "__restrict__"}
_NOT_OF_TYPES = {*_QUALIFIERS, "extern", "static", "inline", "register", "noexcept", "nogil"}
_WORDS = INTEGERS | {"void", "float", "double", "bool", "_Bool", "complex", "_Complex"}
# The types by their words in alphabetical order.
_NAMED = (
  {"bool": "bool", "_Bool": "bool", "_Float16": "float16", "float": "float32", "double": "float64"}
  | dict.fromkeys(("complex float", "_Complex float", "__pyx_t_float_complex"), "complex64")
  | dict.fromkeys(("complex double", "_Complex double", "__pyx_t_double_complex"), "complex128")
  | {f"{kind}{bits}_t": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
  | dict.fromkeys(("size_t", "uintptr_t"), "uint64")
  | dict.fromkeys(("ssize_t", "ptrdiff_t", "intptr_t", "npy_intp"), "int64")
  | dict.fromkeys(("Py_ssize_t", "Py_hash_t"), "int64")
)
# Cython's typedefs contain their module: `d` of scipy.linalg.cython_lapack is
# __pyx_t_5scipy_6linalg_13cython_lapack_d.
_LAPACK = re.compile(r"__pyx_t_\w+cython_(?:lapack|blas)_([sdcz])")
_LETTERS = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
_NUMPY = re.compile(r"(?:__pyx_t_5numpy_|npy_)(\w+?)(?:_t)?")
_CPP = {"bool": "bool", "float16": "_Float16", "float32": "float", "float64": "double"} | {
  "complex64": "float _Complex",
  "complex128": "double _Complex",
}
# Cython's additional parameters: a flag that skips an override in Python, and optional arguments.
_HIDDEN = {"__pyx_skip_dispatch": "0", "__pyx_optional_args": "nullptr"}


class CType(NamedTuple):
  text: str  # its C text, for messages
  # The dtype of the value, or of a pointer's target; None for void and types that no array can
  # hold.
  dtype: np.dtype[Any] | None = None
  pointer: bool = False
  const: bool = False  # True if its target is const
  opaque: bool = False  # True if it can only be passed as an address

  @property
  def limits(self) -> Any:
    """NumPy's limits of an integer type; None for other types."""
    return np.iinfo(self.dtype) if self.dtype is not None and self.dtype.kind in "iu" else None

  @property
  def element(self) -> str:
    """The C++ spelling of the value, or of a pointer's target."""
    return "void" if self.dtype is None else _c_name(self.dtype)

  @property
  def cpp(self) -> str:
    """The C++ spelling of the type."""
    return f"{self.element} *" if self.pointer else self.element


class CParameter(NamedTuple):
  type: CType
  name: str = ""  # its name in the declaration; "" without one
  fixed: str = ""  # the C++ of a constant argument; "" if the caller passes it


class Declaration(NamedTuple):
  """A C function's type."""

  name: str  # "" if unknown
  result: CType
  all_parameters: tuple[CParameter, ...]  # including Cython's own

  @property
  def parameters(self) -> tuple[CParameter, ...]:
    """The parameters that a caller passes."""
    return tuple(p for p in self.all_parameters if not p.fixed)

  def __str__(self) -> str:
    def named(text: str, name: str) -> str:
      return f"{text}{'' if text.endswith('*') else ' '}{name}"

    given = (
      named(p.type.text, p.name) if p.name and "(" not in p.type.text else p.type.text
      for p in self.parameters
    )
    return f"{named(self.result.text, self.name)}({', '.join(given) or 'void'})"


def _c_name(dtype: np.dtype[Any]) -> str:
  return _CPP.get(dtype.name, f"{dtype.name}_t")


def parse(text: str) -> Declaration:
  """Reads a declaration of a function with a fixed number of arguments."""
  text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).strip().rstrip(";").strip()
  opening = text.find("(")
  if opening < 0 or not text.endswith(")"):
    raise GateDefinitionError(
      "signature: expected a C declaration such as 'double norm(int n, const double *x)', got "
      f"{text!r}"
    )
  result = _parameter(text[:opening].strip())
  inside = split_arguments(text[opening + 1 : -1])
  if "..." in inside:
    raise GateDefinitionError(
      f"{text!r}: variadic functions ('...') can't be called; call it in a C function with fixed "
      "arguments"
    )
  parameters = () if inside == ["void"] else tuple(map(_parameter, inside))
  return Declaration(result.name, result.type, parameters)


def _parameter(text: str) -> CParameter:
  """Reads a type with or without a name, of the function or of a parameter."""
  if function := re.search(r"\(\s*\*\s*(\w*)\s*\)\s*\(", text):
    return CParameter(CType(text, pointer=True, opaque=True), function[1])
  bare = re.sub(r"\[[^\]]*\]\s*$", "", text)
  is_array = bare != text
  words = re.findall(r"\w+|\*", bare)
  stars = words.count("*") + is_array
  name, kinds, tags = "", list[str](), ("struct", "enum", "union")
  for word in words:
    if word == "*" or word in _NOT_OF_TYPES:
      continue
    if word in _WORDS or word in tags or not kinds or kinds[-1] in tags:
      kinds.append(word)
    else:
      name = word
  if not kinds or re.search(r"[^\w\s*\[\]]", text):
    raise GateDefinitionError(f"signature: expected a C type, got {text!r}")
  spelled = bare.strip().removesuffix(name).strip() + (" *" if is_array else "")
  kind = " ".join(kinds)
  dtype = _dtype(kind)
  if dtype is not None and "__pyx" in kind:  # its C text
    spelled = spelled.replace(kind, _c_name(dtype).replace("_C", "c"))
  if stars == 0 and dtype is None and kind != "void":
    fault = "arrays can't have elements of that type, so it can't be passed or returned by value"
    kinds = "a number (char to long long, float, double, complex, bool) or a pointer"
    raise GateDefinitionError(f"{spelled!r}: {fault}; expected {kinds}")
  opaque, const = stars > 1 or (dtype is None and kind != "void"), "const" in words and stars < 2
  found = CType(spelled, None if opaque else dtype, stars > 0, const, opaque)
  return CParameter(found, name, _HIDDEN.get(name, ""))


def _dtype(kind: str) -> np.dtype[Any] | None:
  """Returns the dtype of a type's words; None if no array has it."""
  words = kind.split()
  if words[0] == "enum":
    return np.dtype(np.int32)
  if words[0] in ("struct", "union"):
    return None
  if (known := element_dtype(" ".join(sorted(words)), _NAMED)) is not None:
    return known
  if match := _LAPACK.fullmatch(kind):
    return np.dtype(_LETTERS[match[1]])
  if (match := _NUMPY.fullmatch(kind)) and match[1] in np.sctypeDict:
    return np.dtype(np.sctypeDict[match[1]])
  return None
