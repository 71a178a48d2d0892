# SPDX-License-Identifier: Apache-2.0
"""Objects that users hold: a class has the documented names alone, its core all others."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

C = TypeVar("C")


class Uncopied:
  """A thing of its process: a copy is the thing itself."""

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: Any) -> Self:
    del memo
    return self


class Public(Uncopied, Generic[C]):
  """An object that users hold. Its class shows the documented names, which ask its core."""

  _core: C

  def __init__(self, core: C) -> None:
    self._core = core


def core(held: Public[C]) -> C:
  """The object that does the work of one that users hold, for callgate's own code."""
  return held._core  # pyright: ignore[reportPrivateUsage]


def core_of(value: Any) -> Any:
  """The core of an object that users hold; any other value as it is."""
  return core(value) if isinstance(value, Public) else value
