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

from callgate._kernel.c.arguments import OPERANDS, RESULTS, Argument, Array, Binding, Role
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


def element(dtype: np.dtype[Any]) -> str:
  """The C++ type of an array's elements: complex numbers are pairs, see glue.h."""
  return cpp_type(dtype).replace("std::complex<", "pair<")


def source(glue: Glue, dtypes: Mapping[str, np.dtype[Any]]) -> str:
  """The C++ for arrays of these dtypes."""
  return _Writer(glue, dtypes).write()


class _Writer:
  """One source. C++ names: v_x views, s_k static values, n_n dimensions, c_i arguments.

  Attributes:
    before, after: statements around the call of the function.
    pointers: arrays that have a pointer by now.
  """

  def __init__(self, glue: Glue, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    self.glue, self.binding, self.dtypes = glue, glue.binding, dtypes
    self.before, self.after, self.pointers = list[str](), list[str](), set[str]()
    self._prefix = f"{glue.declaration.name}: " if glue.declaration.name else ""
    self.index = "i" if glue.loop else "-1"  # of the element that messages name
    self.at = "[i]" if glue.loop else "[0]"  # the element of a result that the call writes

  def write(self) -> str:
    helpers = (Path(__file__).parent / "glue.h").read_text().replace("#pragma once\n", "")
    head = [*map(self._parameter, self.binding.names), "cg::Context& context"]
    names = ", ".join([*self.binding.names, "context"])
    declaration, call = self.glue.declaration, self._call()
    types = ", ".join(p.type.cpp for p in declaration.all_parameters)
    kind = f"{declaration.result.cpp} (*)({types})"
    body = [
      "void* const* user_data = static_cast<void* const*>(context.user_data());",
      f"const auto function = reinterpret_cast<{kind}>(user_data[0]);",
      *(f"const int64_t n_{s} = extent(v_{a}, {i});" for s, (a, i) in self.binding.symbols.items()),
      *(self._loop(call) if self.glue.loop else call),
    ]
    lines = "\n".join(f"  {line}" for line in body)
    return (
      f"{helpers}\n"
      f"namespace {{\n{self._checks()}"
      f"void glue({', '.join(head)}) {{\n{lines}\n}}\n"
      f'callgate_kernel callgate_made = ::callgate::detail::describe<&glue>("glue, {names}");\n'
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

  def _expression(self, expression: Expression) -> str:
    return expression.cpp(
      lambda name: f"int64_t(s_{name}.value())" if name in self.binding.statics else f"n_{name}",
      "v_{}".format,
    )

  def _value(self, argument: Argument, kind: CType) -> str:
    """An argument that is a number, as C's type."""
    if argument.role is Role.STATIC:
      return f"load<{kind.element}>(s_{argument.name}.value())"
    if argument.value is not None:
      return f"static_cast<{kind.element}>({self._expression(argument.value)})"
    literal = argument.literal
    if isinstance(literal, complex):
      return f"load<{kind.element}>(pair<double>{{{literal.real!r}, {literal.imag!r}}})"
    if type(literal) is int and literal >= 2**63:
      return f"{kind.element}({literal}u)"
    if isinstance(literal, (bool, str)):
      literal = literal.encode()[0] if isinstance(literal, str) else int(literal)
    return f"static_cast<{kind.element}>({literal!r})"

  # -- the call ----------------------------------------------------------------------------------
  def _call(self) -> list[str]:
    """The call of the function, for one element in a loop."""
    given = iter(self.binding.arguments)
    passed = [
      parameter.fixed or self._passed(next(given), parameter.type, f"c_{i}")
      for i, parameter in enumerate(self.glue.declaration.all_parameters)
    ]
    call, returned = f"function({', '.join(passed)})", self.binding.returned
    if returned is not None and returned.role is Role.OUT:
      call = f"store(v_{returned.name}.data(){self.at}, {call})"
    elif returned is not None and returned.role is not Role.IGNORED:
      call = f"check_{returned.role.name.lower()}({call}, {self.index})"
    return [*self.before, f"{call};", *self.after]

  def _passed(self, argument: Argument, kind: CType, name: str) -> str:
    """What is passed for an argument, as C++; `name` is free for a variable."""
    if argument.name not in self.binding.arrays:
      return self._other(argument, kind, name)
    if not self.glue.loop:
      return self._array(argument, kind)
    if argument.role is Role.OUT:
      self.before.append(f"{kind.element} {name} = {{}};")
      self.after.append(f"store(v_{argument.name}.data(){self.at}, {name});")
      return f"&{name}"
    value = f"load<{kind.element}>(v_{argument.name}.data()[i_{argument.name}])"
    return self._by_address(kind, name, value) if kind.pointer else value

  def _by_address(self, kind: CType, name: str, value: str) -> str:
    self.before.append(f"{kind.element} {name} = {value};")
    return f"&{name}"

  def _array(self, argument: Argument, kind: CType) -> str:
    array = self.binding.arrays[argument.name]
    view, pointer = f"v_{array.name}", f"p_{array.name}"
    if not kind.pointer:
      return f"load<{kind.element}>({view})"
    if array.name not in self.pointers:
      self.pointers.add(array.name)
      ordered = array.name in self.glue.columns_first and rank(array, loop=False) not in (0, 1)
      memory = f"copied(context, {view}, {str(ordered).lower()})"
      if ordered and array.role in RESULTS:
        self.after.append(f"put_back(context, {pointer}, {view});")
      if ordered and array.role is Role.OUT:
        memory = f"like(context, {view})"
      elif not ordered and array.role is not Role.COPY:
        memory = f"{view}.data()"
      self.before.append(f"auto* {pointer} = {memory};")
    return f"pointer<{kind.element}>({pointer})"

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
      self.after.insert(0, f"check_{role.name.lower()}({name}, {self.index});")
      return self._by_address(kind, name, "0")
    if isinstance(argument.literal, str) and kind.pointer:
      content = ", ".join(str(byte) for byte in (*argument.literal.encode(), 0))
      self.before.append(f"unsigned char {name}[] = {{{content}}};")
      return f"pointer<{kind.element}>(&{name}[0])"
    value = self._value(argument, kind)
    return self._by_address(kind, name, value) if kind.pointer else value

  def _loop(self, call: list[str]) -> list[str]:
    """A loop of calls over the elements of the results."""
    operands = [array.name for array in self.binding.having(OPERANDS)]
    first = self.binding.having(RESULTS)[0].name
    run = f"range(0, v_{first}.size());"
    if self.glue.parallel:
      run = f"context.parallel_ranges(0, v_{first}.size(), 1024, range);"
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
    """For `info` and `status` the function that throws for another number than 0."""
    arguments = (*self.binding.arguments, self.binding.returned)
    used = {a.role for a in arguments if a is not None}
    checks = ""
    for role in (r for r in (Role.INFO, Role.STATUS) if r in used):
      word = role.name.lower()
      lines = [self._throw(key, text) for key, text in self.glue.errors]
      if role is Role.INFO:
        items = ", ".join(_quoted(a.text) for a in self.binding.arguments)
        form = _quoted(f"{self._prefix}info = %lld: argument %lld of C, '%s', is not valid%s")
        lines += [
          f"static const char* const kArguments[] = {{{items}}};",
          f"if (number < 0 && number >= -{len(self.binding.arguments)})",
          f"  throw cg::Error({form}, number, -number, kArguments[-number - 1], where);",
        ]
      lines.append(self._throw("else", "info = {info}" if role is Role.INFO else "status {info}"))
      body = "".join(f"  {line}\n" for line in lines)
      checks += (
        f"[[noreturn]] void fail_{word}(long long number, const char* where) {{\n{body}}}\n"
        f"void check_{word}(long long number, int64_t index) {{\n"
        "  if (number == 0) [[likely]] return;\n"
        '  char where[40] = "";\n'
        "  if (index >= 0)\n"
        '    std::snprintf(where, sizeof where, " at element %lld", (long long)index);\n'
        f"  fail_{word}(number, where);\n}}\n"
      )
    return checks

  def _throw(self, key: int | str, text: str) -> str:
    """Throws for the numbers that a key of `errors=` stands for."""
    parts = f"{self._prefix}{text}".split("{info}")
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
