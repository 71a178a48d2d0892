"""The C++ that `callgate.elementwise` compiles.

It has two parts. The *body* says what happens to an element, and knows no device: it is a function
of a thing that goes through elements. The rest makes a CPU kernel of it, by loops over the rows of
the arrays (include/callgate/elementwise.h).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from callgate._core.dtypes import dtype_named, is_complex
from callgate._kernel.elementwise.params import Bindings, Param, is_letter
from callgate._kernel.source import cpp_type

_SKIPPED = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*\#[^\n]*'
_WORDS = re.compile(rf"{_SKIPPED}|\b[A-Za-z_]\w*", re.DOTALL | re.MULTILINE)
_FLOATS = re.compile(
  rf"{_SKIPPED}|(?<![\w.])(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])",
  re.DOTALL | re.MULTILINE,
)
_DEFINES = re.compile(r"^[ \t]*#[ \t]*define\b((?:\\\n|[^\n])*)", re.MULTILINE)
_INDEX = ("i", "n", "_ind")


@dataclasses.dataclass(frozen=True)
class Code:
  """What a user writes of a kernel.

  Attributes:
    inputs, outputs: the parameters.
    operation: statements for one element.
    preamble: C++ before the kernel: functions, types, includes.
    loop_prep, after_loop: statements before and after a run of elements.
    more_types: letters and dtypes that the code uses beside those of its parameters.
  """

  inputs: tuple[Param, ...]
  outputs: tuple[Param, ...]
  operation: str
  preamble: str = ""
  loop_prep: str = ""
  after_loop: str = ""
  more_types: tuple[str, ...] = ()

  @property
  def types(self) -> tuple[str, ...]:
    """The letters and dtypes that it uses."""
    own = (p.type for p in (*self.inputs, *self.outputs))
    return tuple(sorted({*own, *self.more_types}))

  @property
  def letters(self) -> tuple[str, ...]:
    """The letters that stand for types."""
    return tuple(name for name in self.types if is_letter(name))

  @property
  def mapped(self) -> tuple[Param, ...]:
    """The arguments that the code gets element by element."""
    return tuple(p for p in self.inputs if not p.raw)

  @property
  def knows_place(self) -> bool:
    """Whether the code can tell where in the arrays an element is."""
    macros = " ".join(_DEFINES.findall(self.preamble))
    used = words(f"{self.operation}\n{self.loop_prep}\n{self.after_loop}\n{macros}")
    return not used.isdisjoint(_INDEX) or any(p.raw for p in self.inputs)


def words(code: str) -> set[str]:
  """The identifiers in some C++, without those in comments, strings and directives."""
  found: list[str] = _WORDS.findall(code)
  return {word for word in found if word[0].isalpha() or word[0] == "_"}


def value_type(dtype: np.dtype[Any]) -> str:
  """The C++ type that numbers have in the code: small floats are computed in float."""
  stored = cpp_type(dtype)
  return "float" if stored.startswith("cg::") else stored


def body(what: str, code: Code, bindings: Bindings) -> str:
  """The part that knows no device.

  Args:
    what: the kernel, for the compiler's messages.
    code: the user's.
    bindings: what the letters stand for.
  """
  types = "".join(f"using {name} = {value_type(bindings[name])};\n" for name in code.letters)
  params = ["const int64_t i"]
  params += [f"const {value_type(p.dtype(bindings))} {p.name}" for p in code.mapped]
  params += [f"{value_type(p.dtype(bindings))}& {p.name}" for p in code.outputs]
  raws = "".join(f", const auto& {p.name}" for p in code.inputs if p.raw)
  operation, prepare, after = (
    _literals(text, code, bindings) for text in (code.operation, code.loop_prep, code.after_loop)
  )
  return (
    f"{types}"
    f"{placed(what, 'preamble', code.preamble, end='')}"
    "template <class Elements>\n"
    "CALLGATE_FUNCTION void callgate_body(const Elements& _elements, "
    f"[[maybe_unused]] const int64_t n{raws}) {{\n"
    "  using namespace callgate::elementwise;\n"
    "  [[maybe_unused]] const Index _ind(n);\n"
    f"{placed(what, 'loop_prep', prepare)}"
    f"  _elements([&]({', '.join(params)}) CALLGATE_INLINE {{\n"
    f"{placed(what, 'operation', operation)}"
    "  });\n"
    f"{placed(what, 'after_loop', after)}"
    "}\n"
  )


def cpu_unit(what: str, code: Code, bindings: Bindings, varies: str) -> str:
  """A whole source for the CPU.

  Args:
    what: the kernel, for the compiler's messages.
    code: the user's.
    bindings: what the letters stand for.
    varies: for each argument that is not raw "1" where it varies along rows, "0" where it doesn't.
  """
  everything = (*code.inputs, *code.outputs)
  complexes = has_complex(code, bindings)
  head = "#define CALLGATE_ELEMENTWISE_COMPLEX 1\n#include <complex>\n" if complexes else ""
  text = f'{head}#include "callgate/elementwise.h"\n\n{body(what, code, bindings)}'
  text += f"\nnamespace {{\n{_elements(code, bindings, varies)}\n"
  text += f"{_entry(code, bindings, varies)}}}  // namespace\n\n"
  names = "".join(f", {p.name}" for p in everything)
  return f"{text}CALLGATE_KERNEL(elementwise_kernel{names}, _context);\n"


def has_complex(code: Code, bindings: Bindings) -> bool:
  """Whether complex numbers are among its types."""
  return any(is_complex(dtype) for dtype in _dtypes(code, bindings))


def _dtypes(code: Code, bindings: Bindings) -> list[np.dtype[Any]]:
  return [bindings[name] if is_letter(name) else dtype_named(name) for name in code.types]


def _elements(code: Code, bindings: Bindings, varies: str) -> str:
  """The struct that goes through a range of elements."""
  count = len(code.mapped)
  fields = [f"const callgate::elementwise::Layout<{count}>& _layout;", "int64_t _first, _last;"]
  rows: list[str] = []
  arguments = ["_start + _j"]
  for k, param in enumerate(code.mapped):
    stored, value = cpp_type(param.dtype(bindings)), value_type(param.dtype(bindings))
    fields.append(f"const {stored}* {param.name};")
    if varies[k] == "1":
      rows.append(f"const {stored}* const _row_{param.name} = {param.name} + _offsets[{k}];")
      arguments.append(f"static_cast<{value}>(_row_{param.name}[_j])")
    else:  # one element for the whole row
      rows.append(
        f"const auto _one_{param.name} = static_cast<{value}>({param.name}[_offsets[{k}]]);"
      )
      arguments.append(f"_one_{param.name}")
  before: list[str] = []
  after: list[str] = []
  for param in code.outputs:
    stored, value = cpp_type(param.dtype(bindings)), value_type(param.dtype(bindings))
    fields.append(f"{stored}* {param.name};")
    rows.append(f"{stored}* const _row_{param.name} = {param.name} + _start;")
    before.append(f"{value} _new_{param.name}{{}};")
    arguments.append(f"_new_{param.name}")
    after.append(f"_row_{param.name}[_j] = static_cast<{stored}>(_new_{param.name});")
  inner = "".join(
    f"        {line}\n" for line in (*before, f"_each({', '.join(arguments)});", *after)
  )
  return (
    "struct Elements {\n"
    + "".join(f"  {field}\n" for field in fields)
    + "  template <class Each>\n"
    "  CALLGATE_INLINE void operator()(const Each& _each) const {\n"
    "    _layout.rows(_first, _last, [&](int64_t _start, int64_t _count,\n"
    "                                    const int64_t* _offsets) CALLGATE_INLINE {\n"
    + "".join(f"      {line}\n" for line in rows)
    + "      CALLGATE_VECTORIZE\n"
    "      for (int64_t _j = 0; _j < _count; ++_j) {\n"
    f"{inner}"
    "      }\n"
    "    });\n"
    "  }\n"
    "};\n"
  )


def _entry(code: Code, bindings: Bindings, varies: str) -> str:
  """The function that a call runs."""
  params = [f"cg::In<{cpp_type(p.dtype(bindings))}> {p.name}" for p in code.inputs]
  params += [f"cg::Out<{cpp_type(p.dtype(bindings))}> {p.name}" for p in code.outputs]
  first, count = code.outputs[0].name, len(code.mapped)
  shapes = "".join(f"shape_of({p.name}), " for p in code.mapped)
  flags = "".join(f"{str(flag == '1').lower()}, " for flag in varies)
  raws = "".join(
    f", Raw<{cpp_type(p.dtype(bindings))}, {value_type(p.dtype(bindings))}>({p.name})"
    for p in code.inputs
    if p.raw
  )
  data = "".join(f", {p.name}.data()" for p in (*code.mapped, *code.outputs))
  return (
    f"void elementwise_kernel({', '.join(params)}, cg::Context& _context) {{\n"
    "  using namespace callgate::elementwise;\n"
    f"  const Layout<{count}> _layout(shape_of({first}), {{{shapes}Shape{{}}}});\n"
    f"  _layout.check({{{flags}false}});\n"
    "  _layout.split(_context, [&](int64_t _first, int64_t _last) {\n"
    f"    callgate_body(Elements{{_layout, _first, _last{data}}}, _layout.size(){raws});\n"
    "  });\n"
    "}\n"
  )


def placed(what: str, part: str, text: str, end: str = ";\n") -> str:
  """User's code under its own name and line numbers."""
  if not text.strip():
    return ""
  name = re.sub(r'["\\\n]', "_", f"{what}, {part}")
  return f'#line 1 "{name}"\n{text}\n{end}#line 1 "callgate"\n'


def _literals(text: str, code: Code, bindings: Bindings) -> str:
  """Floating literals are float's, as a Python scalar is, unless a double is anywhere near."""
  dtypes = {dtype.name for dtype in _dtypes(code, bindings)}
  if not dtypes.isdisjoint({"float64", "complex128"}) or "double" in words(text):
    return text
  return _FLOATS.sub(lambda m: f"{m[0]}f" if m[0][0].isdigit() or m[0][0] == "." else m[0], text)
