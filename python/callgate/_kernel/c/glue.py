# SPDX-License-Identifier: Apache-2.0
"""The C++ between a kernel's call and a C function: generated from a `Binding`, then compiled.

It does not contain the function's address, so the compiled glue can be kept on disk. The address is
the first word of the kernel's user data; the addresses of `pointers=` follow.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from callgate._kernel.c.arguments import OPERANDS, RESULTS, Array, Binding, CArgument, Role
from callgate._kernel.c.types import CType, Declaration
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.source import cpp_type

_quoted = functools.partial(json.dumps, ensure_ascii=False)  # a C++ string literal


class Glue(NamedTuple):
  """All data for a source: in it v_x are views, s_k static values, n_n dimensions."""

  declaration: Declaration  # the C function's declaration
  binding: Binding  # the sources of its arguments
  loop: bool  # True if it is called for each element
  cast: bool  # True if its numbers convert as in C
  columns_first: frozenset[str]  # arrays that C gets in column-major order
  errors: tuple[tuple[int | str, str], ...]  # messages for numbers of `info` and `status`
  pointers: tuple[str, ...]  # names of the addresses after the function's
  parallel: bool  # True if a loop may run on several threads

  def source(self, parameters: Sequence[Parameter], dtypes: Mapping[str, Any]) -> str:
    """Returns the C++ of a kernel with these parameters, for arrays of these dtypes."""
    helpers = (
      (Path(__file__).parent / "glue.h").read_text(encoding="utf-8").replace("#pragma once\n", "")
    )
    head, names = list[str](), ", ".join(["glue", *(p.name for p in parameters), "context"])
    for p in parameters:
      # Complex numbers are pairs, see glue.h.
      of = cpp_type(dtypes.get(p.name, p.dtype)).replace("std::complex<", "pair<")
      view = "" if p.kind is Kind.NUMBER else f", {p.rank}"
      kind = of if p.kind is Kind.SCALAR else f"cg::{p.kind.cpp}<{of}{view}>"
      head.append(f"{kind} {'s' if p.kind is Kind.NUMBER else 'v'}_{p.name}")
    head.append("cg::Context& context")
    types = ", ".join(p.type.cpp for p in self.declaration.all_parameters)
    kind = f"{self.declaration.result.cpp} (*)({types})"
    lines = [
      "void* const* user_data = static_cast<void* const*>(context.user_data());",
      f"const auto function = reinterpret_cast<{kind}>(user_data[0]);",
      *(f"const int64_t n_{s} = extent(v_{a}, {i});" for s, (a, i) in self.binding.symbols.items()),
      *(self._loop(self._call()) if self.loop else self._call()),
    ]
    body = "".join(f"  {line}\n" for line in lines)
    return (
      f"{helpers}\nnamespace {{\n{self._checks()}void glue({', '.join(head)}) {{\n{body}}}\n"
      f'callgate_kernel callgate_made = ::callgate::detail::describe<&glue>("{names}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made);\n}\n"
    )

  # -- the call ----------------------------------------------------------------------------------
  def _call(self) -> list[str]:
    """Returns the call of the function, for one element in a loop."""
    before, after = list[str](), list[str]()  # statements before and after the call
    given = iter(self.binding.arguments)
    passed = [
      parameter.fixed or self._passed(next(given), parameter.type, f"c_{i}", before, after)
      for i, parameter in enumerate(self.declaration.all_parameters)
    ]
    call, returned = f"function({', '.join(passed)})", self.binding.returned
    if returned is not None and returned.role is Role.OUT:
      call = self._store(returned, call)
    elif returned is not None and returned.role is not Role.IGNORED:
      call = self._check(returned, call)
    return [*before, f"{call};", *after]

  def _store(self, argument: CArgument, value: str) -> str:
    return f"store(v_{argument.name}.data()[{'i' if self.loop else '0'}], {value})"

  def _check(self, argument: CArgument, value: str) -> str:
    return f"check_{argument.role.name.lower()}({value}, {'i' if self.loop else '-1'})"

  def _passed(
    self, argument: CArgument, kind: CType, name: str, before: list[str], after: list[str]
  ) -> str:
    """Returns the C++ value of an argument; `name` is free for a variable."""
    of, literal, value = kind.element, argument.literal, ""
    if argument.value is not None:
      statics = self.binding.statics
      value = argument.value.cpp(lambda n: f"int64_t(s_{n}.value())" if n in statics else f"n_{n}")
    if argument.name in self.binding.arrays and not self.loop:
      return self._array(self.binding.arrays[argument.name], kind, before, after)
    match argument.role:
      case Role.NULL:
        return "nullptr"
      case Role.ADDRESS:
        return f"static_cast<{of}*>(user_data[{1 + self.pointers.index(argument.name)}])"
      case Role.SCRATCH:
        return f"context.scratch<{'char' if kind.dtype is None else of}>({value})"
      case Role.LITERAL if isinstance(literal, str) and kind.pointer:
        content = ", ".join(map(str, (*literal.encode(), 0)))
        before.append(f"unsigned char {name}[] = {{{content}}};")
        return f"pointer<{of}>(&{name}[0])"
      case Role.LITERAL if isinstance(literal, complex):
        value = f"load<{of}>(pair<double>{{{literal.real!r}, {literal.imag!r}}})"
      case Role.LITERAL if isinstance(literal, int) and literal >= 2**63:
        value = f"{of}({literal}u)"
      case Role.LITERAL:
        number = literal.encode()[0] if isinstance(literal, str) else literal
        value = f"static_cast<{of}>({int(number) if isinstance(number, bool) else number!r})"
      case Role.VALUE:
        value = f"static_cast<{of}>({value})"
      case Role.STATIC:
        value = f"load<{of}>(s_{argument.name}.value())"
      case Role.INFO | Role.STATUS:
        value = "0"
        after.insert(0, f"{self._check(argument, name)};")
      case Role.OUT:
        value = "{}"
        after.append(f"{self._store(argument, name)};")
      case _:  # an operand's element
        value = f"load<{of}>(v_{argument.name}.data()[i_{argument.name}])"
    if not kind.pointer:
      return value
    before.append(f"{of} {name} = {value};")
    return f"&{name}"

  def _array(self, array: Array, kind: CType, before: list[str], after: list[str]) -> str:
    view, pointer = f"v_{array.name}", f"p_{array.name}"
    if not kind.pointer:
      return f"load<{kind.element}>({view})"
    if not any(
      line.startswith(f"auto* {pointer} = ") for line in before
    ):  # otherwise it is declared already
      ordered = array.name in self.columns_first and (array.dims is None or len(array.dims) > 1)
      memory = f"copied(context, {view}, {str(ordered).lower()})"
      if ordered and array.role in RESULTS:
        after.append(f"put_back(context, {pointer}, {view});")
      if ordered and array.role is Role.OUT:
        memory = f"like(context, {view})"
      elif not ordered and array.role is not Role.COPY:
        memory = f"{view}.data()"
      before.append(f"auto* {pointer} = {memory};")
    return f"pointer<{kind.element}>({pointer})"

  def _loop(self, call: list[str]) -> list[str]:
    """Returns a loop of calls over the elements of the results."""
    operands = [array.name for array in self.binding.having(OPERANDS)]
    first = self.binding.having(RESULTS)[0].name
    size = f"0, v_{first}.size()"
    run = f"context.parallel_ranges({size}, 1024, range);" if self.parallel else f"range({size});"
    return [
      f"const int64_t* dims = v_{first}.extents();",
      f"const int rank = v_{first}.rank();",
      *(f"const Walk w_{name}(context, v_{name}, v_{first});" for name in operands),
      # Along a row the operand advances by its innermost stride, which is 0 or 1.
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
    """Returns the function that throws for numbers other than 0 in `info` and `status`."""
    arguments, checks = self.binding.arguments, ""
    used = {a.role for a in (*arguments, self.binding.returned) if a is not None}
    prefix = f"{self.declaration.name}: " if self.declaration.name else ""
    conditions = {">0": "if (number > 0) ", "<0": "if (number < 0) ", "else": ""}

    def thrown(key: int | str, text: str) -> str:
      parts = [part.replace("%", "%%") for part in f"{prefix}{text}".split("{info}")]
      values = [_quoted("%lld".join(parts) + "%s"), *["number"] * (len(parts) - 1), "where"]
      condition = conditions.get(str(key), f"if (number == {key}) ")
      return f"  {condition}throw cg::Error({', '.join(values)});\n"

    for role in (r for r in (Role.INFO, Role.STATUS) if r in used):
      word, body = role.name.lower(), "".join(thrown(*error) for error in self.errors)
      if role is Role.INFO:
        items = ", ".join(_quoted(a.text) for a in arguments)
        form = _quoted(f"{prefix}info = %lld: argument %lld of C, '%s', is not valid%s")
        body += (
          f"  static const char* const kArguments[] = {{{items}}};\n"
          f"  if (number < 0 && number >= -{len(arguments)})\n"
          f"    throw cg::Error({form}, number, -number, kArguments[-number - 1], where);\n"
        )
      body += thrown("else", "info = {info}" if role is Role.INFO else "status {info}")
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
