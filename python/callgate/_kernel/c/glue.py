"""The C++ between a kernel's call and a C function: written from a `Binding`, then compiled.

The function's address is not in it. It is the first word of the kernel's user data, and the
addresses of `pointers=` follow it; so the compiled glue can be kept on disk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from callgate._kernel.c.arguments import RESULTS, Argument, Array, Binding, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.types import CType, Declaration
from callgate._kernel.parameters import Kind
from callgate._kernel.source import cpp_type


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Glue:
  """All that the source follows from."""

  declaration: Declaration  # of the C function
  binding: Binding  # where its arguments come from
  loop: bool  # whether it is called for each element
  columns_first: frozenset[str]  # arrays that C gets in column-major order
  errors: tuple[tuple[int | str, str], ...]  # texts for numbers of `info` and `status`
  pointers: tuple[str, ...]  # names of the addresses after the function's
  parallel: bool  # whether a loop may run on several threads

  def source(self, dtypes: Mapping[str, np.dtype[Any]]) -> str:
    """The C++ for arrays of these dtypes."""
    return _Writer(self, dtypes).write()


def element(dtype: np.dtype[Any]) -> str:
  """The C++ type of an array's elements: complex numbers are pairs, see glue.h."""
  return cpp_type(dtype).replace("std::complex<", "pair<")


class _Writer:
  """One source. C++ names: v_x views, s_k static values, n_n dimensions, c_i arguments.

  Attributes:
    before, after: statements around the call of the function.
    pointers: arrays that have a pointer by now.
  """

  def __init__(self, glue: Glue, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    self.glue, self.binding, self.dtypes = glue, glue.binding, dtypes
    self.before, self.after, self.pointers = list[str](), list[str](), set[str]()

  def write(self) -> str:
    helpers = (Path(__file__).parent / "glue.h").read_text().replace("#pragma once\n", "")
    head = [self._parameter(name) for name in self.binding.names]
    names = [*self.binding.names, "context"]
    call = self._call()
    body = [
      "void* const* user_data = static_cast<void* const*>(context.user_data());",
      f"const auto function = reinterpret_cast<{self._function_type()}>(user_data[0]);",
      *(f"const int64_t n_{s} = extent(v_{a}, {i});" for s, (a, i) in self.binding.symbols.items()),
      *(self._loop(call) if self.glue.loop else call),
    ]
    lines = "\n".join(f"  {line}" for line in body)
    return (
      f"{helpers}\n"
      f"namespace {{\n{self._checks()}"
      f"void glue({', '.join([*head, 'cg::Context& context'])}) {{\n{lines}\n}}\n"
      "callgate_kernel callgate_made = ::callgate::detail::describe<&glue>"
      f'("glue, {", ".join(names)}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made);\n}\n"
    )

  # -- types and values --------------------------------------------------------------------------
  def _parameter(self, name: str) -> str:
    """Of the kernel, as C++ declares it."""
    array = self.binding.arrays.get(name)
    if array is None:
      dtype = self.binding.statics[name].dtype
      assert dtype is not None
      return f"cg::Attr<{element(dtype)}> s_{name}"
    of, kind = element(self.dtypes[name]), kind_of(array, self.glue.loop)
    if kind is Kind.SCALAR:
      return f"{of} v_{name}"
    return f"cg::{kind.cpp}<{of}, {rank(array, self.glue.loop)}> v_{name}"

  def _function_type(self) -> str:
    declaration = self.glue.declaration
    types = [p.type.cpp for p in declaration.all_parameters]
    return f"{declaration.result.cpp} (*)({', '.join(types)})"

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

  # -- the call ----------------------------------------------------------------------------------
  def _call(self) -> list[str]:
    """The call of the function, for one element in a loop."""
    passed: list[str] = []
    given = iter(self.binding.arguments)
    for parameter in self.glue.declaration.all_parameters:
      passed.append(
        parameter.fixed or self._passed(next(given), parameter.type, f"c_{len(passed)}")
      )
    call, returned = f"function({', '.join(passed)})", self.binding.returned
    if returned is None or returned.role is Role.IGNORED:
      call = f"{call};"
    elif returned.role is Role.OUT:
      call = f"store({self._element(returned.name)}, {call});"
    else:
      call = f"check_{returned.role.name.lower()}({call}, {self._index});"
    return [*self.before, call, *self.after]

  @property
  def _index(self) -> str:
    """Of the element that messages name."""
    return "i" if self.glue.loop else "-1"

  def _element(self, name: str) -> str:
    """The one element of a result that the call writes."""
    return f"v_{name}.data()[i]" if self.glue.loop else f"*v_{name}.data()"

  def _passed(self, argument: Argument, kind: CType, name: str) -> str:
    """What is passed for an argument, as C++; `name` is free for a variable."""
    if argument.name not in self.binding.arrays:
      return self._other(argument, kind, name)
    if not self.glue.loop:
      return self._array(argument, kind)
    if argument.role is Role.OUT:
      self.before.append(f"{kind.element} {name} = {{}};")
      self.after.append(f"store({self._element(argument.name)}, {name});")
      return f"&{name}"
    value = f"load<{kind.element}>(v_{argument.name}.data()[i_{argument.name}])"
    return self._by_address(kind, name, value) if kind.pointer else value

  def _by_address(self, kind: CType, name: str, value: str) -> str:
    self.before.append(f"{kind.element} {name} = {value};")
    return f"&{name}"

  def _array(self, argument: Argument, kind: CType) -> str:
    array = self.binding.arrays[argument.name]
    view = f"v_{array.name}"
    if not kind.pointer:
      return f"load<{kind.element}>({view})"
    if array.name not in self.pointers:
      self.pointers.add(array.name)
      self.before.append(f"auto* p_{array.name} = {self._memory(array, view)};")
    return f"pointer<{kind.element}>(p_{array.name})"

  def _memory(self, array: Array, view: str) -> str:
    ordered = array.name in self.glue.columns_first and rank(array, loop=False) not in (0, 1)
    if not ordered:
      return f"copied(context, {view}, false)" if array.role is Role.COPY else f"{view}.data()"
    if array.role in RESULTS:
      self.after.append(f"put_back(context, p_{array.name}, {view});")
    return f"like(context, {view})" if array.role is Role.OUT else f"copied(context, {view}, true)"

  def _other(self, argument: Argument, kind: CType, name: str) -> str:
    """An argument that is no array."""
    role = argument.role
    if role is Role.NULL:
      return "nullptr"
    if role is Role.ADDRESS:
      index = 1 + self.glue.pointers.index(argument.name)
      return f"static_cast<{kind.element}*>(user_data[{index}])"
    if role is Role.SCRATCH:
      assert argument.value is not None
      of = kind.element if kind.dtype is not None else "char"
      return f"context.scratch<{of}>({self._expression(argument.value)})"
    if role in (Role.INFO, Role.STATUS):
      self.after.insert(0, f"check_{role.name.lower()}({name}, {self._index});")
      return self._by_address(kind, name, "0")
    if isinstance(argument.literal, str) and kind.pointer:
      content = ", ".join(str(byte) for byte in (*argument.literal.encode(), 0))
      self.before.append(f"unsigned char {name}[] = {{{content}}};")
      return f"pointer<{kind.element}>(&{name}[0])"
    value = self._value(argument, kind)
    return self._by_address(kind, name, value) if kind.pointer else value

  def _loop(self, call: list[str]) -> list[str]:
    """A loop of calls over the elements of the results."""
    operands = [array.name for array in self.binding.operands]
    first = self.binding.results[0].name
    run = (
      f"context.parallel_ranges(0, v_{first}.size(), 1024, range);"
      if self.glue.parallel
      else f"range(0, v_{first}.size());"
    )
    return [
      f"const int64_t* dims = v_{first}.extents();",
      f"const int rank = v_{first}.rank();",
      *(f"const Walk w_{name}(context, v_{name}, v_{first});" for name in operands),
      # Along a row the operand moves by its innermost stride, which is 0 or 1.
      *(f"const int64_t d_{n} = rank > 0 ? w_{n}.strides[rank - 1] : 0;" for n in operands),
      "auto range = [&](int64_t begin, int64_t end) {",
      "  by_rows(dims, rank, begin, end, [&](int64_t start, int64_t count) {",
      *(f"    int64_t i_{name} = w_{name}.at(dims, rank, start);" for name in operands),
      "    for (int64_t i = start; i < start + count; ++i) {",
      *(f"      {line}" for line in call),
      *(f"      i_{name} += d_{name};" for name in operands),
      "    }",
      "  });",
      "};",
      run,
    ]

  # -- failures ----------------------------------------------------------------------------------
  def _checks(self) -> str:
    arguments = (*self.binding.arguments, self.binding.returned)
    roles = {a.role for a in arguments if a is not None}
    return "".join(self._check(role) for role in (Role.INFO, Role.STATUS) if role in roles)

  def _check(self, role: Role) -> str:
    """The function that throws for another number than 0."""
    word = role.name.lower()
    lines = [self._throw(key, text) for key, text in self.glue.errors]
    if role is Role.INFO:
      invalid = f"{self._prefix()}info = %lld: argument %lld of C, '%s', is not valid%s"
      items = ", ".join(_quoted(a.text) for a in self.binding.arguments)
      lines += [
        f"static const char* const kArguments[] = {{{items}}};",
        f"if (number < 0 && number >= -{len(self.binding.arguments)})",
        f"  throw cg::Error({_quoted(invalid)}, number, -number, kArguments[-number - 1], where);",
      ]
    lines.append(self._throw("else", "info = {info}" if role is Role.INFO else "status {info}"))
    body = "".join(f"  {line}\n" for line in lines)
    return (
      f"[[noreturn]] void fail_{word}(long long number, const char* where) {{\n{body}}}\n"
      f"void check_{word}(long long number, int64_t index) {{\n"
      "  if (number == 0) [[likely]] return;\n"
      '  char where[40] = "";\n'
      "  if (index >= 0)\n"
      '    std::snprintf(where, sizeof where, " at element %lld", (long long)index);\n'
      f"  fail_{word}(number, where);\n}}\n"
    )

  def _prefix(self) -> str:
    return f"{name}: " if (name := self.glue.declaration.name) else ""

  def _throw(self, key: int | str, text: str) -> str:
    """Throws for the numbers that a key of `errors=` stands for."""
    parts = f"{self._prefix()}{text}".split("{info}")
    form = "%lld".join(part.replace("%", "%%") for part in parts) + "%s"
    values = ["number"] * (len(parts) - 1)
    thrown = f"throw cg::Error({', '.join([_quoted(form), *values, 'where'])});"
    conditions = {">0": "if (number > 0) ", "<0": "if (number < 0) ", "else": ""}
    return f"{conditions.get(str(key), f'if (number == {key}) ')}{thrown}"


def kind_of(array: Array, loop: bool) -> Kind:
  if array.role in RESULTS:
    return Kind.OUT if array.role is Role.OUT else Kind.INOUT
  return Kind.IN if loop or array.type.pointer else Kind.SCALAR


def rank(array: Array, loop: bool) -> int:
  """Of the kernel's parameter; -1 for any."""
  if loop:
    return -1
  if not array.type.pointer:
    return 0
  return -1 if array.dims is None else len(array.dims)


def _quoted(text: str) -> str:
  """A C++ string literal."""
  return json.dumps(text, ensure_ascii=False)
