# SPDX-License-Identifier: Apache-2.0
"""Checks of the tuples that `reset` and `step` return; observations are checked when stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from callgate._core.dtypes import type_text
from callgate._core.errors import ResultError

_STEP = ("observation", "reward", "terminated", "truncated", "info")
_RESET = ("observation", "info")
# The usual types, which need no further look.
_NUMBERS = frozenset({float, int, np.float64, np.float32})
_FLAGS = frozenset({bool, np.bool_})


def of_reset(found: Any) -> tuple[Any, Any]:
  """Returns the observation and infos of an environment or a vector environment."""
  seen, info = _parts("reset", _RESET, found)
  return seen, info


def of_step(found: Any) -> tuple[Any, Any, Any, Any, Any]:
  """Returns the results of one environment's step."""
  if type(found) is tuple and len(found) == len(_STEP):  # pyright: ignore[reportUnknownArgumentType]
    _, reward, terminated, truncated, info = cast("tuple[Any, ...]", found)
    flags = type(terminated) in _FLAGS and type(truncated) in _FLAGS
    if flags and type(reward) in _NUMBERS and type(info) is dict:
      return cast("tuple[Any, Any, Any, Any, Any]", found)
  seen, reward, terminated, truncated, info = of_steps(found)
  for what, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
    if not _fits(what, value):
      raise _refused(what, value)
  return seen, reward, terminated, truncated, info


def of_steps(found: Any) -> tuple[Any, Any, Any, Any, Any]:
  """Returns the results of a vector environment's step, whose numbers `array` checks."""
  return _parts("step", _STEP, found)  # type: ignore[return-value]


def array(what: str, given: Any, count: int) -> Any:
  """Returns the rewards or flags of several environments as an array of floats or bools.

  Raises:
    WrongRow: one of them is no number, or no bool.
    ResultError: the shape is wrong.
  """
  made = _array_of(given)
  if made.shape != (count,):
    expected = type_text(np.dtype(bool if what != "reward" else float), (count,))
    raise ResultError(f"{what}: expected {expected}, got {_text(given)}")
  if not _is_kind(what, made.dtype):
    for row, one in enumerate(given):
      if not _fits(what, one):
        raise WrongRow(_refused(what, one), row)
  return made.astype(float if what == "reward" else bool)


class WrongRow(Exception):
  """Wraps the error about one environment of several, with its row."""

  def __init__(self, error: ResultError, row: int) -> None:
    super().__init__(str(error))
    self.error, self.row = error, row


def _parts(method: str, names: Sequence[str], found: Any) -> tuple[Any, ...]:
  several = isinstance(found, (tuple, list))
  if not several or len(found) != len(names):  # pyright: ignore[reportUnknownArgumentType]
    got = f"{len(found)} values" if several else _text(found)  # pyright: ignore
    raise ResultError(f"{method}: expected a tuple ({', '.join(names)}), got {got}")
  if not isinstance(info := found[-1], Mapping):
    raise ResultError(f"{method}: info: expected a dict, got {_text(info)}")
  return cast("tuple[Any, ...]", found)


def _array_of(given: Any) -> np.ndarray:
  try:
    return np.asarray(given)
  except (TypeError, ValueError):  # such as rows of different shapes
    return np.empty((), object)


def _fits(what: str, value: Any) -> bool:
  made = _array_of(value)
  return made.shape == () and _is_kind(what, made.dtype)


def _is_kind(what: str, dtype: Any) -> bool:
  if what != "reward":  # integers as in the old Gym
    return dtype == np.bool_ or np.issubdtype(dtype, np.integer)
  return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, np.bool_))


def _refused(what: str, value: Any) -> ResultError:
  expected = "a number" if what == "reward" else "a bool"
  return ResultError(f"{what}: expected {expected}, got {_text(value)}")


def _text(value: Any) -> str:
  """Returns an array's type, or the text of another value."""
  if isinstance(value, np.ndarray) and value.shape:
    return type_text(value.dtype, value.shape)
  text = repr(value)
  return text if len(text) <= _MOST_SHOWN else f"a {type(value).__name__}"


_MOST_SHOWN = 100
