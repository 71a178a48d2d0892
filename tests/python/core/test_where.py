# SPDX-License-Identifier: Apache-2.0
"""The line of the user's code that calls callgate, through whatever of callgate lies between."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import pytest

from callgate._core import paths
from callgate._core.where import Where, frames, where

_OWN_FILE = str(paths.ROOT / "_core" / "made_up.py")


def _through_callgate(function: Callable[[], object], depth: int) -> object:
  """Calls a function through so many frames of callgate's."""
  space: dict[str, object] = {}
  source = "def through(f, depth):\n  return through(f, depth - 1) if depth > 1 else f()\n"
  exec(compile(source, _OWN_FILE, "exec"), space)
  through = space["through"]
  assert isinstance(through, types.FunctionType)
  return through(function, depth)


@pytest.mark.parametrize("depth", [1, 5])
def test_frames_of_callgate_are_passed_over(depth: int) -> None:
  here = _through_callgate(where, depth)
  assert isinstance(here, Where)
  assert here.code is _through_callgate.__code__
  assert here.module == __name__
  assert str(here) == f"{__file__}:{here.line}"


def test_the_users_frames_come_innermost_first() -> None:
  found: list[types.CodeType] = []
  for frame in frames():  # no comprehension, which is a frame before Python 3.12
    found.append(frame.f_code)
  assert found[0] is test_the_users_frames_come_innermost_first.__code__
  assert found[1:] == [one.frame.f_code for one in inspect.stack()[1:]]


def test_a_function_of_a_module_may_define_several_things_of_one_name() -> None:
  assert where().definition() is None  # in this function
  space = {"where": where, "__name__": "a_module"}
  exec("a = where()\nb = where()", space)
  first, second = space["a"], space["b"]
  assert isinstance(first, Where)
  assert isinstance(second, Where)
  assert first.definition() == first
  assert not second.redefines(first)
  exec("a = where()\nb = where()", space)  # the module is loaded again
  assert isinstance(again := space["a"], Where)
  assert again.redefines(first)
  assert again.redefines(second)
  exec("a = where()", other := {"where": where, "__name__": "another"})
  assert isinstance(elsewhere := other["a"], Where)
  assert not elsewhere.redefines(first)


def test_a_function_of_main_counts_as_a_modules_code() -> None:
  space = {"where": where, "__name__": "__main__"}
  exec("def f():\n  return where()\nhere = f()", space)
  assert isinstance(here := space["here"], Where)
  assert here.definition() == here
