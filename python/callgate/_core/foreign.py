# SPDX-License-Identifier: Apache-2.0
"""Handles users' exceptions and objects safely: no function here raises because of them.

An exception's class may refuse attributes (a frozen dataclass), raise in its own `__str__` or
`__repr__`, or lie about its `__class__`. The caller is usually about to report the exception, and
an error here would hide it. All code of callgate that adds a note to a foreign exception, or shows
a foreign object, uses this module. All functions run under the GIL, on any thread. An exception of
a signal handler on the main thread is passed on.
"""

from __future__ import annotations

import sys
import threading
import traceback as _traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeGuard, TypeVar, cast

from callgate._core import handlers
from callgate._core.errors import LINK

_T = TypeVar("_T")
# The attributes of BaseException itself, in case a subclass redefines them.
_ATTRIBUTES: Any = vars(BaseException)
_name = cast(Callable[[type], str], vars(type)["__name__"].__get__)


def _guarded(make: Callable[[], str], otherwise: Callable[[BaseException], str]) -> str:
  try:
    return str.__str__(make())  # a plain str: a subclass may format itself
  except BaseException as error:
    if handlers.has_raised(error) and _is_main_thread():
      raise
    return otherwise(error)


def _is_main_thread() -> bool:
  return threading.get_ident() == threading.main_thread().ident


# -- text ------------------------------------------------------------------------------------------
def name_of(value: object) -> str:
  """Returns the name of the value's class."""
  return _name(type(value))


def is_a(value: object, kind: type[_T] | tuple[type[_T], ...]) -> TypeGuard[_T]:
  """Checks the value's class only, as `except` does; `isinstance` also reads its `__class__`."""
  return issubclass(type(value), kind)


def text_of(value: object) -> str:
  """Returns `str(value)`, or a text with the reason if that fails."""
  return _guarded(
    lambda: str(value), lambda error: f"({name_of(value)}: its str() raised {name_of(error)})"
  )


def repr_of(value: object) -> str:
  """Returns `repr(value)`, or a text with the reason if that fails."""
  return _guarded(
    lambda: repr(value), lambda error: f"<{name_of(value)}: its repr() raised {name_of(error)}>"
  )


def qualified_name(function: object) -> str:
  """Returns a function's `__qualname__`, or the `repr()` of another callable."""
  try:
    named: Any = getattr(function, "__qualname__", None)
  except Exception:  # noqa: BLE001 - whatever a property of its class raises
    named = None
  return named if type(named) is str else repr_of(function)


def said_by(error: BaseException) -> str:
  """Returns "ValueError: the text", or "ValueError" for an empty text."""
  text = text_of(error)
  return f"{name_of(error)}: {text}" if text else name_of(error)


def traceback_of(error: BaseException) -> str:
  """Returns the exception as Python prints it, without the last newline."""

  def plain(wrong: BaseException) -> str:  # Python's own function may meet attributes that raise
    frames = _traceback.format_tb(frames_begin(error))
    shown = f"{said_by(error)}\n(shown in short: {name_of(wrong)} in its attributes)"
    return "".join(["Traceback (most recent call last):\n", *frames, shown])

  return _guarded(lambda: "".join(_traceback.format_exception(error)).rstrip(), plain)


def print_traceback(error: BaseException) -> None:
  """Prints the exception to stderr, as Python does."""
  print(traceback_of(error), file=sys.stderr)


# -- notes and other attributes --------------------------------------------------------------------
def attach(error: BaseException, name: str, value: object) -> None:
  """Sets an attribute, even if the class refuses attributes."""
  try:
    setattr(error, name, value)
  except Exception:  # noqa: BLE001 - whatever its __setattr__ raises
    _ATTRIBUTES["__dict__"].__get__(error)[name] = value


def is_attached(error: BaseException, name: str) -> bool:
  """Returns True if the exception object itself, not its class, has the attribute."""
  return name in _ATTRIBUTES["__dict__"].__get__(error)


def notes_of(error: BaseException) -> Sequence[str]:
  """Returns the exception's notes that are strings."""
  try:
    notes: Any = getattr(error, "__notes__", ())
    return [str.__str__(note) for note in notes if issubclass(type(note), str)]
  except Exception:  # noqa: BLE001 - an attribute that raises, or that is no sequence
    return ()


def add_note(error: BaseException, note: str) -> None:
  """Adds the note, once, before callgate's link to the page of messages.

  Does nothing if the exception's `__notes__` is no list.
  """
  if note in (notes := notes_of(error)):
    return
  if links := [one for one in notes if one.startswith(LINK)]:
    attach(error, "__notes__", [*(one for one in notes if one not in links), note, links[0]])
    return
  try:
    BaseException.add_note(error, note)
  except Exception:  # noqa: BLE001 - whatever its __setattr__ raises
    notes = _ATTRIBUTES["__dict__"].__get__(error).setdefault("__notes__", [])
    if type(notes) is list:
      notes.append(note)


def keep_notes(error: BaseException, keep: Callable[[str], bool]) -> None:
  """Removes the notes for which `keep` returns False."""
  if notes := notes_of(error):
    attach(error, "__notes__", [note for note in notes if keep(note)])


# -- copies ----------------------------------------------------------------------------------------
def parts_of(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
  """Returns the class, the arguments and the attributes, from which `made_of` makes a copy."""
  args, attributes = (_ATTRIBUTES[name].__get__(error) for name in ("args", "__dict__"))
  return type(error), args, attributes


def made_of(
  kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
  """Makes the exception as Python's pickles do, also if its class refuses attributes."""
  made = kind(*args)
  _ATTRIBUTES["__dict__"].__get__(made).update(attributes)
  return made


# -- chain and frames ------------------------------------------------------------------------------
def set_cause(error: BaseException, cause: BaseException) -> None:
  """Sets `error.__cause__`, as `raise ... from` does."""
  _ATTRIBUTES["__cause__"].__set__(error, cause)


def follows_from(error: BaseException) -> Sequence[BaseException | None]:
  """Returns the exception's cause and context, and the members of a group."""
  parts = [_ATTRIBUTES[name].__get__(error) for name in ("__cause__", "__context__")]
  if is_a(error, BaseExceptionGroup):
    parts += vars(BaseExceptionGroup)["exceptions"].__get__(error)
  return parts


def frames_begin(error: BaseException) -> TracebackType | None:
  """Returns the exception's traceback."""
  return _ATTRIBUTES["__traceback__"].__get__(error)


def raise_unchained(error: BaseException) -> None:
  """Raises the exception with its own chain: the exception being handled is not its context."""
  names = ("__context__", "__suppress_context__")
  chain = [_ATTRIBUTES[name].__get__(error) for name in names]
  try:
    raise error
  finally:
    for name, value in zip(names, chain, strict=True):
      _ATTRIBUTES[name].__set__(error, value)
    del error  # its traceback has this frame: breaks the cycle
