# SPDX-License-Identifier: Apache-2.0
"""Entries of environments' `info` in programs: names with fixed shapes and dtypes, and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._envs.spaces import Store
from callgate._jax import tracing


def declared(label: str, given: Any, where: str = "info") -> dict[str, Any]:
  """Returns the option `info=` as nested dictionaries of ShapeDtypeStructs, for one environment.

  Raises:
    GateDefinitionError: the option is wrong, or two names are equal.
  """
  found = check.named(label, where, given)
  made: dict[str, Any] = {}
  for name, value in found.items():
    here = f"{where}[{name!r}]"
    if f"_{name}" in found:
      raise GateDefinitionError(
        f"{label}: {where}: expected names without '_{name}', which is the mask of '{name}', got "
        "both"
      )
    made[name] = declared(label, value, here) if isinstance(value, Mapping) else _type(
      label, here, value
    )  # fmt: skip
  return made


def _type(label: str, where: str, value: Any) -> jax.ShapeDtypeStruct:
  try:
    own = None if isinstance(value, np.dtype) else getattr(value, "dtype", None)
    # NumPy's scalar types have a `dtype` attribute that isn't a dtype.
    typed = isinstance(own, np.dtype)
    shape = tuple(value.shape) if typed and hasattr(value, "shape") else ()
    dtype = np.dtype(own if typed else value)
    if value is None or dtype.hasobject or dtype.kind in "SUVMm":
      raise TypeError
  except Exception:  # noqa: BLE001 - any exception: it isn't a dtype
    check.refuse(label, where, "a value with .shape and .dtype, or a dtype", value)
  if (narrow := tracing.canonical_dtype(dtype)) != dtype:
    raise GateDefinitionError(
      f"{label}: {where}: {dtype.name} needs jax_enable_x64; expected {narrow.name} without it, "
      f"got {value!r}"
    )
  return jax.ShapeDtypeStruct(shape, dtype)


def batched(tree: Mapping[str, Any], count: int) -> dict[str, Any]:
  """Returns the types of `count` environments' infos, with a mask beside each name."""
  made: dict[str, Any] = {}
  for name, one in tree.items():
    nested = isinstance(one, dict)
    made[name] = (
      batched(cast("dict[str, Any]", one), count)
      if nested
      else jax.ShapeDtypeStruct((count, *one.shape), one.dtype)
    )
    made[f"_{name}"] = jax.ShapeDtypeStruct((count,), np.bool_)
  return made


class Infos:
  """Stores environments' infos in such arrays."""

  def __init__(self, tree: Mapping[str, Any], what: str = "info") -> None:
    self._parts: list[tuple[str, str, Infos | Store]] = []
    for name, one in tree.items():
      here = f"{what}[{name!r}]"
      part = (
        Infos(cast("dict[str, Any]", one), here)
        if isinstance(one, dict)
        else Store(here, (), one.shape, one.dtype)
      )
      self._parts.append((name, f"_{name}", part))

  def clear(self, views: Mapping[str, Any]) -> None:
    """Clears all entries and masks."""
    for name, mask, part in self._parts:
      views[mask][...] = False
      if isinstance(part, Infos):
        part.clear(views[name])
      else:
        views[name][...] = 0

  def put(self, views: Mapping[str, Any], row: int, info: Mapping[str, Any]) -> None:
    for name, mask, part in self._parts:
      if name in info:
        part.put(views[name], row, info[name])
        views[mask][row] = True

  def put_rows(
    self, views: Mapping[str, Any], rows: Any, info: Mapping[str, Any], only: Any
  ) -> None:
    """Stores the infos of a vector environment in rows, where its masks and `only` are True."""
    for name, mask, part in self._parts:
      if name not in info:
        continue
      has = np.array(info.get(mask, np.ones(len(rows), bool)), bool)
      has = has if only is None else has & only
      views[mask][rows] = has
      if isinstance(part, Infos):
        part.put_rows(views[name], rows, info[name], has)
      else:
        for index in np.flatnonzero(has):
          part.put(views[name], int(rows[index]), info[name][index])
