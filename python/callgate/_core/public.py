# SPDX-License-Identifier: Apache-2.0
"""Objects that users hold: a class has the documented names alone, its core all others."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

C = TypeVar("C")


class Closing:
  """An object that users close; as a context manager it closes itself at the end of its block."""

  __slots__ = ()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> Any:
    raise NotImplementedError


class Uncopied:
  """A thing of its process: a copy is the thing itself."""

  __slots__ = ()

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: Any) -> Self:
    del memo
    return self


class Public(Uncopied, Generic[C]):
  """An object that users hold. Its class shows the documented names, which ask its core.

  The core is in no `__dict__`: `functools.wraps` copies one into the wrappers that users make.
  """

  __slots__ = ("_core",)
  _core: C
  _makers = ""  # the functions that make one, for the message where a class is called instead

  def __new__(cls, *args: Any, **options: Any) -> Self:
    if cls._makers and not (len(args) == 1 and isinstance(args[0], Uncopied) and not options):
      name = cls.__name__
      raise TypeError(f"callgate.{name}: expected a call of {cls._makers}, which makes one")
    return super().__new__(cls)

  def __init__(self, core: C) -> None:
    self._core = core


def core(held: Public[C]) -> C:
  """The object that does the work of one that users hold, for callgate's own code."""
  return held._core  # pyright: ignore[reportPrivateUsage]


def core_of(value: Any) -> Any:
  """The core of an object that users hold; any other value as it is."""
  return core(value) if isinstance(value, Public) else value
