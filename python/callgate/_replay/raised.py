# SPDX-License-Identifier: Apache-2.0
"""Exceptions of recorded calls: written as text, made again from it, without running any code.

Of Python's own exceptions and callgate's the class is made again; of any other only with the user's
word, from a pickle.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import pickle
from typing import Any

from callgate._core import errors
from callgate._core.errors import RecordedError, ReplayError

_PLAIN = (str, int, float, bool, type(None))
_OURS = "callgate"


def text_of(error: BaseException) -> str:
  """What a recording holds of an exception, as JSON."""
  kind = type(error)
  said = _said(error)
  plain = all(type(arg) in _PLAIN for arg in error.args)
  held: dict[str, Any] = {
    "module": kind.__module__, "kind": kind.__qualname__, "said": said,
    "args": list(error.args) if plain else None, "notes": list(getattr(error, "__notes__", ())),
  }  # fmt: skip
  if kind.__module__.split(".")[0] == _OURS:
    held["fields"] = {k: v for k, v in vars(error).items() if type(v) in _PLAIN}
  return json.dumps(held)


def pickle_of(error: BaseException) -> bytes:
  """The exception as a pickle; empty where it has none that can be read back."""
  with contextlib.suppress(Exception):
    data = pickle.dumps(error)
    pickle.loads(data)
    return data
  return b""


def _said(error: BaseException) -> str:
  try:
    return str(error).encode(errors="backslashreplace").decode()
  except Exception as wrong:  # noqa: BLE001 - its own __str__
    return f"(its text can't be shown: {type(wrong).__name__})"


def make(where: str, text: str, pickled: bytes, trust: bool) -> BaseException:
  """The exception of a recorded call; `where` names the recording."""
  if trust and pickled:
    try:
      error = pickle.loads(pickled)
    except Exception as wrong:
      raise ReplayError(
        f"{where}: expected to read a pickled exception, as trust=True says: "
        f"{type(wrong).__name__}: {wrong}"
      ) from wrong
    if isinstance(error, BaseException):
      return error
  try:
    held: dict[str, Any] = json.loads(text)
    module, name, said = str(held["module"]), str(held["kind"]), str(held["said"])
    args, notes, fields = held["args"], held["notes"], held.get("fields", {})
    given = tuple(args) if isinstance(args, list) else (said,)
    known = {key: value for key, value in fields.items() if type(value) in _PLAIN}
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as wrong:
    raise ReplayError(f"{where}: expected an exception's description, got {text[:80]!r}") from wrong
  made = _made(module, name, given, known)
  if made is None or str(made) != said:
    made = RecordedError(f"{module}.{name}", said)
  for note in notes if isinstance(notes, list) else ():
    made.add_note(str(note))
  return made


def _made(
  module: str, name: str, args: tuple[Any, ...], fields: dict[str, Any]
) -> BaseException | None:
  ours = module.split(".")[0] == _OURS
  kind: Any = getattr(errors if ours else builtins, name, None)
  expected = errors.GateError if ours else Exception
  if not (ours or module == "builtins") or not isinstance(kind, type):
    return None
  if not issubclass(kind, expected):
    return None
  try:
    if not ours:
      return kind(*args)
    made = kind.__new__(kind, *args)  # not by its __init__, which takes no text
    made.args = args
    vars(made).update(fields)
    return made
  except Exception:  # noqa: BLE001 - arguments that the class doesn't take
    return None
