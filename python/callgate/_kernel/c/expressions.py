"""Integer expressions over shapes, as `args=` of `callgate.cfunc` has them.

`max(1, n) * x.shape[0]` is read with Python's own parser. Python evaluates it while a call is
traced, for checks; C++ evaluates it while the kernel runs.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
  ast.Add: ("+", lambda a, b: a + b),
  ast.Sub: ("-", lambda a, b: a - b),
  ast.Mult: ("*", lambda a, b: a * b),
  ast.FloorDiv: ("floor_divide", lambda a, b: a // b),
  ast.Mod: ("floor_modulo", lambda a, b: a % b),
}
_FUNCTIONS = {"max": max, "min": min}


@dataclasses.dataclass(frozen=True)
class Expression:
  """An expression that `check` has found to be one.

  Attributes:
    text: as given.
    tree: its syntax.
  """

  text: str
  tree: ast.expr

  @property
  def names(self) -> frozenset[str]:
    """Dimensions and static values that it uses."""
    return frozenset(name for kind, name in _uses(self.tree) if kind == "number")

  @property
  def arrays(self) -> frozenset[str]:
    """Arrays whose shape it uses."""
    return frozenset(name for kind, name in _uses(self.tree) if kind == "array")

  @property
  def symbol(self) -> str | None:
    """The name, if it is nothing else."""
    return self.tree.id if isinstance(self.tree, ast.Name) else None

  def evaluate(self, numbers: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> int:
    """Its value.

    Raises:
      IndexError: an axis that the array doesn't have.
      ZeroDivisionError: a division by 0.
    """
    return _evaluate(self.tree, numbers, shapes)

  def cpp(self, number: Callable[[str], str], array: Callable[[str], str]) -> str:
    """C++ of type int64_t, from the names that numbers and views have there."""
    return _cpp(self.tree, number, array)


def parse(text: str) -> Expression:
  """Reads an expression.

  Raises:
    SyntaxError: it is none; the message says what can stand there.
  """
  tree = ast.parse(text.strip(), mode="eval").body
  return check(text, tree)


def check(text: str, tree: ast.expr) -> Expression:
  """The expression of a syntax tree; as `parse`."""
  for _ in _uses(tree):
    pass
  return Expression(text.strip(), tree)


def _attribute(node: ast.expr) -> tuple[str, str, int]:
  """(array, "size", 0), (array, "ndim", 0) or (array, "shape", axis)."""
  match node:
    case ast.Attribute(ast.Name(array), ("size" | "ndim") as what):
      return array, what, 0
    case ast.Subscript(ast.Attribute(ast.Name(array), "shape"), ast.Constant(int(axis))):
      return array, "shape", axis
    case ast.Subscript(
      ast.Attribute(ast.Name(array), "shape"), ast.UnaryOp(ast.USub(), ast.Constant(int(axis)))
    ):
      return array, "shape", -axis
    case ast.Call(ast.Name("len"), [ast.Name(array)], []):
      return array, "shape", 0
    case _:
      raise SyntaxError(
        "expected an integer, a dimension's name, x.size, x.ndim, x.shape[i], len(x), "
        f"+ - * // %, max(...), min(...), got {ast.unparse(node)!r}"
      )


def _parts(node: ast.expr) -> Sequence[ast.expr] | None:
  """What an operation is of; None for what is no operation."""
  match node:
    case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
      return left, right
    case ast.UnaryOp(ast.USub(), operand):
      return (operand,)
    case ast.Call(ast.Name(function), arguments, []) if function in _FUNCTIONS and arguments:
      return arguments
    case _:
      return None


def _uses(node: ast.expr) -> Iterator[tuple[str, str]]:
  match node:
    case ast.Name(name):
      yield "number", name
    case ast.Constant(value) if type(value) is int:
      return
    case _:
      parts = _parts(node)
      if parts is None:
        yield "array", _attribute(node)[0]
      for part in parts or ():
        yield from _uses(part)


def _evaluate(
  node: ast.expr, numbers: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> int:
  match node:
    case ast.Name(name):
      return numbers[name]
    case ast.Constant(int(value)):
      return value
    case _:
      pass
  parts = _parts(node)
  if parts is None:
    array, what, axis = _attribute(node)
    shape = shapes[array]
    if what == "shape" and not -len(shape) <= axis < len(shape):
      raise IndexError(f"'{array}' of shape {list(shape)} has no axis {axis}")
    return {"size": lambda: math.prod(shape), "ndim": lambda: len(shape)}.get(
      what, lambda: shape[axis]
    )()
  values = [_evaluate(part, numbers, shapes) for part in parts]
  if isinstance(node, ast.BinOp):
    return _OPERATORS[type(node.op)][1](*values)
  return -values[0] if isinstance(node, ast.UnaryOp) else _FUNCTIONS[_name(node)](values)


def _cpp(node: ast.expr, number: Callable[[str], str], array: Callable[[str], str]) -> str:
  match node:
    case ast.Name(name):
      return number(name)
    case ast.Constant(int(value)):
      return f"int64_t{{{value}}}"
    case _:
      pass
  parts = _parts(node)
  if parts is None:
    name, what, axis = _attribute(node)
    view = array(name)
    return {"size": f"{view}.size()", "ndim": f"int64_t{{{view}.rank()}}"}.get(
      what, f"extent({view}, {axis})"
    )
  values = [_cpp(part, number, array) for part in parts]
  if isinstance(node, ast.BinOp):
    operator = _OPERATORS[type(node.op)][0]
    if operator.isidentifier():
      return f"{operator}({values[0]}, {values[1]})"
    return f"({values[0]} {operator} {values[1]})"
  if isinstance(node, ast.UnaryOp):
    return f"(-{values[0]})"
  joined = values[0]
  for value in values[1:]:
    joined = f"{'larger' if _name(node) == 'max' else 'smaller'}({joined}, {value})"
  return joined


def _name(node: ast.expr) -> str:
  assert isinstance(node, ast.Call)
  assert isinstance(node.func, ast.Name)
  return node.func.id
