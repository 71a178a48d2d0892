# SPDX-License-Identifier: Apache-2.0
"""The contract: each program calls the function that it was given, whatever its name and equals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import contract
import jax
import numpy as np
import pytest
from contract import ROWS, Host

import callgate as cg

X = np.float32(3)


class Equal(Host):
  """Equal to all others, and what the part gets is the object itself."""

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Equal)

  def __hash__(self) -> int:
    return 1

  def function(self) -> Callable[[Any], Any]:
    return self

  def consumer(self) -> Callable[[Any], Any]:
    return self


class Unhashable(Equal):
  __hash__ = None  # type: ignore[assignment]


def _assert_called(row: str, hosts: Sequence[Host], values: list[list[float]]) -> None:
  if ROWS[row].each:
    assert [host.seen() for host in hosts] == values


@pytest.mark.parametrize("row", contract.rows("redefined"))
def test_a_function_that_is_defined_again_is_the_next_programs(row: str) -> None:
  """The old programs go on with the old function, whatever JAX has to trace or compile anew."""
  part, hosts = ROWS[row], [Host(plus=1), Host(plus=2)]
  with part.around():
    old = part.make(hosts[0])
    program = jax.jit(lambda x: old(x))
    traced = program.trace(X)
    found = [program(X)]
    new = part.make(hosts[1])
    found += [jax.jit(lambda x: new(x))(X), program(X), traced.lower().compile()(X)]
    found += [jax.jit(lambda x: old(x) + 0)(X), jax.jit(lambda x: new(x) + 0)(X)]
    cg.barrier()
    adds = [part.adds * plus for plus in (1, 2, 1, 1, 1, 2)]
    assert [float(one) - 3 for one in found] == adds
    _assert_called(row, hosts, [[3.0] * 4, [3.0] * 2])


@pytest.mark.parametrize("row", contract.rows("equal"))
def test_equal_functions_are_as_many_as_there_are_objects(row: str) -> None:
  """In one program, in programs of their own, and outside of programs, again and again."""
  part, hosts = ROWS[row], [Equal(plus=1), Equal(plus=2), Unhashable(plus=3)]
  with part.around():
    made = list(map(part.make, hosts))
    found = list(jax.jit(lambda x: [f(x) for f in made])(X))
    found += [jax.jit(f)(X) for f in made]
    for _ in range(2):
      found += [f(X) for f in made]
    cg.barrier()
    assert [float(value) - 3 for value in found] == [part.adds * plus for plus in (1, 2, 3)] * 4
    _assert_called(row, hosts, [[3.0] * 4] * 3)
