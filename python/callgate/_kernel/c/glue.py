"""The C++ between a kernel's call and a C function: written from a `Binding`, then compiled.

The function's address is not in it. It is the first word of the kernel's user data, and the
addresses of `pointers=` follow it; so the compiled glue can be kept on disk.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from callgate._kernel.c.arguments import OPERANDS, RESULTS, Argument, Array, Binding, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.types import CParameter, CType, Declaration

_ELEMENTS = {
  "bool": "bool",
  "float16": "cg::float16",
  "float32": "float",
  "float64": "double",
  "complex64": "pair<float>",
  "complex128": "pair<double>",
}


@dataclasses.dataclass(frozen=True)
class Glue:
  """All that the source follows from.

  Attributes:
    function: what messages call the C function; "" where that is not known.
    declaration: its type.
    binding: where its arguments come from.
    loop: whether it is called for each element.
    columns_first: arrays that C gets in column-major order.
    errors: texts for numbers of `info` and `status`.
    pointers: names of the addresses after the function's.
    parallel: whether a loop may run on several threads.
  """

  function: str
  declaration: Declaration
  binding: Binding
  loop: bool
  columns_first: frozenset[str]
  errors: tuple[tuple[int | str, str], ...]
  pointers: tuple[str, ...]
  parallel: bool

  def source(self, dtypes: Mapping[str, np.dtype[Any]]) -> str:
    """The C++ for arrays of these dtypes."""
    helpers = (Path(__file__).parent / "glue.h").read_text().replace("#pragma once\n", "")
    return _Writer(self, dtypes, helpers).write()


def element(dtype: np.dtype[Any]) -> str:
  """The C++ type of an array's elements."""
  known = _ELEMENTS.get(dtype.name)
  return known or (f"{dtype.name}_t" if dtype.kind in "iu" else f"cg::{dtype.name}")


class _Writer:
  """One source. C++ names: v_x views, s_k static values, n_n dimensions, c_i arguments."""

  def __init__(self, glue: Glue, dtypes: Mapping[str, np.dtype[Any]], helpers: str) -> None:
    self.glue = glue
    self.binding = glue.binding
    self.dtypes = dtypes
    self.helpers = helpers

  def write(self) -> str:
    head = [self._parameter(name) for name in self.binding.names]
    names = [*self.binding.names, "context"]
    body = [
      "void* const* user_data = static_cast<void* const*>(context.user_data());",
      f"const auto function = reinterpret_cast<{self._function_type()}>(user_data[0]);",
      *(f"const int64_t n_{s} = extent(v_{a}, {i});" for s, (a, i) in self.binding.symbols.items()),
      *(self._loop() if self.glue.loop else self._call_once()),
    ]
    lines = "\n".join(f"  {line}" for line in body)
    return (
      f"{self.helpers}\n"
      f"namespace {{\n{self._checks()}"
      f"void glue({', '.join([*head, 'cg::Context& context'])}) {{\n{lines}\n}}\n"
      "callgate_kernel callgate_made = ::callgate::detail::describe<&glue>"
      f'("glue, {", ".join(names)}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made);\n}\n"
    )

  # -- types -------------------------------------------------------------------------------------
  def _view(self, array: Array) -> str:
    dtype = element(self.dtypes[array.name])
    if not array.type.pointer and array.role in OPERANDS and not self.glue.loop:
      return dtype
    kind = {Role.OUT: "Out", Role.INOUT: "InOut"}.get(array.role, "In")
    return f"cg::{kind}<{dtype}, {rank(array, self.glue.loop)}>"

  def _parameter(self, name: str) -> str:
    if name in self.binding.arrays:
      return f"{self._view(self.binding.arrays[name])} v_{name}"
    dtype = self.binding.statics[name].dtype
    assert dtype is not None
    return f"cg::Attr<{element(dtype)}> s_{name}"

  def _function_type(self) -> str:
    declaration = self.glue.declaration
    types = [p.type.cpp for p in declaration.all_parameters]
    return f"{declaration.result.cpp} (*)({', '.join(types)})"

  # -- expressions -------------------------------------------------------------------------------
  def _expression(self, expression: Expression) -> str:
    def number(name: str) -> str:
      return f"int64_t(s_{name}.value())" if name in self.binding.statics else f"n_{name}"

    return expression.cpp(number, lambda name: f"v_{name}")

  def _value(self, argument: Argument, kind: CType) -> str:
    """An argument that is a number, as C's type."""
    if argument.role is Role.STATIC:
      return f"load<{kind.element}>(s_{argument.name}.value())"
    if argument.value is not None:
      return f"static_cast<{kind.element}>({self._expression(argument.value)})"
    literal = argument.literal
    if isinstance(literal, str):
      return f"static_cast<{kind.element}>({literal.encode()[0]})"
    if isinstance(literal, complex):
      return f"load<{kind.element}>(pair<double>{{{literal.real!r}, {literal.imag!r}}})"
    if type(literal) is int and literal >= 2**63:
      return f"{kind.element}({literal}u)"
    text = str(literal).lower() if isinstance(literal, bool) else repr(literal)
    return f"static_cast<{kind.element}>({text})"

  # -- one call ----------------------------------------------------------------------------------
  def _call_once(self) -> list[str]:
    before, passed, after = list[str](), list[str](), list[str]()
    pointers: dict[str, str] = {}
    for argument, parameter in self._pairs():
      name = f"c_{len(passed)}"
      if argument is None:
        passed.append(parameter.fixed)
      elif argument.name in self.binding.arrays:
        passed.append(self._array(argument, parameter.type, pointers, before, after))
      else:
        passed.append(self._other(argument, parameter.type, name, before, after, ""))
    returned = self.binding.returned
    call = f"function({', '.join(passed)})"
    stored = ""
    if returned is None or returned.role is Role.IGNORED:
      stored = f"{call};"
    elif returned.role is Role.OUT:
      stored = f"store(*v_{returned.name}.data(), {call});"
    else:
      stored = f"check_{returned.role.name.lower()}({call}, -1);"
    return [*before, stored, *after]

  def _pairs(self) -> list[tuple[Argument | None, CParameter]]:
    given = iter(self.binding.arguments)
    return [(None if p.fixed else next(given), p) for p in self.glue.declaration.all_parameters]

  def _array(
    self,
    argument: Argument,
    kind: CType,
    pointers: dict[str, str],
    before: list[str],
    after: list[str],
  ) -> str:
    array = self.binding.arrays[argument.name]
    view = f"v_{array.name}"
    if not kind.pointer:
      return f"load<{kind.element}>({view})"
    if array.name not in pointers:
      pointers[array.name] = f"p_{array.name}"
      before.append(f"auto* p_{array.name} = {self._memory(array, view, after)};")
    return f"pointer<{kind.element}>(p_{array.name})"

  def _memory(self, array: Array, view: str, after: list[str]) -> str:
    ordered = array.name in self.glue.columns_first and rank(array, loop=False) not in (0, 1)
    if not ordered:
      return f"copied(context, {view}, false)" if array.role is Role.COPY else f"{view}.data()"
    if array.role in RESULTS:
      after.append(f"put_back(context, p_{array.name}, {view});")
    return f"like(context, {view})" if array.role is Role.OUT else f"copied(context, {view}, true)"

  def _other(
    self,
    argument: Argument,
    kind: CType,
    name: str,
    before: list[str],
    after: list[str],
    index: str,
  ) -> str:
    """An argument that is no array."""
    role = argument.role
    if role is Role.NULL:
      return "nullptr"
    if role is Role.ADDRESS:
      return (
        f"static_cast<{kind.element}*>(user_data[{1 + self.glue.pointers.index(argument.name)}])"
      )
    if role is Role.SCRATCH:
      assert argument.value is not None
      of = kind.element if kind.dtype is not None else "char"
      return f"context.scratch<{of}>({self._expression(argument.value)})"
    if role in (Role.INFO, Role.STATUS):
      before.append(f"{kind.element} {name} = 0;")
      after.insert(0, f"check_{role.name.lower()}({name}, {index or -1});")
      return f"&{name}"
    if isinstance(argument.literal, str) and kind.pointer:
      content = ", ".join(str(byte) for byte in (*argument.literal.encode(), 0))
      before.append(f"unsigned char {name}[] = {{{content}}};")
      return f"pointer<{kind.element}>(&{name}[0])"
    value = self._value(argument, kind)
    if not kind.pointer:
      return value
    before.append(f"{kind.element} {name} = {value};")
    return f"&{name}"

  # -- a call for each element -------------------------------------------------------------------
  def _loop(self) -> list[str]:
    arrays = self.binding.arrays
    operands = [a for a in arrays.values() if a.role in OPERANDS]
    first = self.binding.results[0].name
    walks = [f"const Walk w_{a.name}(context, v_{a.name}, v_{first});" for a in operands]
    starts = [f"int64_t i_{a.name} = w_{a.name}.at(dims, rank, start);" for a in operands]
    # Along a row the operand moves by its innermost stride, which is 0 or 1.
    steps = [
      f"const int64_t d_{a.name} = rank > 0 ? w_{a.name}.strides[rank - 1] : 0;" for a in operands
    ]
    moves = [f"i_{a.name} += d_{a.name};" for a in operands]
    run = (
      f"context.parallel_ranges(0, v_{first}.size(), 1024, range);"
      if self.glue.parallel
      else f"range(0, v_{first}.size());"
    )
    return [
      f"const int64_t* dims = v_{first}.extents();",
      f"const int rank = v_{first}.rank();",
      *walks,
      *steps,
      "auto range = [&](int64_t begin, int64_t end) {",
      "  by_rows(dims, rank, begin, end, [&](int64_t start, int64_t count) {",
      *(f"    {line}" for line in starts),
      "    for (int64_t i = start; i < start + count; ++i) {",
      *(f"      {line}" for line in (*self._element_call(), *moves)),
      "    }",
      "  });",
      "};",
      run,
    ]

  def _element_call(self) -> list[str]:
    before, passed, after = list[str](), list[str](), list[str]()
    for argument, parameter in self._pairs():
      name, kind = f"c_{len(passed)}", parameter.type
      if argument is None:
        passed.append(parameter.fixed)
      elif argument.role is Role.OUT:
        before.append(f"{kind.element} {name} = {{}};")
        after.append(f"store(v_{argument.name}.data()[i], {name});")
        passed.append(f"&{name}")
      elif argument.name in self.binding.arrays:
        value = f"load<{kind.element}>(v_{argument.name}.data()[i_{argument.name}])"
        if kind.pointer:
          before.append(f"{kind.element} {name} = {value};")
        passed.append(f"&{name}" if kind.pointer else value)
      else:
        passed.append(self._other(argument, kind, name, before, after, "i"))
    call, returned = f"function({', '.join(passed)})", self.binding.returned
    if returned is None or returned.role is Role.IGNORED:
      call = f"{call};"
    elif returned.role is Role.OUT:
      call = f"store(v_{returned.name}.data()[i], {call});"
    else:
      call = f"check_{returned.role.name.lower()}({call}, i);"
    return [*before, call, *after]

  # -- failures ----------------------------------------------------------------------------------
  def _checks(self) -> str:
    arguments = (*self.binding.arguments, *filter(None, [self.binding.returned]))
    roles = {a.role for a in arguments} & {Role.INFO, Role.STATUS}
    return "".join(self._check(role) for role in sorted(roles, key=lambda r: r.name))

  def _check(self, role: Role) -> str:
    """The function that throws for another number than 0."""
    word = role.name.lower()
    lines = [f"  {self._throw(self._condition(k), t)}" for k, t in self.glue.errors]
    if role is Role.INFO:
      invalid = "info = %lld: argument %lld of C, '%s', is not valid%s"
      items = ", ".join(_quoted(_short(a.text)) for a in self.binding.arguments)
      lines += [
        f"  static const char* const kArguments[] = {{{items}}};",
        f"  if (number < 0 && number >= -{len(self.binding.arguments)})",
        f"    throw cg::Error({_quoted(f'{self._prefix()}{invalid}')}, "
        "number, -number, kArguments[-number - 1], where);",
      ]
    default = "info = {info}" if role is Role.INFO else "status {info}"
    lines.append(f"  {self._throw('true', default)}")
    body = "\n".join(lines)
    return (
      f"[[noreturn]] void fail_{word}(long long number, const char* where) {{\n{body}\n}}\n"
      f"void check_{word}(long long number, int64_t index) {{\n"
      "  if (number == 0) [[likely]] return;\n"
      '  char where[40] = "";\n'
      "  if (index >= 0)\n"
      '    std::snprintf(where, sizeof where, " at element %lld", (long long)index);\n'
      f"  fail_{word}(number, where);\n}}\n"
    )

  def _prefix(self) -> str:
    return f"{self.glue.function}: " if self.glue.function else ""

  def _condition(self, key: int | str) -> str:
    if isinstance(key, int):
      return f"number == {key}"
    return {">0": "number > 0", "<0": "number < 0"}.get(key, "true")

  def _throw(self, condition: str, text: str) -> str:
    parts = re.split(r"\{info\}", f"{self._prefix()}{text}")
    form = "%lld".join(part.replace("%", "%%") for part in parts) + "%s"
    values = ["number"] * (len(parts) - 1)
    thrown = f"throw cg::Error({', '.join([_quoted(form), *values, 'where'])});"
    return thrown if condition == "true" else f"if ({condition}) {thrown}"


def rank(array: Array, loop: bool) -> int:
  """Of the kernel's parameter; -1 for any."""
  if loop:
    return -1
  if not array.type.pointer:
    return 0
  return -1 if array.dims is None else len(array.dims)


def _short(text: str) -> str:
  return re.sub(r"\s+", " ", text)


def _quoted(text: str) -> str:
  """A C++ string literal."""
  return json.dumps(text, ensure_ascii=False)
