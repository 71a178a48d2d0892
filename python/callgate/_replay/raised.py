# SPDX-License-Identifier: Apache-2.0
"""Exceptions of recorded calls: writes them as text, and makes them again without running code.

Python's own exceptions and callgate's get their class again. Others need the user's consent, since
they are unpickled.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import pickle
from typing import Any, cast

from callgate._core import errors, foreign
from callgate._core.errors import RecordedError, ReplayError

_PLAIN = (str, int, float, bool, type(None))
_OURS = "callgate"


def text_of(error: BaseException) -> str:
  """Returns an exception as a recording has it, in JSON."""
  return json.dumps(_description_of(error))


def _description_of(error: BaseException) -> dict[str, Any]:
  kind = type(error)
  ours = kind.__module__.split(".")[0] == _OURS
  held: dict[str, Any] = {
    "module": kind.__module__, "kind": kind.__qualname__, "said": _said(error), "args": None,
    "notes": list(foreign.notes_of(error)),
  }  # fmt: skip
  args, fields = error.args, vars(error)
  # An OSError's fields have the file's name, an ImportError's the module.
  if kind.__module__ == "builtins":
    with contextlib.suppress(Exception):
      _, args, *more = cast(tuple[Any, ...], error.__reduce__())
      fields = more[0] if more else {}
  with contextlib.suppress(TypeError, RecursionError):
    held["args"] = [_encoded(arg) for arg in args]
  if ours or kind.__module__ == "builtins":
    held["fields"] = {k: v for k, v in fields.items() if type(v) in _PLAIN}
  return held


def _encoded(value: Any) -> Any:
  """Returns a value of Python's own as JSON. Raises a TypeError for others."""
  if type(value) in _PLAIN:
    return value
  if type(value) is tuple:
    return {"tuple": [_encoded(item) for item in value]}
  if type(value) is list:
    return [_encoded(item) for item in cast(list[Any], value)]
  if type(value) is bytes:
    return {"bytes": value.hex()}
  if type(value) is complex:
    return {"complex": [value.real, value.imag]}
  if isinstance(value, Exception):  # an exception of a group
    return {"exception": _description_of(value)}
  raise TypeError(type(value).__name__)


def _decoded(value: Any) -> Any:
  if isinstance(value, list):
    return [_decoded(item) for item in cast(list[Any], value)]
  if not isinstance(value, dict):
    return value
  ((kind, held),) = cast(dict[str, Any], value).items()
  if kind == "tuple":
    return tuple(_decoded(held))
  if kind == "bytes":
    return bytes.fromhex(held)
  if kind == "complex":
    return complex(*held)
  if kind == "exception":
    return _from_description(held)
  raise ValueError(kind)


def pickle_of(error: BaseException) -> bytes:
  """Returns the pickled exception; empty if it can't be unpickled."""
  with contextlib.suppress(Exception):
    data = pickle.dumps(error)
    pickle.loads(data)
    return data
  return b""


def _said(error: BaseException) -> str:
  return foreign.text_of(error).encode(errors="backslashreplace").decode()


def make(where: str, text: str, pickled: bytes, trust: bool) -> BaseException:
  """Returns the exception of a recorded call; `where` names the recording."""
  if trust and pickled:
    try:
      error = pickle.loads(pickled)
    except Exception as wrong:
      raise ReplayError(
        f"{where}: expected a readable pickled exception, because of trust=True, got "
        f"{type(wrong).__name__}: {wrong}"
      ) from wrong
    if isinstance(error, BaseException):
      return error
  try:
    return _from_description(json.loads(text))
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as wrong:
    raise ReplayError(f"{where}: expected an exception's description, got {text[:80]!r}") from wrong


def _from_description(held: dict[str, Any]) -> BaseException:
  module, name, said = str(held["module"]), str(held["kind"]), str(held["said"])
  args, notes, fields = held["args"], held["notes"], held.get("fields", {})
  given = tuple(_decoded(args)) if isinstance(args, list) else (said,)
  known = {str(key): value for key, value in fields.items() if type(value) in _PLAIN}
  made = _known_exception(module, name, given, known)
  if made is None or _said(made) != said:
    made = RecordedError(f"{module}.{name}", said)
  for note in notes if isinstance(notes, list) else ():
    foreign.add_note(made, str(note))
  return made


def _known_exception(
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
      made = kind(*args)
      made.__setstate__(fields)
      return made
    made = errors.without_init(kind, args)  # its __init__ takes no text
    vars(made).update(fields)
    return made
  except Exception:  # noqa: BLE001 - arguments that the class doesn't take
    return None
