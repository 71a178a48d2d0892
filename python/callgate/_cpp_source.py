"""What callgate reads in a C++ source before the compiler does: names and template parameters.

The compiler's own reading of the function's types is what counts; see `callgate.cpp`. Here are the
parameters' names, which C++ types don't have, and how a template's parameters follow from a call.
"""

from __future__ import annotations

import dataclasses
import re

from callgate._parameters import Kind
from callgate.errors import GateDefinitionError

_KINDS = {
  "In": Kind.IN,
  "Out": Kind.OUT,
  "InOut": Kind.INOUT,
  "Ins": Kind.INS,
  "Outs": Kind.OUTS,
  "Attr": Kind.NUMBER,
  "String": Kind.STRING,
  "Numbers": Kind.NUMBERS,
  "Dict": Kind.DICT,
  "Context": Kind.CONTEXT,
}
_VIEW = re.compile(r"\b(?:cg|callgate)\s*::\s*(\w+)\s*(<.*>)?\s*(?:const)?\s*[&]{0,2}$", re.DOTALL)
_FUNCTION = re.compile(r"\bvoid\s+(\w+)\s*\(")
_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_OPEN, _CLOSE = "(<[{", ")>]}"


@dataclasses.dataclass(frozen=True)
class SourceParameter:
  """A function's parameter as its source writes it.

  Attributes:
    name: of the parameter.
    kind: by its type.
    element: the text of its element type; "" where it has none.
    rank: the text of its rank; "" where it is left out.
  """

  name: str
  kind: Kind
  element: str
  rank: str


@dataclasses.dataclass(frozen=True)
class SourceFunction:
  """A kernel's function in a source.

  Attributes:
    name: of the function.
    template: kind ("typename", "int", …) and name of each template parameter; none for a plain one.
    parameters: in order.
  """

  name: str
  template: tuple[tuple[str, str], ...]
  parameters: tuple[SourceParameter, ...]


def find(label: str, source: str, name: str | None) -> SourceFunction:
  """The function of that name, or the only one that takes callgate's views."""
  text = _SKIPPED.sub(lambda match: " " * len(match.group()), source)
  last = None if name is None else name.rsplit("::", 1)[-1]
  found: dict[str, SourceFunction] = {}
  for match in _FUNCTION.finditer(text):
    end = _closing(text, match.end() - 1)
    if end < 0 or (last is not None and match.group(1) != last):
      continue
    after = text[end + 1 :].lstrip()
    if not re.match(r"(noexcept\b\s*)?\{", after):
      continue  # a declaration
    parameters = tuple(_parameter(part) for part in _split(text[match.end() : end]))
    views = any(p.kind not in (Kind.SCALAR, Kind.CONTEXT) for p in parameters)
    if last is not None or views:
      template = _template(text[: match.start()])
      found[match.group(1)] = SourceFunction(match.group(1), template, parameters)
  if len(found) == 1:
    return next(iter(found.values()))
  if name is not None:
    raise GateDefinitionError(
      f"{label}: expected a function `void {name}(...)` in the source, found none of that name"
    )
  if not found:
    raise GateDefinitionError(
      f"{label}: expected a function `void name(cg::In<float, 1> x, cg::Out<float, 1> y) {{ … }}` "
      "in the source, found none that takes callgate's views"
    )
  raise GateDefinitionError(
    f"{label}: expected function=, since the source has several that take callgate's views: "
    f"{', '.join(found)}"
  )


def _closing(text: str, opening: int) -> int:
  depth = 0
  for i in range(opening, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  return -1


def _split(text: str) -> list[str]:
  """Parts between commas that are in no brackets."""
  parts, depth, start = list[str](), 0, 0
  for i, char in enumerate(text):
    depth += (char in _OPEN) - (char in _CLOSE)
    if char == "," and depth == 0:
      parts.append(text[start:i])
      start = i + 1
  parts.append(text[start:])
  return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> SourceParameter:
  text = text.split("=", 1)[0].strip()
  match = re.search(r"(\w+)$", text)
  name, kind_text = (match.group(1), text[: match.start()].strip()) if match else ("", text)
  if match and not kind_text:  # a type without a name
    name, kind_text = "", text
  view = _VIEW.search(kind_text)
  if view is None or view.group(1) not in _KINDS:
    element = re.sub(r"\bconst\b|&", "", kind_text).strip()
    return SourceParameter(name, Kind.SCALAR, element, "")
  arguments = _split(view.group(2)[1:-1]) if view.group(2) else []
  element = arguments[0] if arguments else ""
  return SourceParameter(
    name, _KINDS[view.group(1)], element, arguments[1] if len(arguments) > 1 else ""
  )


def _template(before: str) -> tuple[tuple[str, str], ...]:
  """The parameters of the `template <…>` that ends just before a function."""
  match = re.search(r"template\s*<([^;{}]*)>\s*(?:(?:static|inline|constexpr)\s+)*$", before)
  if match is None:
    return ()
  parameters: list[tuple[str, str]] = []
  for part in _split(match.group(1)):
    words = part.split("=", 1)[0].split()
    parameters.append((" ".join(words[:-1]), words[-1]))
  return tuple(parameters)
