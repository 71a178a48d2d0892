"""C's types and declarations, as far as `callgate.cfunc` reads them.

`parse` reads one declaration, `double norm(int n, const double *x)`; the function's and the
parameters' names may be left out. Cython's names of types, which capsules of its modules hold, are
known. What no array can hold (structs, functions, pointers to pointers) is opaque: it is passed as
an address alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any

import numpy as np

from callgate._core.errors import GateDefinitionError

_QUALIFIERS = {"const", "volatile", "restrict", "__restrict", "__restrict__"}
_NOT_OF_TYPES = {*_QUALIFIERS, "extern", "static", "inline", "register", "noexcept", "nogil"}
_INTEGERS = {"char", "short", "int", "long", "signed", "unsigned"}
_WORDS = _INTEGERS | {"void", "float", "double", "bool", "_Bool", "complex", "_Complex"}
_64 = ("ssize_t", "ptrdiff_t", "intptr_t", "Py_ssize_t", "Py_hash_t", "npy_intp")
# By their words in alphabetical order.
_NAMED = {
  "bool": "bool",
  "_Bool": "bool",
  "_Float16": "float16",
  "float": "float32",
  "double": "float64",
  "size_t": "uint64",
  "uintptr_t": "uint64",
  **dict.fromkeys(("complex float", "_Complex float", "__pyx_t_float_complex"), "complex64"),
  **dict.fromkeys(("complex double", "_Complex double", "__pyx_t_double_complex"), "complex128"),
  **{f"{kind}{bits}_t": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
  **dict.fromkeys(_64, "int64"),
}
# Cython writes its typedefs with the module they are from: `d` of scipy.linalg.cython_lapack is
# __pyx_t_5scipy_6linalg_13cython_lapack_d.
_LAPACK = re.compile(r"__pyx_t_\w+cython_(?:lapack|blas)_([sdcz])")
_LETTERS = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
_NUMPY = re.compile(r"(?:__pyx_t_5numpy_|npy_)(\w+?)(?:_t)?")
_CPP = {
  "bool": "bool",
  "float16": "_Float16",
  "float32": "float",
  "float64": "double",
  "complex64": "float _Complex",
  "complex128": "double _Complex",
}
# Cython's own last parameters: whether to skip an override in Python, and optional arguments.
_HIDDEN = {"__pyx_skip_dispatch": "0", "__pyx_optional_args": "nullptr"}


@dataclasses.dataclass(frozen=True)
class CType:
  """A type of C."""

  text: str  # as C writes it, for messages
  # Of the value, or of what a pointer points to; None for void and what no array can hold.
  dtype: np.dtype[Any] | None = None
  pointer: bool = False
  const: bool = False  # whether what it points to is const
  opaque: bool = False  # True for what can only be passed as an address

  @property
  def is_void(self) -> bool:
    return self.dtype is None and not self.pointer

  @property
  def is_integer(self) -> bool:
    return self.dtype is not None and self.dtype.kind in "iu"

  @property
  def element(self) -> str:
    """C++'s spelling of the value, or of what a pointer points to."""
    return "void" if self.dtype is None else c_name(self.dtype)

  @property
  def cpp(self) -> str:
    """C++'s spelling of the type."""
    return f"{self.element} *" if self.pointer else self.element


@dataclasses.dataclass(frozen=True)
class CParameter:
  """A parameter of a C function."""

  type: CType
  name: str = ""  # in the declaration; "" without one
  fixed: str = ""  # what is always passed, in C++; "" for what the caller passes


@dataclasses.dataclass(frozen=True)
class Declaration:
  """A C function's type."""

  name: str  # "" where it is not known
  result: CType
  all_parameters: tuple[CParameter, ...]  # those of Cython's own included

  @property
  def parameters(self) -> tuple[CParameter, ...]:
    """What a caller passes."""
    return tuple(p for p in self.all_parameters if not p.fixed)

  def __str__(self) -> str:
    def named(text: str, name: str) -> str:
      return f"{text}{'' if text.endswith('*') else ' '}{name}"

    types = [(p.type.text, p.name) for p in self.parameters]
    given = [named(*each) if each[1] and "(" not in each[0] else each[0] for each in types]
    return f"{named(self.result.text, self.name)}({', '.join(given) or 'void'})"


def c_name(dtype: np.dtype[Any]) -> str:
  """C++'s name of a value as C passes it."""
  return _CPP.get(dtype.name, f"{dtype.name}_t")


def parse(text: str) -> Declaration:
  """Reads a declaration of a function with a fixed number of arguments."""
  text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).strip().rstrip(";").strip()
  opening = text.find("(")
  if opening < 0 or not text.endswith(")"):
    raise GateDefinitionError(
      f"expected a C declaration such as 'double norm(int n, const double *x)', got {text!r}"
    )
  result = _parameter(text[:opening].strip())
  inside = split(text[opening + 1 : -1])
  if inside == ["void"]:
    inside = []
  if "..." in inside:
    raise GateDefinitionError(f"{text!r}: functions with '...' can't be called")
  return Declaration(result.name, result.type, tuple(_parameter(part) for part in inside))


def split(text: str) -> list[str]:
  """Parts between commas that are in no brackets and no quotes."""
  parts, depth, quote = [""], 0, ""
  for char in text:
    if quote:
      quote = "" if char == quote else quote
    elif char in "'\"":
      quote = char
    elif char == "," and depth == 0:
      parts.append("")
      continue
    depth += 0 if quote else (char in "([") - (char in ")]")
    parts[-1] += char
  return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> CParameter:
  """A type with or without a name; the function's own, or a parameter's."""
  function = re.search(r"\(\s*\*\s*(\w*)\s*\)\s*\(", text)
  if function:
    return CParameter(CType(text, pointer=True, opaque=True), function.group(1))
  array = re.search(r"\[[^\]]*\]\s*$", text)
  words = re.findall(r"\w+|\*", text[: array.start()] if array else text)
  stars = words.count("*") + (array is not None)
  name, kind = "", list[str]()
  tags = ("struct", "enum", "union")
  for word in words:
    if word == "*" or word in _NOT_OF_TYPES:
      continue
    if word in _WORDS or word in tags or not kind or kind[-1] in tags:
      kind.append(word)
    else:
      name = word
  if not kind or re.search(r"[^\w\s*\[\]]", text):
    raise GateDefinitionError(f"expected a C type, got {text!r}")
  spelled = text[: array.start()].strip() if array else text
  if name:
    spelled = re.sub(rf"\b{re.escape(name)}$", "", spelled).strip()
  spelled += " *" if array else ""
  fixed = _HIDDEN.get(name, "")
  return CParameter(_type(" ".join(kind), stars, spelled, "const" in words), name, fixed)


def _type(kind: str, stars: int, text: str, const: bool) -> CType:
  dtype = _dtype(kind)
  if dtype is not None and "__pyx" in kind:  # as C writes it
    text = text.replace(kind, c_name(dtype).replace("_C", "c"))
  if stars > 1:
    return CType(text, pointer=True, opaque=True)
  if kind == "void":
    return CType(text, pointer=stars == 1, const=const)
  if dtype is None and stars == 0:
    raise GateDefinitionError(
      f"{text!r}: no array has elements of that type, so it can't be passed or returned by value; "
      "expected C's numbers (char to long long, float, double, their complex kinds, bool) or a "
      "pointer"
    )
  return CType(text, dtype, stars == 1, const, opaque=dtype is None)


def _dtype(kind: str) -> np.dtype[Any] | None:
  """The dtype of a type's words; None where no array has it."""
  words = kind.split()
  if words[0] == "enum":
    return np.dtype(np.int32)
  if words[0] in ("struct", "union"):
    return None
  if set(words) <= _INTEGERS:
    size = ctypes.c_int
    if "char" in words or "short" in words:
      size = ctypes.c_byte if "char" in words else ctypes.c_short
    elif "long" in words:
      size = ctypes.c_long if words.count("long") == 1 else ctypes.c_longlong
    return np.dtype(f"{'u' if 'unsigned' in words else ''}int{8 * ctypes.sizeof(size)}")
  if known := _NAMED.get(" ".join(sorted(words))):
    return np.dtype(known)
  if match := _LAPACK.fullmatch(kind):
    return np.dtype(_LETTERS[match.group(1)])
  if (match := _NUMPY.fullmatch(kind)) and match.group(1) in np.sctypeDict:
    return np.dtype(np.sctypeDict[match.group(1)])
  return None
