# SPDX-License-Identifier: Apache-2.0
"""Converts rows of sinks' files (JSONL, CSV, Parquet, Zarr, HDF5, Npy) to records.

A row is a dictionary, as the file's own library reads it. `shard` and `global_shape` have one of
three forms: the value of a single array, an object from paths to the leaves' values, or separate
members such as "shard/w/0". The value is in `value`, in an object there, or in members "w/0" or
"value/w/0".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from callgate._stream.records import StreamRecord

_OF_PARTS = ("shard", "global_shape")


def of_row(row: Mapping[str, Any]) -> StreamRecord:
  """Returns the record of a row.

  Raises:
    ValueError: no sink writes such a row.
  """
  try:
    return _record(row)
  except (LookupError, TypeError, ValueError) as error:
    raise ValueError(
      "assemble: expected a row of a sink's file with a value, and 'global_shape' and 'shard' "
      f"for a shard, got one with {', '.join(map(repr, row))}: {error}"
    ) from error


def _record(row: Mapping[str, Any]) -> StreamRecord:
  shards, shapes = (_by_path(row, name) for name in _OF_PARTS)
  paths = list(shards) or _paths(row)
  leaves = {path: np.asarray(_leaf(row, path)) for path in paths}
  lane = row.get("lane", ())
  number = lambda name, missing: int(row.get(name, missing))  # noqa: E731
  return StreamRecord(
    str(row.get("name", "")), number("seq", 0), number("time_ns", 0), number("device", 0),
    number("run", -1), str(row.get("role", "primal")),
    tuple(np.asarray(lane).ravel().tolist()) if not isinstance(lane, str) else lane,  # type: ignore[arg-type]
    leaves, {}, process=number("process", 0),
    shard={path: tuple(slice(int(a), int(b)) for a, b in part) for path, part in shards.items()}
    or None,
    global_shape={path: tuple(map(int, shape)) for path, shape in shapes.items()} or None,
  )  # fmt: skip


def _by_path(row: Mapping[str, Any], name: str) -> dict[str, Any]:
  if name in row:
    held = json.loads(row[name]) if isinstance(row[name], str) else row[name]
    return dict(held) if isinstance(held, Mapping) else {"": held}
  return {key[len(name) + 1 :]: x for key, x in row.items() if key.startswith(f"{name}/")}


def _paths(row: Mapping[str, Any]) -> list[str]:
  """Returns the paths of a whole value's leaves."""
  value = row.get("value")
  if value is not None:
    return list(value) if isinstance(value, Mapping) else [""]
  return [key.removeprefix("value/") for key in row if key.startswith("value/")]


def _leaf(row: Mapping[str, Any], path: str) -> Any:
  value = row.get("value")
  if isinstance(value, Mapping) and set(value) != {"re", "im"}:
    return value[path]
  if not path:
    return _number(value if "value" in row else _only(row))
  return _number(row[f"value/{path}"] if f"value/{path}" in row else row[path])


def _only(row: Mapping[str, Any]) -> Any:
  """Returns the value of a CSV row, whose column has the tap's name: the last column."""
  name = list(row)[-1]
  if name in (*_OF_PARTS, "seq", "time_ns", "device", "lane", "run", "process"):
    raise LookupError("no value")
  return row[name]


def _number(value: Any) -> Any:
  """Returns a complex number from Parquet's form, or from CSV's text."""
  if isinstance(value, Mapping):
    return value["re"] + 1j * value["im"]
  return float(value) if isinstance(value, str) else value
