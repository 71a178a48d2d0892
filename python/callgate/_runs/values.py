# SPDX-License-Identifier: Apache-2.0
"""Converts values of a run's config and summary to JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._core import foreign, masked
from callgate._core.errors import GateDefinitionError

_DEEPEST = 32
_SHORT = 8  # the most elements of an array that are shown
_EXPECTED = "expected numbers, strings, paths, arrays, dataclasses, and lists and dicts of these"


def config(label: str, given: Any) -> dict[str, Any]:
  """Returns a mapping or a dataclass as values of JSON."""
  if given is None:
    return {}
  value = _fields(given)
  if not isinstance(value, Mapping):
    got = foreign.repr_of(given)
    raise GateDefinitionError(f"{label}: expected a mapping by name or a dataclass, got {got}")
  return cast("dict[str, Any]", plain(label, value))


def plain(label: str, value: Any, key: str = "", depth: int = 0) -> Any:
  """Returns a value as JSON; raises GateDefinitionError, with the key, if that is impossible."""
  value = _fields(value)
  if value is None or isinstance(value, (bool, str)):
    return value if not isinstance(value, str) else str(value).encode(errors="replace").decode()
  if isinstance(value, int):
    return int(value)
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else _nonfinite(value)
  if isinstance(value, enum.Enum):
    return value.name
  if isinstance(value, os.PathLike):
    return str(os.fspath(cast("Any", value)))
  if isinstance(value, (np.dtype, type)):
    return value.name if isinstance(value, np.dtype) else value.__qualname__
  if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not masked.is_masked(value):
    return _array(label, value, key)
  if depth >= _DEEPEST:
    raise _refused(label, key, f"more than {_DEEPEST} levels")
  if isinstance(value, Mapping):
    return _mapping(label, cast("Mapping[Any, Any]", value), key, depth)
  if isinstance(value, (list, tuple, set, frozenset)):
    several = cast("list[Any]", list(value))
    made = [plain(label, one, f"{key}[{i}]", depth + 1) for i, one in enumerate(several)]
    return made if isinstance(value, (list, tuple)) else sorted(made, key=repr)
  raise _refused(label, key, foreign.repr_of(value))


def _mapping(label: str, given: Mapping[Any, Any], key: str, depth: int) -> dict[str, Any]:
  made: dict[str, Any] = {}
  for name, one in given.items():
    where = f"{label}: {f'{key!r}: ' if key else ''}key {foreign.repr_of(name)}"
    if not isinstance(name, (str, int, float)):
      raise GateDefinitionError(f"{where}: expected a string")
    if str(name) in made:
      raise GateDefinitionError(f"{where}: expected different keys, got {str(name)!r} twice")
    inner = f"{key}.{name}" if key else str(name)
    made[str(name)] = plain(label, one, inner, depth + 1)
  return made


def _fields(value: Any) -> Any:
  """Returns the fields of a dataclass, a named tuple or argparse's namespace; else the value."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return cast("Any", value)._asdict()
  return vars(value) if type(value).__name__ == "Namespace" else value


def _array(label: str, value: Any, key: str) -> Any:
  if isinstance(value, Tracer):
    raise _refused(label, key, "a traced array, whose value is not known while tracing")
  if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    value = jax.random.key_data(value)
  array = np.asarray(value)
  if array.ndim == 0 and jnp.issubdtype(array.dtype, np.floating):
    return plain(label, float(str(array[()])), key)  # 0.97 for a float32, not 0.9700000286
  if array.ndim == 0 and array.dtype.kind in "biuU":
    return plain(label, array.item(), key)
  about = f"{array.dtype}{list(array.shape)}"
  return f"{about}: {array.reshape(-1).tolist()}" if 0 < array.size <= _SHORT else about


def _nonfinite(value: float) -> str:
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _refused(label: str, key: str, got: str) -> GateDefinitionError:
  return GateDefinitionError(f"{label}: {key!r}: {_EXPECTED}, got {got}")
