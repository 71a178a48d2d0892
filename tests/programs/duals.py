# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on NumPy arrays with tangents: values and derivatives of a program, without JAX.

A value is an array, or a `Dual`: a value with its tangent. Duals of several levels stand in one
another, a level for each derivative that is being taken; the highest level is outermost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Value = Any  # an ndarray or a Dual


@dataclasses.dataclass(frozen=True)
class Dual:
  level: int
  primal: Value
  tangent: Value


def plain(x: Value) -> np.ndarray:
  """The value without any tangent."""
  while isinstance(x, Dual):
    x = x.primal
  return x


def top(*values: Value) -> int:
  """The highest level among the values; 0 where all are plain."""
  return max((x.level for x in values if isinstance(x, Dual)), default=0)


def split(x: Value, level: int) -> tuple[Value, Value]:
  """The primal and the tangent of a level, which is not below the value's own."""
  if isinstance(x, Dual) and x.level == level:
    return x.primal, x.tangent
  return x, np.zeros_like(plain(x))


def linear(f: Callable[[np.ndarray], np.ndarray], x: Value) -> Value:
  """Applies a linear function of one array."""
  if isinstance(x, Dual):
    return Dual(x.level, linear(f, x.primal), linear(f, x.tangent))
  return f(x)


def linear_of_all(f: Callable[[list[np.ndarray]], np.ndarray], values: list[Value]) -> Value:
  """Applies a linear function of several arrays, such as a stack."""
  if level := top(*values):
    primals, tangents = zip(*(split(x, level) for x in values), strict=True)
    return Dual(level, linear_of_all(f, [*primals]), linear_of_all(f, [*tangents]))
  return f(values)


def add(x: Value, y: Value) -> Value:
  return linear_of_all(lambda two: two[0] + two[1], [x, y])


def mul(x: Value, y: Value) -> Value:
  if level := top(x, y):
    (xp, xt), (yp, yt) = split(x, level), split(y, level)
    return Dual(level, mul(xp, yp), add(mul(xt, yp), mul(xp, yt)))
  return x * y


def scaled(x: Value, factor: float) -> Value:
  return linear(lambda a: a * np.asarray(factor, a.dtype), x)


def shifted(x: Value, by: float) -> Value:
  if isinstance(x, Dual):
    return Dual(x.level, shifted(x.primal, by), x.tangent)
  return x + np.asarray(by, x.dtype)


def _smooth(f: Callable[[Any], Any], slope: Callable[[Value, Value], Value]) -> Any:
  """A function of each element, by its derivative in terms of x and y = f(x)."""

  def smooth(x: Value) -> Value:
    if isinstance(x, Dual):
      y = smooth(x.primal)
      return Dual(x.level, y, mul(x.tangent, slope(x.primal, y)))
    return f(x)

  return smooth


sin = _smooth(np.sin, lambda x, y: cos(x))
cos = _smooth(np.cos, lambda x, y: scaled(sin(x), -1.0))
tanh = _smooth(np.tanh, lambda x, y: shifted(scaled(mul(y, y), -1.0), 1.0))
inverse = _smooth(lambda x: 1 / x, lambda x, y: scaled(mul(y, y), -1.0))
