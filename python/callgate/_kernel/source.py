# SPDX-License-Identifier: Apache-2.0
"""Reads names and template parameters in C++ text, before the compiler does.

Only the compiler's reading of types counts. This module finds the parameters' names, a template's
arguments for a call, and the C++ names of element types.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from callgate._core import options as check
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.parameters import Kind, Parameter, Signature

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
# These introduce a template parameter that is a value; anything else, including concepts,
# introduces a type.
_INTEGERS = re.compile(
  r"^(?:(?:std\s*::\s*)?(?:u?int(?:8|16|32|64)?_t|size_t|ptrdiff_t)|auto|bool|"
  r"(?:(?:unsigned|signed|long|short|int|char)\s*)+)$"
)
_OPEN, _CLOSE = "(<[{", ")>]}"


class TemplateParameter(NamedTuple):
  """A template's parameter."""

  name: str
  is_type: bool  # True for an element type, False for a number
  default: str = ""  # the text of its default; "" without one

  def frozen(self, label: str, value: Any) -> int | str:
    """Returns a template argument as calls hold it: an integer, or a dtype's name."""
    is_integer = isinstance(value, (bool, int, np.integer))
    if is_integer and not self.is_type:
      return int(value)
    if self.is_type and not is_integer and not isinstance(value, (float, Tracer, type(None))):
      with contextlib.suppress(TypeError, AttributeError):
        return (dtype_named(value) if isinstance(value, str) else np.dtype(value)).name
    what = "a dtype" if self.is_type else "an integer"
    check.refuse(label, f"template parameter '{self.name}'", what, value)

  def argument(
    self,
    label: str,
    given: Mapping[str, Any],
    arrays: Iterable[tuple[Parameter, Any]],
    otherwise: str = "",
  ) -> Any:
    """Returns the argument by keyword or from arrays: a dtype or its name, an integer, or None."""
    if (value := given.get(self.name)) is not None:
      return value
    for parameter, array in arrays:
      dtype = np.dtype(array.dtype)
      element = parameter.element.replace(" ", "")
      if self.is_type and element == self.name:
        return dtype
      if self.is_type and element == f"std::complex<{self.name}>" and dtype.kind == "c":
        return np.dtype(f"float{dtype.itemsize * 4}")
      if not self.is_type and parameter.rank_text == self.name:
        return len(array.shape)
    if not self.default:
      named = f"'{'typename' if self.is_type else 'int'} {self.name}' by keyword ({self.name}=...)"
      why = "since no array's element type or rank determines it"
      raise GateDefinitionError(f"{label}: expected template parameter {named}{otherwise}, {why}")


class SourceFunction(NamedTuple):
  """A kernel's function in a source."""

  name: str
  qualified: str  # its name with namespaces
  template: tuple[TemplateParameter, ...] = ()  # its template parameters; none for a plain function
  parameters: Signature = Signature()  # none if the source doesn't show them
  bound: Mapping[str, str] = {}  # template arguments in the user's name, by parameter


def defined(
  text: str, head: re.Pattern[str], read: Callable[[int, str], Parameter], name: str | None
) -> Iterator[SourceFunction]:
  """Yields functions with a body, named `name` if given; `head` matches up to the "(" of one."""
  for match in head.finditer(text):
    before, end = text[: match.start()], closing(text, match.end() - 1)
    qualified = "::".join([*scopes(before), match[1]])
    named = name is None or f"::{qualified}".endswith(f"::{name.removeprefix('::')}")
    if named and end >= 0 and _BODY.match(text, end + 1):
      parts = [part for part in split_arguments(text[match.end() : end]) if part != "void"]
      parameters = Signature(read(i, part) for i, part in enumerate(parts))
      yield SourceFunction(match[1], qualified, template(before), parameters)


def find(label: str, source: str, name: str | None) -> SourceFunction:
  """Returns the function of that name, or the only one with callgate's views."""
  text, by_value = blanked(source), (Kind.SCALAR, Kind.CONTEXT)
  found = list(defined(text, _FUNCTION, _parameter, name))
  if name is None:
    found = [f for f in found if any(p.kind not in by_value for p in f.parameters)]
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
  elif re.search(r"^\s*#\s*include\s*[<\"]", source, re.MULTILINE):  # the compiler may find it
    return SourceFunction(name.rsplit("::", 1)[-1], name)
  else:
    problem = f"a function `void {name}(...)` in the source, found none of that name"
  raise GateDefinitionError(f"{label}: expected {problem}")


def blanked(source: str, what: re.Pattern[str] = _SKIPPED) -> str:
  """Returns the source with spaces in place of comments and literals, or `what`; keeps lines."""
  return what.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)


def scopes(before: str) -> list[str]:
  """Returns the namespaces and classes that are open at the end of a text."""
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
  """Returns the position of the bracket that closes the one at `opening`; -1 if there is none."""
  depth = 0
  for i in range(opening, len(text)):
    depth += (text[i] == pair[0]) - (text[i] == pair[1])
    if depth == 0:
      return i
  return -1


def split_arguments(text: str, quotes: str = "") -> list[str]:
  """Splits at the commas outside brackets and the quotes."""
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


def _parameter(index: int, text: str) -> Parameter:
  text = text.split("=", 1)[0].strip()
  kind = re.sub(r"\w+$", "", text)
  name, kind = (text[len(kind) :], kind.strip()) if kind else ("", text)  # a type without a name
  view, name = view_of(kind), name or str(index)
  if view is None or view[0] not in _KINDS:
    # A number by value, or an alias of a view, which the compiler will recognize.
    element = re.sub(r"\bconst\b|&", "", kind).strip()
    return read_parameter(name, Kind.SCALAR, element, "", element_dtype(element))
  _, element, rank = view
  return read_parameter(name, _KINDS[view[0]], element, rank, element_dtype(element))


def read_parameter(
  name: str, kind: Kind, element: str, rank: str, dtype: np.dtype[Any] | None
) -> Parameter:
  """Makes a parameter from the texts of its element type, with its dtype, and of its rank."""
  by_value = kind in (Kind.SCALAR, Kind.NUMBER)
  known = 0 if by_value else int(rank) if rank.isdigit() else -1
  return Parameter(name, kind, dtype, known, element=element, rank_text=rank)


def view_of(kind: str) -> tuple[str, str, str] | None:
  """Returns a view's name, element type and rank from a type's text; None for no view."""
  if (view := _VIEW.search(kind)) is None:
    return None
  element, rank, *_ = *split_arguments((view[2] or "<>")[1:-1]), "", ""
  return view[1], element, rank


def template(before: str) -> tuple[TemplateParameter, ...]:
  """Returns the parameters of the `template <…>` just before a function."""
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
  | {"size_t": "uint64"}
)
INTEGERS = frozenset(("char", "short", "int", "long", "signed", "unsigned"))


def element_dtype(text: str, names: Mapping[str, str] = DTYPES) -> np.dtype[Any] | None:
  """Returns the dtype of an element type's text: an integer's, or by `names`."""
  words = text.split()
  if words and INTEGERS.issuperset(words):
    size = "b" if "char" in words else "h" if "short" in words else "ilq"[words.count("long")]
    return np.dtype(size.upper() if "unsigned" in words else size)
  name = names.get(" ".join(words))
  return None if name is None else dtype_named(name)


def cpp_type(dtype: np.dtype[Any]) -> str:
  """Returns the C++ type of a dtype's elements; "" if kernel.h lacks it."""
  return TYPES.get(np.dtype(dtype).name, "")
