# SPDX-License-Identifier: Apache-2.0
"""Calls with other arguments than the function takes are refused as Python refuses them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X = jnp.arange(3.0)


def two(a: Any, b: Any, *, how: str = "x") -> Any:
  return a + b


def as_first(a: Any, b: Any) -> Any:
  return a


class Scale:
  @cg.gate(out=as_first)
  def scaled(self, a: Any, b: Any) -> Any:
    return a

  @classmethod
  @cg.gate(out=as_first)
  def of_class(cls, a: Any, b: Any) -> Any:
    return a


MADE: dict[str, Callable[[], Any]] = {
  "gate": lambda: cg.gate(two, out=as_first),
  "out is no function": lambda: cg.gate(two, out=X),
  "reference": lambda: cg.gate(two, like=two),
  "inplace": lambda: cg.gate(lambda out, a, b: None, out=as_first, style="inplace"),
  "method": lambda: Scale().scaled,
  "classmethod": lambda: Scale.of_class,
  "hold": lambda: cg.hold(two),
  "use": lambda: lambda *args: cg.use(two, *args, out=X),
  "start": lambda: cg.gate(two, out=as_first).start,
  "start of a method": lambda: Scale().scaled.start,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_arguments_is_no_fault_of_out(made: str, count: int, engine: Any) -> None:
  first = cg.hold(lambda: 1)() if made == "use" else X
  args = (first, *[X] * (count - 1))
  said = "missing a required argument: 'b'" if count == 1 else "too many positional arguments"
  call = MADE[made]()
  for each in (call, jax.jit(lambda *args: call(*args))):
    with pytest.raises(cg.GateDefinitionError, match=said) as caught:
      each(*args)
    text = str(caught.value)
    assert re.match(r"(gate|hold|use of) '.+': ", text)
    assert "expected the arguments (" in text
    assert text.count("float32[3]") == count - (made == "use")
    assert f", at {__file__}:" in text


def test_other_names_are_refused_and_shown() -> None:
  gate = cg.gate(two, out=as_first)
  with pytest.raises(cg.GateDefinitionError) as caught:
    gate(X, X, hwo="y")
  assert "unexpected keyword argument 'hwo': expected the arguments (a, b, *, how=...)" in str(
    caught.value
  )
  with pytest.raises(cg.GateDefinitionError, match=r"multiple values for argument 'a'"):
    gate(X, a=X)


def test_a_method_without_its_object_says_so() -> None:
  for call in (Scale.scaled, Scale.scaled.start):
    with pytest.raises(cg.GateDefinitionError, match="object, or its class, as the first argument"):
      call(X, X)


def test_a_decorator_may_give_its_function_other_arguments() -> None:
  @functools.wraps(two)
  def one(a: Any, *, how: str = "x") -> Any:
    return two(a, a)

  assert cg.gate(one, out=lambda a: a)(X).tolist() == [0, 2, 4]

  @functools.wraps(two)
  def any_number(*args: Any) -> Any:
    return two(*args)

  with pytest.raises(cg.GateDefinitionError, match="'b': expected the arguments \\(a, b"):
    cg.gate(any_number, out=as_first)(X)


def test_a_kernel_shows_its_parameters() -> None:
  pytest.importorskip("numba", reason="numba is not installed")

  def add(y: Any, a: Any, b: Any) -> None:
    y[:] = a + b

  with pytest.raises(cg.GateDefinitionError, match=r"The kernel has the parameters \(a, b\)"):
    cg.numba(add, out=as_first)(X)
  np.testing.assert_array_equal(cg.numba(add, out=as_first)(X, X), 2 * X)
