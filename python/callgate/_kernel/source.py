"""What callgate reads in C++ text before the compiler does: names and template parameters.

The compiler's own reading of types is what counts. Here are the parameters' names, how a template's
parameters follow from a call, and what C++ calls the types of elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from callgate._core.errors import GateDefinitionError
from callgate._kernel.parameters import Kind

_KINDS = {kind.cpp: kind for kind in Kind if kind is not Kind.SCALAR}
_VIEW = re.compile(
  r"(?:^|\s)(?:(?:::)?\s*(?:cg|callgate)\s*::\s*)?(\w+)\s*(<.*>)?\s*(?:const)?\s*&{0,2}$", re.DOTALL
)
_FUNCTION = re.compile(r"\bvoid\s+(\w+)\s*\(")
_BODY = re.compile(r"\s*(?:noexcept\b\s*(?:\([^;{}]*\)\s*)?)?\{")
_SKIPPED = re.compile(
  r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
  re.DOTALL,
)
_SCOPE = re.compile(
  r".*\b(?:namespace|struct|class)\b(?:\s*\[\[.*?\]\])?\s*([\w:]*)[^;{}()]*$", re.DOTALL
)
# What says that a template parameter is a value; anything else, concepts too, says a type.
_INTEGERS = re.compile(
  r"^(?:(?:std\s*::\s*)?(?:u?int(?:8|16|32|64)?_t|size_t|ptrdiff_t)|auto|bool|"
  r"(?:(?:unsigned|signed|long|short|int|char)\s*)+)$"
)
_OPEN, _CLOSE = "(<[{", ")>]}"


class SourceParameter(NamedTuple):
  """A function's parameter as its source writes it."""

  name: str
  kind: Kind  # by its type
  element: str  # the text of its element type; "" where it has none
  rank: str  # the text of its rank; "" where it is left out


class TemplateParameter(NamedTuple):
  """A template's parameter."""

  name: str
  is_type: bool  # an element type, not a number
  default: str = ""  # the text of its default; "" where it has none


class SourceFunction(NamedTuple):
  """A kernel's function in a source."""

  name: str
  qualified: str  # with its namespaces, as C++ outside of them names it
  template: tuple[TemplateParameter, ...] = ()  # its parameters; none for a plain function
  parameters: tuple[SourceParameter, ...] = ()  # none where the source doesn't show them


def find(label: str, source: str, name: str | None) -> SourceFunction:
  """The function of that name, or the only one that takes callgate's views."""
  text = without_comments(source)
  found: list[SourceFunction] = []
  for match in _FUNCTION.finditer(text):
    before, end = text[: match.start()], closing(text, match.end() - 1)
    if end < 0 or not _BODY.match(text, end + 1):  # a declaration
      continue
    qualified = "::".join([*scopes(before), match[1]])
    parameters = tuple(map(_parameter, split_arguments(text[match.end() : end])))
    views = any(p.kind not in (Kind.SCALAR, Kind.CONTEXT) for p in parameters)
    named = f"::{qualified}".endswith(f"::{(name or '').removeprefix('::')}")
    if views if name is None else named:
      found.append(SourceFunction(match[1], qualified, template(before), parameters))
  if len(found) == 1:
    return found[0]
  if name is None and found:
    names = ", ".join(f.qualified for f in found)
    problem = f"function=, since the source has several that take callgate's views: {names}"
  elif name is None:
    example = "a function `void name(cg::In<float, 1> x, cg::Out<float, 1> y) { … }`"
    problem = f"{example} in the source, found none that takes callgate's views"
  elif found:
    problem = f"one function '{name}', found {len(found)} in the source; give each its own name"
  elif re.search(r"^\s*#\s*include\s*[<\"]", source, re.MULTILINE):  # the compiler will find it
    return SourceFunction(name.rsplit("::", 1)[-1], name)
  else:
    problem = f"a function `void {name}(...)` in the source, found none of that name"
  raise GateDefinitionError(f"{label}: expected {problem}")


def without_comments(source: str) -> str:
  """The source with spaces for comments and literals."""
  return _SKIPPED.sub(blank, source)


def blank(match: re.Match[str]) -> str:
  """Spaces for a match; lines stay lines."""
  return re.sub(r"[^\n]", " ", match.group())


def scopes(before: str) -> list[str]:
  """Namespaces and classes that are open at the end of a text."""
  opened, start = list[str](), 0
  for i, char in enumerate(before):
    if char == "{":
      scope = _SCOPE.search(before[start:i])
      opened.append(scope[1] if scope else "")
    elif char == "}" and opened:
      opened.pop()
    if char in "{};":
      start = i + 1
  return [name for name in opened if name]


def closing(text: str, opening: int, pair: str = "()") -> int:
  """Where the bracket that opens at a position closes; -1 for nowhere."""
  depth = 0
  for i in range(opening, len(text)):
    depth += (text[i] == pair[0]) - (text[i] == pair[1])
    if depth == 0:
      return i
  return -1


def split_arguments(text: str, quotes: str = "") -> list[str]:
  """Parts between commas that are in no brackets, and between none of the quotes."""
  parts, depth, quote = [""], 0, ""
  for char in text:
    if char in quotes and quote in ("", char):
      quote = "" if quote else char
    depth += 0 if quote else (char in _OPEN) - (char in _CLOSE)
    if char == "," and depth == 0 and not quote:
      parts.append("")
    else:
      parts[-1] += char
  return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> SourceParameter:
  text = text.split("=", 1)[0].strip()
  kind = re.sub(r"\w+$", "", text)
  name, kind = (text[len(kind) :], kind.strip()) if kind else ("", text)  # a type without a name
  view = _VIEW.search(kind)
  if view is None or view[1] not in _KINDS:
    # A number by value, or another name of a view: the compiler will tell.
    return SourceParameter(name, Kind.SCALAR, re.sub(r"\bconst\b|&", "", kind).strip(), "")
  element, rank, *_ = *split_arguments((view[2] or "<>")[1:-1]), "", ""
  return SourceParameter(name, _KINDS[view[1]], element, rank)


def template(before: str) -> tuple[TemplateParameter, ...]:
  """The parameters of the `template <…>` that ends just before a function."""
  heads = list(re.finditer(r"\btemplate\s*(?=<)", before))
  rest = before[heads[-1].end() :] if heads else ""
  end = closing(rest, 0, "<>")
  if end < 0 or re.search(r"[;{}]", rest[end:]):
    return ()
  parameters: list[TemplateParameter] = []
  for part in split_arguments(rest[1:end]):
    declared, _, default = (text.strip() for text in part.partition("="))
    kind, _, name = declared.rpartition(" ")
    parameters.append(TemplateParameter(name, _INTEGERS.match(kind.strip()) is None, default))
  return tuple(parameters)


def deduced(
  wanted: TemplateParameter, arrays: Iterable[tuple[str, str, np.dtype[Any], int]]
) -> np.dtype[Any] | int | None:
  """A template parameter from arrays, an element type or a rank; None where none tells.

  `arrays` has the element's type and the rank as the source writes them, then those of the call.
  """
  for written, written_rank, dtype, rank in arrays:
    element = written.replace(" ", "")
    if wanted.is_type and element == wanted.name:
      return dtype
    if wanted.is_type and element == f"std::complex<{wanted.name}>" and dtype.kind == "c":
      return np.dtype(f"float{dtype.itemsize * 4}")
    if not wanted.is_type and written_rank == wanted.name:
      return rank
  return None


_SMALL = (
  "float16 bfloat16 float8_e5m2 float8_e4m3 float8_e3m4 float8_e4m3fn float8_e4m3b11fnuz "
  "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
TYPES = (
  {"bool": "bool"}
  | {f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
  | {"float32": "float", "float64": "double"}
  | {"complex64": "std::complex<float>", "complex128": "std::complex<double>"}
  | {name: f"cg::{name}" for name in _SMALL.split()}
)
DTYPES = (
  {text: name for name, text in TYPES.items()}
  | {f"std::{text}": name for name, text in TYPES.items() if text.endswith("_t")}
  | {"int": "int32", "short": "int16", "long": "int64", "long long": "int64"}
  | {"unsigned": "uint32", "unsigned int": "uint32", "unsigned long": "uint64", "size_t": "uint64"}
)


def cpp_type(dtype: np.dtype[Any]) -> str:
  """The C++ type of a dtype's elements; "" for one that kernel.h doesn't have."""
  return TYPES.get(np.dtype(dtype).name, "")
