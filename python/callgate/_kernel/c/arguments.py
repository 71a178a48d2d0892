# SPDX-License-Identifier: Apache-2.0
"""Reads `args=` of `callgate.cfunc`: maps a call's arrays to a C function's arguments.

`"n, a, x[n], 1, inout y[n], 1"` has one item for each C argument, in order. The glue code is
generated from the result of `read`, and calls are checked with it.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from callgate._kernel.c.expressions import Expression, parse
from callgate._kernel.c.types import CType, Declaration
from callgate._kernel.source import split_arguments

_MODED = re.compile(r"(out|inout|copy|static)\b\s*(.*)", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z_]\w*)\s*(?:\[(.*)\])?", re.DOTALL)
_SCRATCH = re.compile(r"scratch\s*\((.*)\)", re.DOTALL)
_RESERVED = ["out", "inout", "copy", "static", "scratch", "info", "status", "ignored", "NULL"]


class Role(enum.Enum):
  """The kind of value for a C argument."""

  IN = "an operand"
  COPY = "a copy of an operand, which C may write into"
  OUT = "a result"
  INOUT = "an operand and a result in one memory"
  STATIC = "a number fixed when the program is traced"
  VALUE = "an integer that follows from shapes"
  LITERAL = "a number or text"
  SCRATCH = "memory for the length of the call"
  INFO = "a number that is 0 for success, and -i for an invalid argument i, as LAPACK has it"
  STATUS = "a number that is 0 for success"
  NULL = "a null pointer"
  ADDRESS = "a pointer of pointers="
  IGNORED = "nothing: a return value"


ARRAYS = (Role.IN, Role.COPY, Role.OUT, Role.INOUT)
OPERANDS = (Role.IN, Role.COPY, Role.INOUT)
RESULTS = (Role.OUT, Role.INOUT)
_WRITTEN = (*RESULTS, Role.SCRATCH, Role.INFO, Role.STATUS)


class CArgument(NamedTuple):
  """One item of `args`."""

  text: str  # the user's text
  role: Role  # the kind of value
  name: str = ""  # the name of the array, static value or pointer
  dims: tuple[Expression, ...] | None = None  # an array's extents; None without them
  value: Expression | None = None  # the expression of VALUE, the size of SCRATCH
  literal: Any = None  # the value of LITERAL


class Array(NamedTuple):
  """An operand or result, with all its mentions combined."""

  name: str
  role: Role
  dims: tuple[Expression, ...] | None
  type: CType


class Binding(NamedTuple):
  """The content of `args`."""

  arguments: tuple[CArgument, ...]  # one for each parameter of the declaration
  returned: CArgument | None  # the use of the return value; None for void
  arrays: dict[str, Array]  # by name, in order of their first mention
  statics: dict[str, CType]  # static values with their C types
  symbols: dict[str, tuple[str, int]]  # dimensions, each with an operand and its axis

  @property
  def names(self) -> list[str]:
    """Arrays and static values in order of their first mention: the kernel's parameters."""
    mentions = [*self.arguments, *filter(None, [self.returned])]
    known = self.arrays.keys() | self.statics.keys()
    return list(dict.fromkeys(a.name for a in mentions if a.name in known))

  def having(self, roles: Collection[Role]) -> list[Array]:
    """Returns the arrays with these roles, such as its operands, in order."""
    return [a for a in self.arrays.values() if a.role in roles]


def read(
  text: str | None, declaration: Declaration, *, loop: bool, pointers: Collection[str]
) -> Binding:
  """Reads `args`, which a loop may omit; raises ValueError with the expected form."""
  if text is None:
    text = ", ".join(
      ("out " if p.type.pointer and not p.type.const else "")
      + (f"x{i}" if p.name in ("", *_RESERVED) else p.name)
      for i, p in enumerate(declaration.parameters)
    )
  before, arrow, after = " ".join(text.split()).rpartition("->")
  items = split_arguments(before if arrow else after, quotes="'\"")
  if len(items) != (count := len(declaration.parameters)):
    got = f"got {len(items)}: {', '.join(items) or 'none'}"
    raise ValueError(f"expected {count} items, one for each argument of '{declaration}', {got}")
  arguments = [_item(item, pointers) for item in items]
  # Names of dimensions and static values are expressions.
  numbers = {a.name for a in arguments if a.role is Role.STATIC}
  numbers |= {extent.symbol or "" for a in arguments for extent in a.dims or ()}
  for i, a in enumerate(arguments):
    if a.role is Role.IN and a.dims is None and a.name in numbers:
      arguments[i] = CArgument(a.text, Role.VALUE, value=parse(a.name))
  returned = _returned(after.strip() if arrow else "", declaration, loop)
  mentions = [(a, p.type) for a, p in zip(arguments, declaration.parameters, strict=True)]
  for argument, kind in mentions:
    _check(argument, kind, loop)
  if returned is not None:
    mentions.append((returned, declaration.result))
  arrays: dict[str, Array] = {}
  for argument, kind in mentions:
    if argument.role in ARRAYS:
      new = Array(argument.name, argument.role, argument.dims, kind)
      old = arrays.get(new.name)
      arrays[new.name] = new if old is None else _joined(old, new)
  statics = {a.name: kind for a, kind in mentions if a.role is Role.STATIC}
  symbols: dict[str, tuple[str, int]] = {}
  for array in arrays.values():
    for axis, extent in enumerate(array.dims or ()):
      if array.role in OPERANDS and extent.symbol not in (None, *statics):
        symbols.setdefault(extent.symbol, (array.name, axis))
  names = [*arrays, *statics, *symbols]
  if clash := sorted(name for name in names if names.count(name) > 1):
    raise ValueError(f"the name '{clash[0]}' is used for two things; rename one")
  known = symbols.keys() | {name for name, kind in statics.items() if kind.limits is not None}
  expressions = [argument.value for argument in arguments if argument.value is not None]
  expressions += [extent for array in arrays.values() for extent in array.dims or ()]
  for expression in expressions:
    if unknown := [*sorted(expression.names - known), *sorted(expression.arrays - arrays.keys())]:
      kinds = "a dimension of an operand (n of x[n]), an integer that is 'static', or an array"
      raise ValueError(f"'{expression.text}': '{unknown[0]}' is not known; expected {kinds}")
  if loop and all(array.role not in RESULTS for array in arrays.values()):
    raise ValueError("expected a result, 'out x' or '-> out x', got none")
  return Binding(tuple(arguments), returned, arrays, statics, symbols)


# -- items -----------------------------------------------------------------------------------------
def _item(text: str, pointers: Collection[str]) -> CArgument:
  moded = _MODED.fullmatch(text)
  mode, rest = moded.groups() if moded else ("", text)
  array, scratch = _ARRAY.fullmatch(rest), _SCRATCH.fullmatch(text)
  if mode and array is None:
    raise ValueError(f"'{text}': expected a name after '{mode}'")
  if array is not None and (mode or array[1] not in _RESERVED):
    name, inside = array.groups()
    if not mode and name in pointers:
      return CArgument(text, Role.ADDRESS, name)
    parts = split_arguments(inside or "", quotes="'\"")
    dims = tuple(_expression(text, part) for part in parts)
    return CArgument(text, Role[mode.upper() or "IN"], name, None if inside is None else dims)
  if text in ("info", "status", "NULL"):
    return CArgument(text, Role[text.upper()])
  if scratch:
    return CArgument(text, Role.SCRATCH, value=_expression(text, scratch[1]))
  try:
    literal = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return CArgument(text, Role.VALUE, value=_expression(text, text))
  if type(literal) in (bool, int, float, complex, str):
    return CArgument(text, Role.LITERAL, literal=literal)
  raise ValueError(f"'{text}': expected a number or text")


def _expression(item: str, text: str) -> Expression:
  try:
    return parse(text)
  except SyntaxError as error:
    raise ValueError(f"'{item}': {error.msg}") from None


def _returned(text: str, declaration: Declaration, loop: bool) -> CArgument | None:
  where, result = f"'-> {text}':", declaration.result
  if result.dtype is None and not result.pointer:
    if text:
      raise ValueError(f"{where} '{declaration}' returns nothing; remove the '->'")
    return None
  if text in ("status", "info", "ignored"):
    if text != "ignored" and (result.dtype is None or result.dtype.kind not in "iub"):
      raise ValueError(f"{where} expected a function that returns an integer")
    return CArgument(text, Role[text.upper()])
  text = text or ("out result" if loop else "")
  out = re.fullmatch(r"out\s+([A-Za-z_]\w*)", text)
  if out is None or result.pointer:
    start = f"'-> {text}': expected" if text else "expected at the end"
    ways = "'-> out name' (a result of rank 0), '-> status' (0 for success) or '-> ignored'"
    raise ValueError(f"{start} a use of the value that '{declaration}' returns: {ways}")
  return CArgument(text, Role.OUT, out[1], None if loop else ())


# -- checks ----------------------------------------------------------------------------------------
def _check(argument: CArgument, kind: CType, loop: bool) -> None:
  """Raises unless the C parameter accepts the argument."""
  role, expected = argument.role, ""
  whole = role in (Role.COPY, Role.INOUT, Role.SCRATCH) or argument.dims is not None
  if loop and whole:
    expected = "x, out x, static x or a value: a loop passes single elements"
  elif role in _WRITTEN and (not kind.pointer or kind.const or kind.opaque):
    expected = "a pointer to numbers that are not const"
  elif role in (Role.COPY, Role.ADDRESS, Role.NULL) and not kind.pointer:
    expected = "a pointer"
  elif role is Role.IN and not kind.pointer and argument.dims:
    expected = "no extents, since C takes one value"
  elif role in (Role.IN, Role.COPY) and kind.opaque:
    expected = "NULL or a name of pointers=, since no array has such elements"
  elif role in (Role.STATIC, Role.VALUE) and kind.dtype is None:
    expected = "a number, or a pointer to one"
  elif loop and role in (Role.IN, Role.OUT) and kind.dtype is None:
    expected = "a parameter with an element type"
  elif role in (Role.INFO, Role.STATUS) and kind.limits is None:
    expected = "a pointer to an integer"
  elif role is Role.LITERAL:
    expected = _literal_fits(argument.literal, kind)
  if expected:
    raise ValueError(f"'{argument.text}': expected {expected}; C has '{kind.text}' there")


def _literal_fits(value: Any, kind: CType) -> str:
  """Returns the expected value, or "" if the literal fits."""
  limits = kind.limits
  byte = limits is not None and limits.bits == 8
  if isinstance(value, str):
    if kind.pointer and (byte or (kind.dtype is None and not kind.opaque)):
      return ""
    return "" if byte and len(value.encode()) == 1 else "a number, since C takes no text"
  if kind.dtype is None:
    return "an array, NULL or a name of pointers="
  if type(value) is int and limits is not None:
    return "" if limits.min <= value <= limits.max else f"at most {limits.max}"
  kinds = {float: "fc", complex: "c"}.get(type(value), "biufc")
  return "" if kind.dtype.kind in kinds else "another number"


def _joined(a: Array, b: Array) -> Array:
  """Combines two mentions of an array, which pass the same memory to two C arguments."""
  roles = {a.role, b.role} - {Role.IN}
  dims = [d for d in (a.dims, b.dims) if d is not None]
  same = len({tuple(extent.text for extent in d) for d in dims}) < 2
  alike = a.type.pointer == b.type.pointer and (a.type.pointer or not roles)
  if len(roles) > 1 or not same or not alike or a.type.dtype != b.type.dtype:
    ways = " and as ".join(f"{x.role.value} ('{x.type.text}')" for x in (a, b))
    expected = "expected the same type, extents and role"
    raise ValueError(f"'{a.name}' is mentioned twice, as {ways}; {expected}")
  return Array(a.name, next(iter(roles), Role.IN), dims[0] if dims else None, a.type)
