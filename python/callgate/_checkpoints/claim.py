# SPDX-License-Identifier: Apache-2.0
"""Tells a second loop of one `Checkpoints`, which is refused, from the first one traced again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from callgate._checkpoints.parts import Leaf
from callgate._core.errors import GateDefinitionError
from callgate._core.where import where
from callgate._jax import tracing


class Claim:
  """The loop that a `Checkpoints` saves."""

  def __init__(self) -> None:
    self._first: tuple[Any, str] | None = None  # the loop's marks; its place, as messages have it
    self._trace: weakref.ref[Any] | None = None

  def take(self, folder: Any, body: Callable[..., Any], leaves: Sequence[Leaf]) -> None:
    """Says that the loop with this body is saved.

    Raises:
      GateDefinitionError: another one is, or this one for the second time in a program.
    """
    here = where()
    shown = str(here)
    # These stay alike when a loop is traced again, as by a notebook's cell.
    marks = _place(here.file, here.line), here.code.co_qualname, _body(body), tuple(leaves)
    trace = tracing.current_trace()
    again = trace is not None and self._trace is not None and self._trace() is trace
    if self._first is not None and (again or marks != self._first[0]):
      raise GateDefinitionError(
        f"Checkpoints: {folder}: expected one loop, that of {self._first[1]}, got a second one at "
        f"{shown}: each would take the other's checkpoints for its own. Make a cg.Checkpoints with "
        "a folder of its own for each loop"
      )
    self._first = self._first or (marks, shown)
    self._trace = None if trace is None else weakref.ref(trace)


def _body(function: Any) -> tuple[str, int]:
  while (inner := getattr(function, "func", getattr(function, "__wrapped__", None))) is not None:
    function = inner
  code = getattr(function, "__code__", None)
  if code is None:
    return type(function).__qualname__, 0
  return code.co_qualname, _place(code.co_filename, code.co_firstlineno)[1]


def _place(file: str, line: int) -> tuple[str, int]:
  """A file and line; of a notebook's cell, which has others when it runs again, neither."""
  return ("", 0) if "ipykernel" in file or file.startswith("<ipython") else (file, line)
