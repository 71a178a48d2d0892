# SPDX-License-Identifier: Apache-2.0
"""The bar of a loop without `progress=`, inside a block of `callgate.bars`."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._core.encoding import is_open
from callgate._jax import sources
from callgate._loops.progress import Automatic, Progress
from callgate._runtime import config


def bar_of(kind: str, given: Mapping[str, Any]) -> Progress | None:
  """Returns the bar of a loop that is being traced and has no options; None for no bar.

  Args:
    kind: "scan", "fori_loop" or "while_loop".
    given: the loop's arguments by name.
  """
  least = config.least_steps_of_bars.value
  steps = None if least == config.NO_BARS else _steps(kind, given)
  if least == config.NO_BARS or (steps is not None and steps < least):
    return None
  line = sources.users_line()
  name = kind if line is None else f"{line[2]} ({pathlib.PurePath(line[0]).name}:{line[1]})"
  return Automatic(desc=name, least=least)


def lengths(xs: Any, length: Any) -> set[Any]:
  """Returns the numbers of steps in a `scan`'s arguments; a valid scan has only one."""
  found = {jnp.shape(x)[0] for x in jax.tree.leaves(xs) if jnp.ndim(x)}
  return found if length is None else found | {length}


def _steps(kind: str, given: Mapping[str, Any]) -> float | None:
  """Returns the number of steps; None if only the program knows it, -inf for no bar."""
  if kind == "while_loop":
    return None
  if kind == "fori_loop":
    bounds = given.get("lower"), given.get("upper")
    if any(map(is_open, bounds)):
      return -math.inf
    if any(isinstance(bound, Tracer) for bound in bounds):
      return None
    with contextlib.suppress(TypeError, ValueError):
      return int(np.asarray(bounds[1])) - int(np.asarray(bounds[0]))
    return -math.inf
  found = lengths(given.get("xs"), given.get("length"))
  only = found.pop() if len(found) == 1 else None
  return int(only) if isinstance(only, (int, np.integer)) else -math.inf
