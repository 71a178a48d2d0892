"""What callgate reads in CUDA source before the compiler does: kernels and their parameters.

How a kernel's parameters are filled in follows from their types as they are written: pointers and
callgate's views are arrays, everything else is a number by value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel import source as _source
from callgate._kernel.source import TemplateParameter

Role = Literal["in", "out", "inout", "number", "scratch"]
# CUDA's names of element types, and the dtypes that they stand for.
_DTYPES = {
  "bool": "bool",
  "char": "int8",
  "signed char": "int8",
  "int8_t": "int8",
  "unsigned char": "uint8",
  "uint8_t": "uint8",
  "short": "int16",
  "short int": "int16",
  "int16_t": "int16",
  "unsigned short": "uint16",
  "unsigned short int": "uint16",
  "uint16_t": "uint16",
  "int": "int32",
  "signed int": "int32",
  "int32_t": "int32",
  "unsigned": "uint32",
  "unsigned int": "uint32",
  "uint32_t": "uint32",
  "long": "int64",
  "long int": "int64",
  "long long": "int64",
  "long long int": "int64",
  "int64_t": "int64",
  "ptrdiff_t": "int64",
  "unsigned long": "uint64",
  "unsigned long int": "uint64",
  "unsigned long long": "uint64",
  "unsigned long long int": "uint64",
  "uint64_t": "uint64",
  "size_t": "uint64",
  "float": "float32",
  "double": "float64",
  "half": "float16",
  "__half": "float16",
  "cg::float16": "float16",
  "nv_bfloat16": "bfloat16",
  "__nv_bfloat16": "bfloat16",
  "cg::bfloat16": "bfloat16",
  "__nv_fp8_e4m3": "float8_e4m3fn",
  "cg::float8_e4m3fn": "float8_e4m3fn",
  "__nv_fp8_e5m2": "float8_e5m2",
  "cg::float8_e5m2": "float8_e5m2",
  "float2": "complex64",
  "cuComplex": "complex64",
  "cuFloatComplex": "complex64",
  "double2": "complex128",
  "cuDoubleComplex": "complex128",
}
# The type of a template argument for each dtype.
_TYPES = {
  "bool": "bool",
  **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
  "float16": "__half",
  "bfloat16": "__nv_bfloat16",
  "float32": "float",
  "float64": "double",
  "float8_e4m3fn": "__nv_fp8_e4m3",
  "float8_e5m2": "__nv_fp8_e5m2",
  "complex64": "float2",
  "complex128": "double2",
}
_VIEWS: Mapping[str, Role] = {"In": "in", "Out": "out", "InOut": "inout"}
_ATTRIBUTE = re.compile(
  r"__(?:launch_bounds|cluster_dims|maxnreg|block_size)__\s*\((?:[^()]|\([^()]*\))*\)"
  r"|__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|\[\[.*?\]\]",
  re.DOTALL,
)
_KERNEL = re.compile(
  r"(?:\b__global__\b(?:\s|\b(?:static|inline|extern|__inline__|__forceinline__)\b)*\bvoid\b"
  r"|\bvoid\s+__global__\b)\s*(\w+)\s*\("
)
_QUALIFIERS = re.compile(
  r"\b(?:const|volatile|__restrict__|__restrict|restrict|__grid_constant__)\b"
)
_VIEW = re.compile(r"^(?:::)?\s*(?:(?:cg|callgate)\s*::\s*)?(In|Out|InOut)\s*<(.*)>$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class CudaParameter:
  """A kernel's parameter.

  Attributes:
    name: of the parameter; its position where the source gives none.
    role: what it takes.
    element: the text of its type, without pointer and qualifiers.
    rank: the text of a view's rank; "" for what is no view.
  """

  name: str
  role: Role
  element: str
  rank: str = ""

  @property
  def is_view(self) -> bool:
    return self.rank != ""


@dataclasses.dataclass(frozen=True)
class CudaFunction:
  """A `__global__` function of a source.

  Attributes:
    name: of the function.
    qualified: with its namespaces.
    template: its template's parameters.
    bound: template arguments that the user gave, "float", by parameter.
    parameters: in order.
  """

  name: str
  qualified: str
  template: tuple[TemplateParameter, ...]
  bound: Mapping[str, str]
  parameters: tuple[CudaParameter, ...]


def element_dtype(text: str) -> np.dtype[Any] | None:
  """The dtype of an element type; None for one that is no array's, or a template's."""
  plain = " ".join(text.replace("callgate::", "cg::").replace("std::", "").split())
  known = _DTYPES.get(plain.replace(" ::", "::").replace(":: ", "::"))
  return None if known is None else dtype_named(known)


def dtype_by_name(value: Any) -> np.dtype[Any]:
  """The dtype that a dtype, a scalar type or a name stands for; raises TypeError."""
  return dtype_named(value) if isinstance(value, str) else np.dtype(value)


def cuda_type(dtype: np.dtype[Any]) -> str:
  """CUDA's type of a dtype's elements; "" for one that it doesn't have."""
  return _TYPES.get(np.dtype(dtype).name, "")


def find(label: str, source: str, kernel: str | None) -> CudaFunction:
  """The kernel of that name, which may have template arguments, or the source's only one.

  Args:
    label: for messages.
    source: CUDA C++.
    kernel: "scale", "ns::scale" or "scale<float, 4>"; None for the only one.
  """
  text = _ATTRIBUTE.sub(_source.blank, _source.without_comments(source))
  name, _, arguments = (kernel or "").partition("<")
  name = name.strip()
  found = [
    function
    for match in _KERNEL.finditer(text)
    if (function := _function(text, match)) is not None
    and (not name or f"::{function.qualified}".endswith(f"::{name.removeprefix('::')}"))
  ]
  if len(found) != 1:
    raise _not_one(label, name, [f.qualified for f in found])
  function = found[0]
  if arguments:
    given = _source.split_arguments(arguments.rstrip().removesuffix(">"))
    function = _bind(label, function, given)
  return function


def _not_one(label: str, name: str, found: list[str]) -> GateDefinitionError:
  if name:
    return GateDefinitionError(
      f"{label}: expected one kernel `__global__ void {name}(...)` in the source, found "
      f"{len(found) or 'none'}"
    )
  if not found:
    return GateDefinitionError(
      f"{label}: expected a kernel `__global__ void name(const float* x, float* y) {{ ... }}` in "
      "the source, found none"
    )
  return GateDefinitionError(
    f"{label}: expected kernel=, since the source has several: {', '.join(found)}"
  )


def _bind(label: str, function: CudaFunction, given: list[str]) -> CudaFunction:
  if len(given) > len(function.template):
    raise GateDefinitionError(
      f"{label}: expected at most {len(function.template)} template arguments "
      f"({', '.join(p.name for p in function.template)}), got {len(given)}"
    )
  bound = {p.name: value for p, value in zip(function.template, given, strict=False)}
  return dataclasses.replace(function, bound=bound)


def _function(text: str, match: re.Match[str]) -> CudaFunction | None:
  """The definition at a match; None for a declaration."""
  end = _source.closing(text, match.end() - 1)
  if end < 0 or not text[end + 1 :].lstrip().startswith("{"):
    return None
  before = text[: match.start()]
  parts = _source.split_arguments(text[match.end() : end])
  parts = [] if parts == ["void"] else parts
  return CudaFunction(
    match.group(1),
    "::".join([*_source.scopes(before), match.group(1)]),
    _source.template(before),
    {},
    tuple(_parameter(i, part) for i, part in enumerate(parts)),
  )


def _parameter(index: int, text: str) -> CudaParameter:
  text = text.split("=", 1)[0].strip()
  array = re.search(r"\[\s*\w*\s*\]$", text)
  if array is not None:  # `float x[]` is a pointer
    declared = re.search(r"(\w+)$", text[: array.start()].rstrip())
    assert declared is not None
    start = declared.start()
    text = f"{text[:start]}* {declared.group(1)}"
  match = re.search(r"(\w+)$", text)
  name, kind = (match.group(1), text[: match.start()].strip()) if match else ("", text)
  if match and (not kind or _is_type_word(name)):
    name, kind = "", text
  pointee, star, _ = kind.rpartition("*")
  if star:
    element = " ".join(_QUALIFIERS.sub(" ", pointee).split())
    role: Role = "in" if re.search(r"\bconst\b", pointee) else "out"
    return CudaParameter(name or str(index), role, element)
  plain = " ".join(_QUALIFIERS.sub(" ", kind).split())
  view = _VIEW.match(plain)
  if view is None:
    return CudaParameter(name or str(index), "number", plain)
  arguments = _source.split_arguments(view.group(2))
  rank = arguments[1] if len(arguments) > 1 else "?"
  return CudaParameter(name or str(index), _VIEWS[view.group(1)], arguments[0], rank)


def _is_type_word(word: str) -> bool:
  return word in ("int", "char", "short", "long", "float", "double", "bool", "unsigned")
