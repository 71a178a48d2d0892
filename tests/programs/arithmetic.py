# SPDX-License-Identifier: Apache-2.0
"""Operations of JAX's own between the calls: arithmetic, shapes, types."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from program import (
  FLOATS,
  INTEGERS,
  NARROW_FLOATS,
  OTHERS,
  Array,
  Context,
  Pure,
  Scope,
  drawn,
)

# name: (Python's text on x for NumPy and JAX alike, the oracle's function, its derivative's text)
FUNCTIONS: dict[str, tuple[str, Any, str]] = {
  "sin": ("{np}.sin({x})", duals.sin, "jnp.cos({x})"),
  "tanh": ("{np}.tanh({x})", duals.tanh, "1 - jnp.tanh({x}) ** 2"),
  "half": (
    "{x} * 0.5 + 0.25",
    lambda x: duals.shifted(duals.scaled(x, 0.5), 0.25),
    "0.5 + 0 * {x}",
  ),
  "minus": ("-{x}", lambda x: duals.scaled(x, -1.0), "-1 + 0 * {x}"),
}
OF_INTEGERS: dict[str, tuple[str, Any, str]] = {
  "xor": ("{x} ^ 5", lambda x: x ^ np.asarray(5, x.dtype), ""),
  "shift": ("{x} >> 1", lambda x: x >> np.asarray(1, x.dtype), ""),
}
OF_BOOLEANS: dict[str, tuple[str, Any, str]] = {"not": ("~{x}", lambda x: ~x, "")}
OF_OTHERS: dict[str, tuple[str, Any, str]] = {"same": ("{x}", lambda x: x, "")}


def functions(type_: Array) -> dict[str, tuple[str, Any, str]]:
  """The functions of each element that arrays of a type have."""
  if type_.dtype in FLOATS:
    return FUNCTIONS
  if type_.dtype in INTEGERS:
    return OF_INTEGERS
  return OF_BOOLEANS if type_.dtype == "bool" else OF_OTHERS


ALL = {**FUNCTIONS, **OF_INTEGERS, **OF_BOOLEANS, **OF_OTHERS}


def numpy_dtype(name: str) -> np.dtype[Any]:
  return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclasses.dataclass(frozen=True)
class Unary(Pure):
  kind: str

  def text(self, *operands: str) -> str:
    return ALL[self.kind][0].format(np="jnp", x=operands[0])

  def value(self, *operands: Any) -> Any:
    return ALL[self.kind][1](operands[0])


@dataclasses.dataclass(frozen=True)
class Binary(Pure):
  kind: str  # "+" or "*"

  def text(self, *operands: str) -> str:
    return f"{operands[0]} {self.kind} {operands[1]}"

  def value(self, *operands: Any) -> Any:
    with np.errstate(over="ignore"):
      return duals.add(*operands) if self.kind == "+" else duals.mul(*operands)


@dataclasses.dataclass(frozen=True)
class Sum(Pure):
  def text(self, *operands: str) -> str:
    return f"jnp.sum({operands[0]})"

  def value(self, *operands: Any) -> Any:
    return duals.linear(lambda x: np.asarray(np.sum(x, dtype=x.dtype)), operands[0])


@dataclasses.dataclass(frozen=True)
class Broadcast(Pure):
  shape: tuple[int, ...]

  def text(self, *operands: str) -> str:
    return f"jnp.broadcast_to({operands[0]}, {self.shape})"

  def value(self, *operands: Any) -> Any:
    return duals.linear(lambda x: np.broadcast_to(x, self.shape), operands[0])


@dataclasses.dataclass(frozen=True)
class Reshape(Pure):
  shape: tuple[int, ...]

  def text(self, *operands: str) -> str:
    return f"jnp.reshape({operands[0]}, {self.shape})"

  def value(self, *operands: Any) -> Any:
    return duals.linear(lambda x: np.reshape(x, self.shape), operands[0])


@dataclasses.dataclass(frozen=True)
class Transpose(Pure):
  def text(self, *operands: str) -> str:
    return f"jnp.transpose({operands[0]})"

  def value(self, *operands: Any) -> Any:
    return duals.linear(np.transpose, operands[0])


@dataclasses.dataclass(frozen=True)
class First(Pure):
  def text(self, *operands: str) -> str:
    return f"{operands[0]}[0]"

  def value(self, *operands: Any) -> Any:
    return duals.linear(lambda x: x[0], operands[0])


@dataclasses.dataclass(frozen=True)
class Ramp(Pure):
  """Copies along a new axis, that differ: x, x + 1, ..."""

  number: int
  axis: int

  def text(self, *operands: str) -> str:
    each = ", ".join(f"{operands[0]} + {i}" for i in range(self.number))
    return f"jnp.stack([{each}], {self.axis})"

  def value(self, *operands: Any) -> Any:
    each = [duals.shifted(operands[0], i) for i in range(self.number)]
    return duals.linear_of_all(lambda xs: np.stack(xs, self.axis), each)


class Joined(Pure):
  """The first operand and half of the sum of each other one."""

  def text(self, *operands: str) -> str:
    first, *others = operands
    return f"{first} + 0.5 * ({' + '.join(f'jnp.sum({x})' for x in others)})"

  def value(self, *operands: Any) -> Any:
    total = operands[0]
    for other in operands[1:]:
      half = duals.linear(lambda x: np.asarray(0.5 * np.sum(x)), other)
      total = duals.add(total, half)
    return total


class Stopped(Pure):
  """The operand, without derivatives."""

  def text(self, *operands: str) -> str:
    return f"jax.lax.stop_gradient({operands[0]})"

  def value(self, *operands: Any) -> Any:
    return duals.plain(operands[0])


class Much(Pure):
  """The operand, behind so much work that JAX doesn't run the program within its call."""

  transformation = "much work"

  def text(self, *operands: str) -> str:
    x = operands[0]
    return f"{x} + 0 * jnp.sum(jnp.tanh(jnp.arange(65536.0) + jnp.sum({x})))"

  def value(self, *operands: Any) -> Any:
    return operands[0]


@dataclasses.dataclass(frozen=True)
class Constant(Pure):
  """An array of NumPy's, which no operand of the program has a part in."""

  number: float
  shape: tuple[int, ...]

  def text(self, *operands: str) -> str:
    return f"np.full({self.shape}, {self.number}, 'float32')"

  def value(self, *operands: Any) -> Any:
    return np.full(self.shape, self.number, np.float32).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Above(Pure):
  """True where an element is above a threshold."""

  threshold: float

  def text(self, *operands: str) -> str:
    return f"{operands[0]} > {self.threshold}"

  def value(self, *operands: Any) -> Any:
    from oracle import CLOSE, Ambiguous

    x = duals.plain(operands[0])
    if x.size and np.min(np.abs(x - self.threshold)) < CLOSE:
      raise Ambiguous("an element is close to its threshold")
    return np.asarray(x > self.threshold)


@dataclasses.dataclass(frozen=True)
class Where(Pure):
  def text(self, *operands: str) -> str:
    return f"jnp.where({', '.join(operands)})"

  def value(self, *operands: Any) -> Any:
    chosen = duals.plain(operands[0])
    return duals.linear_of_all(lambda two: np.where(chosen, *two), list(operands[1:]))


@dataclasses.dataclass(frozen=True)
class Convert(Pure):
  """To another dtype, by way of whole numbers from 0 to 3: all dtypes have these."""

  dtype: str

  def text(self, *operands: str) -> str:
    whole = f"jnp.clip(jnp.floor(jnp.abs({operands[0]})), 0, 3)"
    return f"jax.lax.stop_gradient({whole}).astype('{self.dtype}')"

  def value(self, *operands: Any) -> Any:
    from oracle import CLOSE, Ambiguous

    x = duals.plain(operands[0])
    if x.size and np.min(np.abs(x - np.round(x))) < CLOSE:
      raise Ambiguous("an element is close to a whole number")
    return np.clip(np.floor(np.abs(x)), 0, 3).astype(numpy_dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class ToFloat(Pure):
  def text(self, *operands: str) -> str:
    return f"jnp.real({operands[0]}).astype('float32')"

  def value(self, *operands: Any) -> Any:
    return np.real(operands[0]).astype(np.float32).astype(np.float64)


@drawn("arithmetic")
def unary(scope: Scope, context: Context) -> bool:
  var = scope.pick()
  kind = scope.draw(st.sampled_from(list(functions(var.type))))
  scope.add(Unary(kind), [var], var.type)
  return True


@drawn("arithmetic")
def binary(scope: Scope, context: Context) -> bool:
  floats = scope.of(lambda t: t.is_float)
  if not floats:
    return False
  left = scope.pick(floats)
  rights = [var for var in floats if var.type == left.type or not var.type.shape]
  right = scope.pick(rights)
  scope.add(Binary(scope.draw(st.sampled_from("+*"))), [left, right], left.type)
  return True


@drawn("arithmetic")
def much(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  scope.add(Much(), [var], var.type)
  return True


@drawn("arithmetic")
def shapes(scope: Scope, context: Context) -> bool:
  var = scope.pick()
  shape, size = var.type.shape, int(np.prod(var.type.shape, dtype=int))
  ways: list[tuple[Any, tuple[int, ...]]] = [
    (Reshape((size,)), (size,)),
    (Reshape((1, *shape)), (1, *shape)),
  ]
  if len(shape) < 3:
    ways.append((Broadcast((2, *shape)), (2, *shape)))
  if len(shape) > 1:
    ways.append((Transpose(), shape[::-1]))
  if shape and shape[0]:
    ways.append((First(), shape[1:]))
  if var.type.is_float:
    ways.append((Sum(), ()))
  op, to = scope.draw(st.sampled_from(ways))
  scope.add(op, [var], var.type.with_shape(*to))
  return True


@drawn("arithmetic")
def where(scope: Scope, context: Context) -> bool:
  floats = scope.of(lambda t: t.is_float)
  if not floats:
    return False
  left = scope.pick(floats)
  right = scope.draw(st.sampled_from([var for var in floats if var.type == left.type]))
  (mask,) = scope.add(
    Above(scope.draw(st.sampled_from([-0.3, 0.1, 0.6]))), [left], Array(left.type.shape, "bool")
  )
  scope.add(Where(), [mask, left, right], left.type)
  return True


@drawn("arithmetic")
def convert(scope: Scope, context: Context) -> bool:
  floats = scope.of(lambda t: t.is_float)
  if not floats:
    return False
  var = scope.pick(floats)
  dtype = scope.draw(st.sampled_from([*INTEGERS, *OTHERS, *NARROW_FLOATS]))
  scope.add(Convert(dtype), [var], Array(var.type.shape, dtype))
  return True


def a_float(scope: Scope) -> Any:
  """A float32 variable of the scope, made of another where there is none."""
  if floats := scope.of(lambda t: t.is_float):
    return scope.pick(floats)
  var = scope.pick()
  (made,) = scope.add(ToFloat(), [var], Array(var.type.shape, "float32"))
  return made


def last_float(scope: Scope) -> Any:
  floats = scope.of(lambda t: t.is_float)
  return floats[-1] if floats else a_float(scope)


def an_operand(scope: Scope) -> Any:
  """A variable of the scope, mostly; else a constant."""
  if scope.draw(st.integers(0, 9)):
    return scope.pick()
  return a_constant(scope, scope.pick().type.shape)


def a_constant(scope: Scope, shape: tuple[int, ...]) -> Any:
  number = scope.draw(st.sampled_from([0.75, -1.25]))
  (made,) = scope.add(Constant(number, shape), [], Array(shape, "float32"))
  return made


def fitted(scope: Scope, var: Any, type_: Array) -> Any:
  """A float32 variable with another shape: its sum, if need be."""
  if var.type == type_:
    return var
  if var.type.shape:
    (var,) = scope.add(Sum(), [var], var.type.with_shape())
  if type_.shape:
    (var,) = scope.add(Broadcast(type_.shape), [var], type_)
  return var


def joined(scope: Scope) -> None:
  """Adds a step that reads all floats of a scope's steps that none of them has read."""
  read = {var.number for step in scope.steps for var in step.operands}
  made = [var for step in scope.steps for var in step.results if var in scope.vars]
  left = [var for var in made if var.type.is_float and var.number not in read]
  if len(left) > 1:
    first = [var for var in left if var.type.shape or var == left[-1]][-1]
    others = [var for var in left if var != first]
    scope.add(Joined(), [first, *others], first.type)
