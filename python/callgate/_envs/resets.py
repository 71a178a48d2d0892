# SPDX-License-Identifier: Apache-2.0
"""Arguments of a reset besides its seeds: a mask of environments, and options.

Options are a dictionary, as Gymnasium's `reset(options=)` takes. Its arrays are operands of the
program's call. All other values are fixed while tracing, as a form: nested tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError

Form = tuple[str, Any]


def mask_of(label: str, mask: Any, autoreset: str, count: int) -> Any:
  """Checks the mask and returns it as an array; None for all."""
  if mask is None:
    return None
  if autoreset != "disabled":
    raise GateDefinitionError(
      f"{label}: mask: expected autoreset='disabled', got autoreset={autoreset!r}, which resets "
      "environments itself"
    )
  try:
    found = jnp.asarray(mask)
  except TypeError:
    found = None
  if found is None or found.shape != (count,) or found.dtype != np.bool_:
    got = repr(mask) if found is None else type_text(found.dtype, found.shape)
    raise GateDefinitionError(
      f"{label}: mask: expected bool[{count}], True for each environment to reset, got {got}"
    )
  return found


def form_of(label: str, options: Any) -> tuple[Form | None, list[Any]]:
  """Returns the form of options, and their arrays, which it refers to by number; None if none."""
  arrays: list[Any] = []

  def of(where: str, value: Any) -> Form:
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
      arrays.append(jnp.asarray(value))
      return "array", len(arrays) - 1
    if isinstance(value, Mapping):
      items: Any = value.items()  # pyright: ignore
      return "dict", tuple((key, of(f"{where}[{key!r}]", one)) for key, one in items)
    if isinstance(value, (list, tuple)):
      parts: Any = value
      kind = "tuple" if isinstance(value, tuple) else "list"
      return kind, tuple(of(f"{where}[{i}]", one) for i, one in enumerate(parts))
    try:
      hash(value)
    except TypeError:
      raise GateDefinitionError(
        f"{label}: {where}: expected arrays and hashable values, got {value!r}"
      ) from None
    return "value", value

  if options is None:
    return None, arrays
  if not isinstance(options, Mapping):
    raise GateDefinitionError(
      f"{label}: options: expected a dictionary, as for an environment's reset(options=), got "
      f"{options!r}"
    )
  if "reset_mask" in options:
    raise GateDefinitionError(
      f"{label}: options: expected no 'reset_mask'; pass mask= for the environments to reset"
    )
  return of("options", options), arrays


def options_of(form: Form | None, array: Callable[[int], Any]) -> Any:
  """Returns the options on the host; `array` returns an array by its number."""
  if form is None:
    return None
  kind, parts = form
  if kind == "array":
    return _own(array(parts))
  if kind == "dict":
    return {key: options_of(one, array) for key, one in parts}
  if kind in ("list", "tuple"):
    made = [options_of(one, array) for one in parts]
    return made if kind == "list" else tuple(made)
  return parts


def _own(value: Any) -> Any:
  """Returns a copy, which environments may keep; numbers become Python numbers."""
  return value.item() if value.ndim == 0 else np.array(value)
