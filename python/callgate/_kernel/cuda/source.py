# SPDX-License-Identifier: Apache-2.0
"""Reads kernels and their parameters in CUDA source, before the compiler does.

It only uses the types' text: pointers and callgate's views are arrays, everything else is a number.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from callgate._core.errors import GateDefinitionError
from callgate._kernel import source as _source
from callgate._kernel.parameters import Kind, Parameter, Signature
from callgate._kernel.source import SourceFunction

# CUDA's names of element types, the one for template arguments first. Integers also have C's names.
_DTYPES = (
  {text: name for name, text in _source.TYPES.items() if ":" not in text}
  | {"ptrdiff_t": "int64", "size_t": "uint64"}
  | dict.fromkeys(("__half", "half", "cg::float16"), "float16")
  | dict.fromkeys(("__nv_bfloat16", "nv_bfloat16", "cg::bfloat16"), "bfloat16")
  | dict.fromkeys(("__nv_fp8_e4m3", "cg::float8_e4m3fn"), "float8_e4m3fn")
  | dict.fromkeys(("__nv_fp8_e5m2", "cg::float8_e5m2"), "float8_e5m2")
  | dict.fromkeys(("float2", "cuComplex", "cuFloatComplex"), "complex64")
  | dict.fromkeys(("double2", "cuDoubleComplex"), "complex128")
)
TYPES = {name: text for text, name in reversed(_DTYPES.items())}
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


def element_dtype(text: str) -> np.dtype[Any] | None:
  """Returns the dtype of an element type; None if no array has it, or if it is a template's."""
  plain = " ".join(text.replace("callgate::", "cg::").replace("std::", "").split())
  return _source.element_dtype(plain.replace(" ::", "::").replace(":: ", "::"), _DTYPES)


def find(label: str, source: str, kernel: str | None) -> SourceFunction:
  """Returns the kernel of a name ("scale", "ns::scale", "scale<float, 4>"), or the only one."""
  text = _source.blanked(_source.blanked(source), _ATTRIBUTE)
  name, _, arguments = (kernel or "").partition("<")
  name = name.strip()
  found = list(_source.defined(text, _KERNEL, _parameter, name or None))
  if len(found) != 1:
    several = ", ".join(f.qualified for f in found)
    expected = f"kernel=, since the source has several: {several}"
    if name:
      several = several or "none"
      expected = f"one kernel `__global__ void {name}(...)` in the source, found {several}"
    elif not found:
      named = "`__global__ void name(const float* x, float* y) { ... }`"
      expected = f"a kernel {named} in the source, found none"
    raise GateDefinitionError(f"{label}: expected {expected}")
  (function,) = found
  given, names = _source.split_arguments(arguments.rstrip().removesuffix(">")), function.template
  if len(given) > len(names):
    most = f"at most {len(names)} ({', '.join(p.name for p in names)})"
    raise GateDefinitionError(f"{label}: expected template arguments, {most}; got {len(given)}")
  bound = {p.name: v for p, v in zip(names, given, strict=False)}
  parameters = (
    dataclasses.replace(p, dtype=element_dtype(bound[p.element])) if p.element in bound else p
    for p in function.parameters
  )
  return function._replace(bound=bound, parameters=Signature(parameters))


def _parameter(index: int, text: str) -> Parameter:
  text = text.split("=", 1)[0].strip()
  text = re.sub(r"(\w+)\s*\[\s*\w*\s*\]$", r"* \1", text)  # `float x[]` is a pointer
  match = re.search(r"(\w+)$", text)
  name, kind = (match[1], text[: match.start()].strip()) if match else ("", text)
  if not kind or name in _TYPE_WORDS:
    name, kind = "", text
  name = name or str(index)
  pointee, star, _ = kind.rpartition("*")
  plain = " ".join(_QUALIFIERS.sub(" ", pointee if star else kind).split())
  if star:
    is_const = re.search(r"\bconst\b", pointee) is not None
    return _read(name, Kind.IN if is_const else Kind.OUT, plain)
  view = _source.view_of(plain)
  if view is None or not view[1] or view[0] not in ("In", "Out", "InOut"):
    return _read(name, Kind.NUMBER, plain)
  return _read(name, Kind[view[0].upper()], view[1], view[2] or "?")


def _read(name: str, kind: Kind, element: str, rank: str = "") -> Parameter:
  return _source.read_parameter(name, kind, element, rank, element_dtype(element))
