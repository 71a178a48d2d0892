# SPDX-License-Identifier: Apache-2.0
"""Public objects: a class has only the documented names, its core has all others."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

C = TypeVar("C")


class Closing:
  """An object with `close()`; as a context manager it closes itself at the end of the block."""

  __slots__ = ()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> Any:
    raise NotImplementedError


class Uncopied:
  """An object of its process: a copy is the object itself."""

  __slots__ = ()

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: Any) -> Self:
    del memo
    return self


class Public(Uncopied, Generic[C]):
  """A public object. Its class has the documented names, which use the core.

  The core is not in the `__dict__`, because `functools.wraps` copies that into users' wrappers.
  """

  __slots__ = ("_core",)
  _core: C
  _makers = ""  # the functions that make one, for the error of a direct call of the class

  def __new__(cls, *args: Any, **options: Any) -> Self:
    if cls._makers and not (len(args) == 1 and isinstance(args[0], Uncopied) and not options):
      name = cls.__name__
      raise TypeError(f"callgate.{name}: the class can't be called; use {cls._makers}")
    return super().__new__(cls)

  def __init__(self, core: C) -> None:
    self._core = core


def core(held: Public[C]) -> C:
  """Returns the core of a public object, for callgate's own code."""
  return held._core  # pyright: ignore[reportPrivateUsage]


def core_of(value: Any) -> Any:
  """Returns the core of a public object; other values unchanged."""
  return core(value) if isinstance(value, Public) else value
