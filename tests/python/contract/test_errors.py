# SPDX-License-Identifier: Apache-2.0
"""The contract: the error of a program is what the user's function raised, with line and lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import contract
import jax
import numpy as np
import pytest
from contract import BAD, ROWS, F, Host

import callgate as cg


class Own(Exception):
  """An exception that has what its maker gave it."""

  def __init__(self, value: int) -> None:
    super().__init__(f"own {value}")
    self.value = value


class Wordless(Exception):
  """One whose text raises, and which takes no notes."""

  def __str__(self) -> str:
    raise RuntimeError("no words")

  def add_note(self, note: str) -> None:
    raise TypeError(f"no notes: {note}")


class Closed(Exception):
  """One that is false, can't be changed or compared, and has no room for notes."""

  __notes__ = property(lambda self: None)

  def __setattr__(self, name: str, value: object) -> None:
    raise AttributeError(f"{name} is not to be set")

  def __eq__(self, other: object) -> bool:
    raise RuntimeError("compared")

  def __bool__(self) -> bool:
    return False

  __hash__ = None  # type: ignore[assignment]


class Locked(Exception):
  """One whose notes are there, and no list."""

  __notes__ = ()


STRANGE: list[type[Exception]] = [Wordless, Closed, Locked]
LANES = np.array([1, 2, BAD, 3], np.float32)
X = np.float32(BAD)


def _scan(f: F) -> F:
  return lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, length=2)[1]


def _cond(f: F) -> F:
  return lambda x: jax.lax.cond(x > 1, f, lambda x: x, x)


# Ways to make a program of `f`, what it is called with, and the lane that fails.
WAYS: dict[str, tuple[Callable[[F], F], Any, str]] = {
  "outside of jit": (lambda f: f, X, ""),
  "jit": (jax.jit, X, ""),
  "scan": (lambda f: jax.jit(_scan(f)), X, ""),
  "vmap": (lambda f: jax.jit(jax.vmap(f)), LANES, "in lane 2"),
  "vmap of cond": (lambda f: jax.jit(jax.vmap(_cond(f))), LANES, "in lane 2"),
  "vmap of scan": (lambda f: jax.jit(jax.vmap(_scan(f))), LANES, "in lane 2"),
}


def _rows() -> list[str]:
  return [row for row in contract.rows("error") if ROWS[row].tells]


def _raised(row: str, run: Callable[[], Any]) -> BaseException:
  with ROWS[row].around(), pytest.raises(BaseException) as caught, cg.errors():
    jax.block_until_ready(run())
  return caught.value


def _assert_told(row: str, error: BaseException, own: BaseException) -> None:
  if (expected := ROWS[row].raises) is None:
    assert error is own
  else:
    assert isinstance(error, expected)


def _notes(error: BaseException) -> str:
  return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize(
  ("row", "way"), [pair for pair in contract.pairs("error", WAYS) if ROWS[pair[0]].tells]
)
def test_an_error_has_its_type_its_line_and_its_lane(row: str, way: str) -> None:
  make_program, argument, lane = WAYS[way]
  own = Own(3)
  part = ROWS[row].make(Host(lambda: own))
  program = make_program(lambda x: part(x))  # the user's line
  for _ in range(2):
    error = _raised(row, lambda: program(argument))
    _assert_told(row, error, own)
    if "line" in ROWS[row].refuses:
      continue
    notes = _notes(error)
    assert re.search(r'called at File ".*(contract|test_errors)\.py", line \d+, in ', notes), notes
    if lane and "lane" not in ROWS[row].refuses:
      assert lane in notes


@pytest.mark.parametrize("row", _rows())
def test_a_program_that_has_failed_goes_on(row: str) -> None:
  program = jax.jit(ROWS[row].make(Host(lambda: Own(1))))
  _raised(row, lambda: program(X))
  for value in (1, 2):
    assert float(program(np.float32(value))) == value + ROWS[row].adds
  with cg.errors():  # told once
    jax.effects_barrier()


def _told(row: str, run: Callable[[], Any]) -> list[BaseException]:
  """The error that `cg.errors()` raises, and those behind it."""
  with pytest.raises(BaseException) as caught, ROWS[row].around(), cg.errors():
    jax.block_until_ready(run())
  told, chain = caught.value, [caught.value]
  while (told := getattr(told, "error", told.__cause__)) is not None:
    chain.append(told)
  return chain


@pytest.mark.parametrize(
  "row",
  [row for row in contract.rows("error") if row in contract.rows("told") and not ROWS[row].raises],
)
def test_strange_exceptions_are_told_as_they_are(row: str) -> None:
  strange = [kind() for kind in STRANGE]
  left = iter(strange)
  program = jax.jit(ROWS[row].make(Host(lambda: next(left))))
  for own in strange:
    chain = _told(row, lambda: program(X))
    assert any(error is own for error in chain), list(map(type, chain))
    with ROWS[row].around():
      assert float(program(np.float32(1))) == 1 + ROWS[row].adds


@pytest.mark.parametrize("row", _rows())
def test_one_of_many_programs_under_way_fails(row: str) -> None:
  program = jax.jit(ROWS[row].make(Host(lambda: Own(1))))
  values = [*range(6), BAD, *range(8, 40)]
  error = _raised(row, lambda: [program(np.float32(value)) for value in values])
  assert isinstance(error, ROWS[row].raises or Own)


@pytest.mark.parametrize("row", [row for row in contract.rows("told") if not ROWS[row].tells])
def test_a_consumers_exception_is_told_by_errors(row: str) -> None:
  own = Own(5)
  f = ROWS[row].make(Host(lambda: own))
  program = jax.jit(lambda x: f(x) + 1)
  assert own in _told(row, lambda: program(X))
