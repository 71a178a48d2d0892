"""Checks of the options of gates and kernels: each says what was expected and what came."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, cast

from callgate.errors import GateDefinitionError


def choice(label: str, option: str, value: Any, allowed: Sequence[str]) -> Any:
  if value not in allowed:
    expected = ", ".join(repr(a) for a in allowed)
    raise GateDefinitionError(f"{label}: {option}: expected one of {expected}, got {value!r}")
  return value


def vmap_method(label: str, value: Any, *, grid: bool = False) -> Any:
  more = ("grid",) if grid else ()
  return choice(label, "vmap", value, ("each", "whole", "broadcast", *more))


def sharding(label: str, value: Any) -> Any:
  if value is None or callable(value) or (isinstance(value, str) and "->" in value):
    return value
  if value in ("shard", "gather"):
    return value
  raise GateDefinitionError(
    f"{label}: sharding: expected None, 'shard', 'gather', a rule such as 'i j, j k -> i k', or a "
    f"function of the mesh and the operands, got {value!r}"
  )


def strings(label: str, option: str, value: Any) -> tuple[str, ...]:
  """A sequence of strings or paths; a string alone is none."""
  if not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
    items = tuple(cast("Iterable[Any]", value))
    if all(isinstance(item, (str, os.PathLike)) for item in items):
      return tuple(str(os.fspath(item)) for item in items)
  raise GateDefinitionError(
    f"{label}: {option}: expected a sequence of strings, such as [{value!r}], got {value!r}"
  )


def timeout(label: str, value: float | None) -> float:
  if value is None:
    return 0.0
  if not value > 0:
    raise GateDefinitionError(f"{label}: timeout: expected positive seconds, got {value!r}")
  return float(value)


def gradient(label: str, value: Any, effect: str) -> Any:
  if value is None:
    return None
  choice(label, "gradient", value, ("finite-difference",))
  if effect != "pure":
    raise GateDefinitionError(
      f"{label}: gradient='finite-difference' calls the gate many times, so its effect must "
      f"be 'pure', got {effect!r}"
    )
  return value
