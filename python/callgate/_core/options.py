# SPDX-License-Identifier: Apache-2.0
"""Checks of options, one for each kind; errors name the option, the expected and the actual value.

`label` is the option's owner, as messages begin: "gate 'f'", "channel 'loss'", "sinks.JSONL". Only
`or_none` accepts None. Each check returns the plain type, never a NumPy scalar.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError

# The runtime counts in 64 bits, also nanoseconds.
_MOST = 2**63 - 1
_MOST_SECONDS = 1e9
_Options = TypeVar("_Options")


def option(default: Any, check: Callable[..., Any], **limits: Any) -> Any:
  """Returns a field of a dataclass of options: its default, and the check of other values."""
  return dataclasses.field(default=default, metadata={"check": functools.partial(check, **limits)})


def checked(label: str, options: _Options) -> _Options:
  """Returns a dataclass of options with the values that its fields' checks return."""
  given: Any = options
  return dataclasses.replace(given, **check_fields(label, options))


def check_fields(label: str, options: object) -> dict[str, Any]:
  """Returns the values that a dataclass's checks return, without defaults."""
  given: Any = options
  values = {field: getattr(given, field.name) for field in dataclasses.fields(given)}
  return {
    field.name: field.metadata["check"](label, field.name, value)
    for field, value in values.items()
    if "check" in field.metadata and value is not field.default
  }


def refuse(label: str, option: str, expected: str, value: Any) -> NoReturn:
  """Raises the error for a wrong value of an option."""
  raise GateDefinitionError(f"{label}: {option}: expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
  """Returns a value's text for messages: an array's type in place of all its numbers."""
  shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
  if hasattr(value, "__array__") and isinstance(shape, tuple) and shape and dtype is not None:
    return f"an array {type_text(dtype, shape)}"  # pyright: ignore[reportUnknownArgumentType]
  return repr(value)


def or_none(check: Callable[..., Any], label: str, option: str, value: Any, **limits: Any) -> Any:
  """Returns the result of `check`, or None for None."""
  return None if value is None else check(label, option, value, **limits)


def boolean(label: str, option: str, value: Any) -> bool:
  if not isinstance(value, (bool, np.bool_)):
    refuse(label, option, "a bool", value)
  return bool(value)


def booleans(label: str, **options: Any) -> dict[str, bool]:
  """Checks several booleans by name."""
  return {option: boolean(label, option, value) for option, value in options.items()}


def count(
  label: str, option: str, value: Any, *, least: int = 0, most: int = _MOST, what: str | None = None
) -> int:
  """Checks an integer; `what` describes the expected value in messages, here and below."""
  if _is_whole(value) and least <= value <= most:
    return int(value)
  what = what or f"an integer of at least {least}"
  too_large = _is_whole(value) and value > most
  refuse(label, option, f"{what}, at most {most}" if too_large else what, value)


def _is_whole(value: Any) -> bool:
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def number(
  label: str, option: str, value: Any, *, above: float | None = None, what: str = "a number"
) -> float:
  """Checks a real number greater than `above`, not NaN."""
  found = _real(value)
  if found is None or math.isnan(found) or (above is not None and found <= above):
    refuse(label, option, what, value)
  return found


def _real(value: Any) -> float | None:
  if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
    return None
  with contextlib.suppress(OverflowError):
    return float(value)
  return math.inf  # the integer is too large for a float


def seconds(label: str, option: str, value: Any, *, zero: bool = False) -> float:
  """Checks a time in seconds; zero=True allows 0."""
  found = _real(value)
  if found is None or not 0 <= found <= _MOST_SECONDS or (found == 0 and not zero):
    kind = "0 or more seconds" if zero else "positive seconds"
    too_many = found is not None and found > _MOST_SECONDS
    refuse(label, option, f"{kind}, at most {_MOST_SECONDS:g}" if too_many else kind, value)
  return found


def text(label: str, option: str, value: Any, expected: str = "a string") -> str:
  if not isinstance(value, str):
    refuse(label, option, expected, value)
  return _encodable(label, option, value)


def _encodable(label: str, option: str, value: str) -> str:
  """Checks that a text is valid UTF-8, without lone surrogates, for files and programs."""
  try:
    value.encode()
  except UnicodeEncodeError:
    refuse(label, option, "text without lone surrogates, which UTF-8 can't encode", value)
  return str(value)


_TRACER = re.compile(r"\b(?:\w*Tracer\(|Traced<)[^)>]*[)>]?")  # JAX's text of a tracer


def template(label: str, option: str, value: Any) -> str:
  """Checks a text with fields for values; rejects f-strings that formatted a traced array."""
  if (found := _TRACER.search(text(label, option, value))) is not None:
    got = f"got {found[0]}, a traced array in an f-string"
    raise GateDefinitionError(
      f'{label}: {option}: expected fields for values, as "x is {{x}}" with x=x; {got}'
    )
  return value


def optional_texts(label: str, **options: Any) -> None:
  """Checks several texts by name; allows None."""
  for option, value in options.items():
    or_none(text, label, option, value)


def name(label: str, value: Any) -> str | None:
  """Checks a name: a line of text, or None."""
  if isinstance(value, str) and (not value or "\n" in value):
    refuse(label, "name", "a line of text", value)
  return or_none(text, label, "name", value, expected="a line of text")


def path(label: str, option: str, value: Any) -> str:
  """Returns a path as text."""
  made: Any = os.fspath(cast("Any", value)) if isinstance(value, (str, os.PathLike)) else None
  if not isinstance(made, str) or not made:
    refuse(label, option, "a path (a non-empty string or os.PathLike)", value)
  if "\0" in made:  # the system would cut the path here
    refuse(label, option, "a path without a NUL character", value)
  return _encodable(label, option, made)


def function(label: str, option: str, value: Any) -> Any:
  if not callable(value):
    refuse(label, option, "a callable", value)
  return value


def writable(label: str, option: str, value: Any) -> Any:
  """Checks a file to write text to."""
  if not callable(getattr(value, "write", None)):
    refuse(label, option, "an object with write()", value)
  return value


def positions(
  label: str, option: str, value: Any, *, what: str = "positions, integers from 0"
) -> tuple[int, ...]:
  """Checks several positions."""
  if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
    items = cast("Sequence[Any]", value)
    if all(_is_whole(item) and 0 <= item <= _MOST for item in items):
      return tuple(map(int, items))
  refuse(label, option, what, value)


def named(label: str, option: str, value: Any) -> dict[str, Any]:
  """Checks a mapping whose keys are names; returns {} for None."""
  given: Any = {} if value is None else value
  items = cast("Mapping[Any, Any]", given)
  if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in items):
    refuse(label, option, "a mapping by name", value)
  return dict(items)


def linear(label: str, option: str, value: Any) -> bool | tuple[int, ...]:
  """Checks True, False, or the positions of the linear arguments."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  given = [value] if _is_whole(value) else value
  return positions(label, option, given, what="a bool, a position or positions from 0")


def aliases(label: str, option: str, value: Any) -> dict[int, int]:
  """Checks a dict from input positions to output positions."""
  pairs = cast("Mapping[Any, Any]", value)
  if not isinstance(value, Mapping) or not all(
    _is_whole(i) and i >= 0 for pair in pairs.items() for i in pair
  ):
    refuse(label, option, "a mapping of input positions to output positions", value)
  return {int(operand): int(result) for operand, result in pairs.items()}


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def byte_size(label: str, name: str, value: Any) -> int:
  """Returns a number of bytes from 65536, "64MiB" or "1.5 GB"."""
  what = "a number of bytes, such as 65536 or '64MiB'"
  if not isinstance(value, str):
    return count(label, name, value, least=1, what=what)
  match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)?\s*", value.lower())
  size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
  return size if 1 <= size < 2**63 else refuse(label, name, what, value)


def choice(
  label: str, option: str, value: Any, allowed: Sequence[str], *, what: str | None = None
) -> Any:
  if not isinstance(value, str) or value not in allowed:
    refuse(label, option, what or f"one of {', '.join(map(repr, allowed))}", value)
  return str(value)


def sharding(label: str, option: str, value: Any) -> Any:
  known = isinstance(value, str) and (value in ("shard", "gather") or "->" in value)
  if not known and value is not None and not callable(value):
    rule = "a rule such as 'i j, j k -> i k', or a function of the mesh and the operands"
    refuse(label, option, f"None, 'shard', 'gather', {rule}", value)
  return value


def names(label: str, option: str, value: Any) -> tuple[str, ...]:
  """Checks a name, or a sequence of names."""
  return (value,) if isinstance(value, str) else strings(label, option, value)


def strings(label: str, option: str, value: Any, *, what: str | None = None) -> tuple[str, ...]:
  """Checks a sequence of strings or paths, which must not be a string itself."""
  if not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
    try:
      items = tuple(cast("Iterable[Any]", value))
    except (TypeError, ValueError):  # such as a scalar array or a closed file
      items = (None,)
    if all(isinstance(item, (str, os.PathLike)) for item in items):
      texts = tuple(str(os.fspath(cast("Any", item))) for item in items)
      if any("\0" in one for one in texts):  # as above
        refuse(label, option, "strings without a NUL character", value)
      return tuple(_encodable(label, option, one) for one in texts)
  refuse(label, option, what or "a sequence of strings, such as ['a', 'b']", value)
