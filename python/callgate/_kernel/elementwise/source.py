# SPDX-License-Identifier: Apache-2.0
"""The C++ source of `callgate.elementwise`.

The *body* computes one element, independent of the device: it is a function of an object that
iterates over elements. The rest makes a CPU kernel of it (include/callgate/elementwise.h).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.elementwise.params import Bindings, Param, bind, is_letter
from callgate._kernel.source import cpp_type

_SKIPPED = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*\#[^\n]*'
_WORDS = re.compile(rf"{_SKIPPED}|\b[A-Za-z_]\w*", re.DOTALL | re.MULTILINE)
_FLOATS = re.compile(
  rf"{_SKIPPED}|(?<![\w.])(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])",
  re.DOTALL | re.MULTILINE,
)
_DEFINES = re.compile(r"^[ \t]*#[ \t]*define\b((?:\\\n|[^\n])*)", re.MULTILINE)
_INDEX = ("i", "n", "_ind")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Code:
  """The user's code of a kernel."""

  inputs: tuple[Param, ...]
  outputs: tuple[Param, ...]
  operation: str  # statements for one element
  preamble: str = ""  # C++ before the kernel: functions, types, includes
  loop_prep: str = ""  # statements before a range of elements
  after_loop: str = ""  # statements after it
  # Letters and dtypes that the code uses in addition to its parameters'.
  more_types: tuple[str, ...] = ()

  @property
  def types(self) -> tuple[str, ...]:
    own = (p.type for p in (*self.inputs, *self.outputs))
    return tuple(sorted({*own, *self.more_types}))

  @property
  def letters(self) -> tuple[str, ...]:
    return tuple(name for name in self.types if is_letter(name))

  @property
  def mapped(self) -> tuple[Param, ...]:
    """The arguments that the code gets element by element."""
    return tuple(p for p in self.inputs if not p.raw)

  def bindings(
    self, label: str, operands: Sequence[Any], static: Mapping[str, Any]
  ) -> dict[str, np.dtype[Any]]:
    """Returns the dtypes of letters in a call."""
    given = {name: dtype_named(static[name]) for name in self.letters if name in static}
    bound = bind(label, self.inputs, operands, given)
    for letter in (n for n in self.letters if n not in bound):
      user = next((p.name for p in self.outputs if p.type == letter), letter)
      expected = f"pass it by keyword, such as {letter}='float32'"
      fault = f"the type {letter} of '{user}' is unknown, since no argument has it"
      raise GateDefinitionError(f"{label}: {fault}; {expected}")
    return bound

  @property
  def knows_place(self) -> bool:
    """True if the code can read an element's place in the arrays."""
    macros = " ".join(_DEFINES.findall(self.preamble))
    used = words(f"{self.operation}\n{self.loop_prep}\n{self.after_loop}\n{macros}")
    return not used.isdisjoint(_INDEX) or any(p.raw for p in self.inputs)


def words(code: str) -> set[str]:
  """Returns the identifiers in C++ code, without those in comments, strings and directives."""
  return {w for w in map(str, _WORDS.findall(code)) if w[0].isalpha() or w[0] == "_"}


def value_type(dtype: np.dtype[Any]) -> str:
  """Returns the C++ type of numbers in the code: small floats are computed in float."""
  stored = cpp_type(dtype)
  return "float" if stored.startswith("cg::") else stored


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BoundCode:
  """Code for a call's dtypes."""

  code: Code  # the user's code
  bindings: Bindings  # the letters' dtypes
  spelled: Callable[[str], str] = str  # returns the target's name of a C++ type

  def stored(self, param: Param) -> str:
    """Returns the type of a parameter's elements in memory."""
    return self.spelled(cpp_type(param.dtype(self.bindings)))

  def value(self, param: Param) -> str:
    """Returns the type of a parameter's elements in the code."""
    return self.spelled(value_type(param.dtype(self.bindings)))

  @property
  def pointers(self) -> list[str]:
    """Declarations of pointers to the arrays that are iterated over."""
    constant = [f"const {self.stored(p)}* {p.name}" for p in self.code.mapped]
    return [*constant, *(f"{self.stored(p)}* {p.name}" for p in self.code.outputs)]

  def has_any(self, *dtypes: str) -> bool:
    have = {self.bindings[n].name if is_letter(n) else n for n in self.code.types}
    return not have.isdisjoint(dtypes)

  @property
  def has_complex(self) -> bool:
    return self.has_any("complex64", "complex128")


def body(what: str, bound: BoundCode) -> str:
  """Returns the part that is independent of the device; `what` is the kernel in messages."""
  code = bound.code
  types = "".join(f"using {n} = {value_type(bound.bindings[n])};\n" for n in code.letters)
  params = [f"const {bound.value(p)} {p.name}" for p in code.mapped]
  params += [f"{bound.value(p)}& {p.name}" for p in code.outputs]
  raws = "".join(f", const auto& {p.name}" for p in code.inputs if p.raw)
  parts = ("operation", "loop_prep", "after_loop")
  codes = (placed(what, part, _literals(getattr(code, part), bound)) for part in parts)
  operation, prepare, after = codes
  return f"""{types}{placed(what, "preamble", code.preamble, end="")}template <class Elements>
CALLGATE_FUNCTION void callgate_body(const Elements& _elements,
                                     [[maybe_unused]] const int64_t n{raws}) {{
  using namespace callgate::elementwise;
  [[maybe_unused]] const Index _ind(n);
{prepare}  _elements([&](const int64_t i, {", ".join(params)}) CALLGATE_INLINE {{
{operation}  }});
{after}}}
"""


def element(bound: BoundCode, arguments: Sequence[str], place: str) -> list[str]:
  """Calls the body for one element; `place` has the results' destinations, by name."""
  outputs = bound.code.outputs
  return [
    *(f"{bound.value(p)} _new_{p.name}{{}};" for p in outputs),
    f"_each({', '.join([*arguments, *(f'_new_{p.name}' for p in outputs)])});",
    *(f"{place.format(p.name)} = static_cast<{bound.stored(p)}>(_new_{p.name});" for p in outputs),
  ]


def cpu_unit(what: str, bound: BoundCode, varies: str) -> str:
  """Returns a complete source for the CPU.

  `varies` has "1" for each mapped argument that varies along rows, else "0". "?" is for symbolic
  shapes of an exported program.
  """
  code, count, rows, arguments = bound.code, len(bound.code.mapped), list[str](), ["_start + _j"]
  for k, param in enumerate(code.mapped):
    name, stored, value = param.name, bound.stored(param), bound.value(param)
    if varies[k] != "0":
      step = "" if varies[k] == "1" else f" * _layout.step({k})"
      rows.append(f"const {stored}* const _row_{name} = {name} + _offsets[{k}];")
      arguments.append(f"static_cast<{value}>(_row_{name}[_j{step}])")
    else:  # one element for the whole row
      rows.append(f"const auto _one_{name} = static_cast<{value}>({name}[_offsets[{k}]]);")
      arguments.append(f"_one_{name}")
  rows += [f"{bound.stored(p)}* const _row_{p.name} = {p.name} + _start;" for p in code.outputs]
  params = [f"cg::In<{bound.stored(p)}> {p.name}" for p in code.inputs]
  params += [f"cg::Out<{bound.stored(p)}> {p.name}" for p in code.outputs]
  shapes = "".join(f"shape_of({p.name}), " for p in code.mapped)
  data = "".join(f", {p.name}.data()" for p in (*code.mapped, *code.outputs))
  raws = [f", Raw<{bound.stored(p)}, {bound.value(p)}>({p.name})" for p in code.inputs if p.raw]
  complexes = "#define CALLGATE_ELEMENTWISE_COMPLEX 1\n#include <complex>\n"
  return f"""{complexes if bound.has_complex else ""}#include "callgate/elementwise.h"

{body(what, bound)}
namespace {{
struct Elements {{  // a range of them, to go through
  const callgate::elementwise::Layout<{count}>& _layout;
  int64_t _first, _last;
{lines(2, (f"{pointer};" for pointer in bound.pointers))}
  template <class Each>
  CALLGATE_INLINE void operator()(const Each& _each) const {{
    _layout.rows(_first, _last, [&](int64_t _start, int64_t _count,
                                    const int64_t* _offsets) CALLGATE_INLINE {{
{lines(6, rows)}
      CALLGATE_VECTORIZE
      for (int64_t _j = 0; _j < _count; ++_j) {{
{lines(8, element(bound, arguments, "_row_{}[_j]"))}
      }}
    }});
  }}
}};

void elementwise_kernel({", ".join(params)}, cg::Context& _context) {{
  using namespace callgate::elementwise;
  const Layout<{count}> _layout(shape_of({code.outputs[0].name}), {{{shapes}Shape{{}}}});
  _layout.check("{varies}");
  _layout.split(_context, [&](int64_t _first, int64_t _last) {{
    callgate_body(Elements{{_layout, _first, _last{data}}}, _layout.size(){"".join(raws)});
  }});
}}
}}  // namespace

CALLGATE_KERNEL(elementwise_kernel{"".join(f", {p.name}" for p in (*code.inputs, *code.outputs))},
                _context);
"""


def lines(indent: int, texts: Iterable[str]) -> str:
  return "\n".join(" " * indent + text for text in texts)


def placed(what: str, part: str, text: str, end: str = ";\n") -> str:
  """Returns user's code with its own name and line numbers for messages."""
  if not text.strip():
    return ""
  name = re.sub(r'["\\\n]', "_", f"{what}, {part}")
  return f'#line 1 "{name}"\n{text}\n{end}#line 1 "callgate"\n'


def _literals(text: str, bound: BoundCode) -> str:
  """Makes floating-point literals float, like a Python scalar, unless the code uses double."""
  if bound.has_any("float64", "complex128") or "double" in words(text):
    return text
  return _FLOATS.sub(lambda m: f"{m[0]}f" if m[0][0].isdigit() or m[0][0] == "." else m[0], text)
