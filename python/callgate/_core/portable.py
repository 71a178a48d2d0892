# SPDX-License-Identifier: Apache-2.0
"""Values that programs of other processes contain by type and parts, without a name."""

from __future__ import annotations

import enum
import importlib
from typing import Any, cast

import numpy as np

from callgate._core import exact, foreign
from callgate._core.errors import GateDefinitionError


def importable(value: Any) -> str | None:
  """Returns "module:name" of a function or class that other processes can import; else None."""
  place = exact.reference(value)
  return None if place is None or place.startswith("__main__:") else place


def imported(place: str) -> Any:
  """Returns the function or class that `importable` named in another process.

  Raises:
    GateDefinitionError: this process can't import it.
  """
  module = place.partition(":")[0]
  try:
    importlib.import_module(module)
  except ImportError as error:
    why = foreign.said_by(error)
  else:
    if (found := exact.referred(place)) is not None:
      return found
    why = "the module has no such name"
  raise GateDefinitionError(
    f"a program from another process calls a gate with {place}: expected a function or class "
    f"that this process can import, got none: {why}"
  )


def is_named(dtype: np.dtype[Any]) -> bool:
  """Returns True if a dtype's name is complete: not for another byte order, nor with fields."""
  try:
    return np.dtype(dtype.name) == dtype
  except TypeError:
    return False


def parts_of(value: Any) -> tuple[str, str, dict[str, Any]] | None:
  """Returns the kind, the type and the parts of a value with an importable type; or None."""
  kind = type(value)
  if isinstance(value, np.generic):
    plain = kind is value.dtype.type and value.dtype.kind != "O" and is_named(value.dtype)
    return ("number", value.dtype.name, {"bytes": value.tobytes()}) if plain else None
  if (place := importable(kind)) is None:
    return None
  if isinstance(value, enum.Enum):
    known = kind.__members__.get(str(value.name)) is value
    return ("member", place, {"name": str(value.name)}) if known else None
  if isinstance(value, tuple) and hasattr(kind, "_asdict"):
    return "named", place, cast("Any", value)._asdict()
  if (fields := exact.frozen_fields(value)) is not None:
    return "fields", place, {name: getattr(value, name) for name in fields if hasattr(value, name)}
  return None


def made_of(way: str, of: str, parts: dict[str, Any]) -> Any:
  """Returns the value of `parts_of`."""
  if way == "number":
    return np.frombuffer(parts["bytes"], np.dtype(of))[0]
  kind = imported(of)
  if way == "member":
    return kind[parts["name"]]
  if way == "named":
    return kind._make(parts.values())
  made = object.__new__(kind)
  for name, part in parts.items():
    object.__setattr__(made, name, part)
  return made
