# SPDX-License-Identifier: Apache-2.0
"""Integer expressions over shapes, for `args=` of `callgate.cfunc`.

Python's own parser reads them. Python evaluates them during tracing, for checks; C++ evaluates them
when the kernel runs.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# The operations in Python and in C++, whose functions are in glue.h.
_OPERATIONS: dict[str, tuple[Callable[[int, int], int], str]] = {
  "Add": (operator.add, "({} + {})"),
  "Sub": (operator.sub, "({} - {})"),
  "Mult": (operator.mul, "({} * {})"),
  "FloorDiv": (operator.floordiv, "floor_divide({}, {})"),
  "Mod": (operator.mod, "floor_modulo({}, {})"),
  "max": (max, "larger({}, {})"),
  "min": (min, "smaller({}, {})"),
}


class Expression(NamedTuple):
  """A parsed expression."""

  text: str  # as given
  tree: ast.expr
  names: frozenset[str]  # the dimensions and static values that it uses
  arrays: frozenset[str]  # the arrays whose shapes it uses

  @property
  def symbol(self) -> str | None:
    """Its name, if it is a single name; else None."""
    return self.tree.id if isinstance(self.tree, ast.Name) else None

  def evaluate(self, numbers: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> int:
    """Returns its value; raises IndexError for an axis that the array lacks."""

    def extent(array: str, axis: int) -> int:
      shape = shapes[array]
      if not -len(shape) <= axis < len(shape):
        raise IndexError(f"'{array}' of shape {list(shape)} has no axis {axis}")
      return shape[axis]

    leaves: dict[str, Callable[..., int]] = {
      "integer": int,
      "number": lambda name: numbers[name],
      "size": lambda array: math.prod(shapes[array]),
      "ndim": lambda array: len(shapes[array]),
      "shape": extent,
    }
    return _fold(self.tree, leaves, lambda name: _OPERATIONS[name][0])

  def cpp(self, number: Callable[[str], str]) -> str:
    """Returns C++ of type int64_t; `number` returns the C++ of a name; views are called v_x."""
    leaves: dict[str, Callable[..., str]] = {
      "integer": "int64_t{{{}}}".format,
      "number": number,
      "size": "v_{}.size()".format,
      "ndim": "int64_t{{v_{}.rank()}}".format,
      "shape": "extent(v_{}, {})".format,
    }
    return _fold(self.tree, leaves, lambda name: _OPERATIONS[name][1].format)


def parse(text: str) -> Expression:
  """Reads an expression; raises SyntaxError with the allowed forms."""
  tree = ast.parse(text.strip(), mode="eval").body
  names, arrays = set[str](), set[str]()
  leaves: dict[str, Callable[..., Any]] = {"integer": int, "number": names.add}
  leaves |= dict.fromkeys(("size", "ndim", "shape"), lambda array, *_: arrays.add(array))
  _fold(tree, leaves, lambda _: lambda *_: None)
  return Expression(text.strip(), tree, frozenset(names), frozenset(arrays))


def _fold(
  node: ast.expr,
  leaves: Mapping[str, Callable[..., Any]],
  operation: Callable[[str], Callable[[Any, Any], Any]],
) -> Any:
  """Converts integers, names and shapes by `leaves`, and combines the results by operations."""

  def combined(name: str, *parts: ast.expr) -> Any:
    return functools.reduce(operation(name), (_fold(part, leaves, operation) for part in parts))

  match node:
    case ast.Name(name):
      return leaves["number"](name)
    case ast.Constant(value) if type(value) is int:
      return leaves["integer"](value)
    case ast.BinOp(left, kind, right) if type(kind).__name__ in _OPERATIONS:
      return combined(type(kind).__name__, left, right)
    case ast.UnaryOp(ast.USub(), operand):
      return combined("Sub", ast.Constant(0), operand)
    case ast.Call(ast.Name("max" | "min" as name), [_, *_] as arguments, []):
      return combined(name, *arguments)
    case ast.Attribute(ast.Name(array), ("size" | "ndim") as what):
      return leaves[what](array)
    case ast.Call(ast.Name("len"), [ast.Name(array)], []):
      return leaves["shape"](array, 0)
    case ast.Subscript(
      ast.Attribute(ast.Name(array), "shape"),
      (ast.Constant(int()) | ast.UnaryOp(ast.USub(), ast.Constant(int()))) as axis,
    ):
      return leaves["shape"](array, ast.literal_eval(axis))
    case _:
      kinds = "an integer, a dimension's name, x.size, x.ndim, x.shape[i], len(x), + - * // %"
      raise SyntaxError(f"expected {kinds}, max(...), min(...), got {ast.unparse(node)!r}")
