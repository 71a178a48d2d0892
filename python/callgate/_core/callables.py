# SPDX-License-Identifier: Apache-2.0
"""Texts of callables, from which other processes make the same callables.

A text is "module:name" of a module's function, class or object, or a call that makes the callable:
"functools:partial(module:name,3,key='text')". Arguments are texts, or values. Values are quoted as
in URLs, because some characters have a meaning in names of programs.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import types
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from callgate._core import encoding, exact, portable
from callgate._core.bound import BoundMethod

_MOST = 1024  # characters of a text
_BARE = "'.-+ "  # characters of values that need no quotes, beside letters and digits
_CODE = "*"  # the prefix of a value that is no literal
_BOUND = (BoundMethod, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def text_of(function: Any) -> str | None:
  """Returns the text of a callable; None if no short text describes it for another process."""
  text = _text(function)
  return text if text is not None and len(text) <= _MOST else None


def shown(text: str) -> str:
  """Returns a text as messages show it."""
  return urllib.parse.unquote(text.replace(":", ".").replace("builtins.", ""))


def made_of(text: str) -> Any:
  """Makes the callable of a text.

  Raises:
    GateDefinitionError: this process can't import a part of it.
  """
  return _take_value(re.findall("[(),=]|[^(),=]+", text)[::-1])


# -- writing ---------------------------------------------------------------------------------------
def _text(value: Any) -> str | None:
  """Returns the text of a callable, or of a bound method's object; None if there is none."""
  if (place := portable.importable(value) or _place_of_object(value)) is not None:
    return place
  if not exact.is_object(value) and (code := encoding.written_out(value)) is not None:
    return _value(code)
  if isinstance(value, functools.partial):
    return _call(type(value), (value.func, *value.args), value.keywords)
  try:
    make, args, *state = value.__reduce_ex__(2)
  except Exception:  # noqa: BLE001 - of a function, or of the user's
    return None
  if any(part is not None for part in state) or (isinstance(value, _BOUND) and not _text(args[0])):
    return None
  return _call(make, args, {})


def _call(make: Any, args: Iterable[Any], keywords: Mapping[str, Any]) -> str | None:
  function, texts = _text(make), [_argument(value) for value in (*args, *keywords.values())]
  given = [text for text in texts if text is not None]
  if function is None or len(given) < len(texts):
    return None
  names = [""] * (len(given) - len(keywords)) + [f"{name}=" for name in keywords]
  return f"{function}({','.join(map(str.__add__, names, given))})"


def _argument(value: Any) -> str | None:
  code = None if callable(value) else encoding.written_out(value)
  return _text(value) if code is None else _value(code)


def _value(code: Any) -> str:
  literal = code["v"] if code.keys() == {"v"} else _CODE + json.dumps(code, separators=(",", ":"))
  return urllib.parse.quote(literal, safe=_BARE + _CODE)


def _place_of_object(value: Any) -> str | None:
  """Returns "module:name" of an object in its type's module; else None."""
  module = type(value).__module__
  if module in ("__main__", "builtins"):
    return None
  held = dict(getattr(sys.modules.get(module), "__dict__", {}))
  return next((f"{module}:{name}" for name, one in held.items() if one is value), None)


# -- reading ---------------------------------------------------------------------------------------
def _take_value(words: list[str]) -> Any:
  """Removes the last words that stand for a value; returns the value."""
  word = words.pop()
  if ":" not in word:
    told = urllib.parse.unquote(word)
    is_code = told.startswith(_CODE)
    return encoding.read(json.loads(told[1:])) if is_code else ast.literal_eval(told)
  made = portable.imported(word)
  if words[-1:] != ["("]:
    return made
  args, keywords = list[Any](), dict[str, Any]()
  while words.pop() != ")":
    if words[-1] == ")":
      continue
    if words[-2] == "=":
      name, _ = words.pop(), words.pop()
      keywords[name] = _take_value(words)
    else:
      args.append(_take_value(words))
  return made(*args, **keywords)
