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
# CUDA's names of each dtype's elements, the one that template arguments have first.
_NAMES = {
  "bool": "bool",
  "int8": "int8_t|char|signed char",
  "uint8": "uint8_t|unsigned char",
  "int16": "int16_t|short|short int",
  "uint16": "uint16_t|unsigned short|unsigned short int",
  "int32": "int32_t|int|signed int",
  "uint32": "uint32_t|unsigned|unsigned int",
  "int64": "int64_t|long|long int|long long|long long int|ptrdiff_t",
  "uint64": "uint64_t|unsigned long|unsigned long int|unsigned long long|"
  "unsigned long long int|size_t",
  "float16": "__half|half|cg::float16",
  "bfloat16": "__nv_bfloat16|nv_bfloat16|cg::bfloat16",
  "float32": "float",
  "float64": "double",
  "float8_e4m3fn": "__nv_fp8_e4m3|cg::float8_e4m3fn",
  "float8_e5m2": "__nv_fp8_e5m2|cg::float8_e5m2",
  "complex64": "float2|cuComplex|cuFloatComplex",
  "complex128": "double2|cuDoubleComplex",
}
TYPES = {name: texts.split("|")[0] for name, texts in _NAMES.items()}
_DTYPES = {text: name for name, texts in _NAMES.items() for text in texts.split("|")}
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
_TYPE_WORDS = ("int", "char", "short", "long", "float", "double", "bool", "unsigned")
_VIEW = re.compile(r"^(?:::)?\s*(?:(?:cg|callgate)\s*::\s*)?(In|Out|InOut)\s*<(.*)>$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class CudaParameter:
  """A kernel's parameter."""

  name: str  # its position where the source gives none
  role: Role
  element: str  # the text of its type, without pointer and qualifiers
  rank: str = ""  # the text of a view's rank; "" for what is no view


@dataclasses.dataclass(frozen=True)
class CudaFunction:
  """A `__global__` function of a source."""

  name: str
  qualified: str  # with its namespaces
  template: tuple[TemplateParameter, ...]
  parameters: tuple[CudaParameter, ...]
  # Template arguments that the user gave, "float", by parameter.
  bound: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


def element_dtype(text: str) -> np.dtype[Any] | None:
  """The dtype of an element type; None for one that is no array's, or a template's."""
  plain = " ".join(text.replace("callgate::", "cg::").replace("std::", "").split())
  known = _DTYPES.get(plain.replace(" ::", "::").replace(":: ", "::"))
  return None if known is None else dtype_named(known)


def dtype_by_name(value: Any) -> np.dtype[Any]:
  """The dtype that a dtype, a scalar type or a name stands for; raises TypeError."""
  return dtype_named(value) if isinstance(value, str) else np.dtype(value)


def find(label: str, source: str, kernel: str | None) -> CudaFunction:
  """The kernel of a name ("scale", "ns::scale", "scale<float, 4>"), or the source's only one."""
  text = _ATTRIBUTE.sub(_source.blank, _source.without_comments(source))
  name, _, arguments = (kernel or "").partition("<")
  name = name.strip()
  functions = filter(None, (_function(text, match) for match in _KERNEL.finditer(text)))
  wanted = f"::{name.removeprefix('::')}" if name else ""
  found = [f for f in functions if f"::{f.qualified}".endswith(wanted)]
  if len(found) != 1:
    several = ", ".join(f.qualified for f in found)
    expected = f"kernel=, since the source has several: {several}"
    if name:
      expected = (
        f"one kernel `__global__ void {name}(...)` in the source, found {several or 'none'}"
      )
    elif not found:
      named = "`__global__ void name(const float* x, float* y) { ... }`"
      expected = f"a kernel {named} in the source, found none"
    raise GateDefinitionError(f"{label}: expected {expected}")
  (function,) = found
  given = _source.split_arguments(arguments.rstrip().removesuffix(">"))
  if len(given) > len(function.template):
    most = f"{len(function.template)} ({', '.join(p.name for p in function.template)})"
    raise GateDefinitionError(
      f"{label}: expected template arguments, at most {most}; got {len(given)}"
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
  return CudaFunction(
    match[1],
    "::".join([*_source.scopes(before), match[1]]),
    _source.template(before),
    tuple(_parameter(i, part) for i, part in enumerate(parts) if parts != ["void"]),
  )


def _parameter(index: int, text: str) -> CudaParameter:
  text = text.split("=", 1)[0].strip()
  text = re.sub(r"(\w+)\s*\[\s*\w*\s*\]$", r"* \1", text)  # `float x[]` is a pointer
  match = re.search(r"(\w+)$", text)
  name, kind = (match[1], text[: match.start()].strip()) if match else ("", text)
  if not kind or name in _TYPE_WORDS:
    name, kind = "", text
  name = name or str(index)
  pointee, star, _ = kind.rpartition("*")
  if star:
    element = " ".join(_QUALIFIERS.sub(" ", pointee).split())
    return CudaParameter(name, "in" if re.search(r"\bconst\b", pointee) else "out", element)
  plain = " ".join(_QUALIFIERS.sub(" ", kind).split())
  view = _VIEW.match(plain)
  if view is None:
    return CudaParameter(name, "number", plain)
  element, rank, *_ = (*_source.split_arguments(view[2]), "?", "?")
  return CudaParameter(name, _VIEWS[view[1]], element, rank)
