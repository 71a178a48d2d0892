"""How `id_print` lays a pytree out as text, in its form of 2020 and in that of 2023."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WIDTH = 80  # characters of a line, in the form of 2023


def header(entries: Mapping[str, Any]) -> str:
  """`key: value` for each entry, sorted, on one line; "" without entries."""
  return " ".join(f"{key}: {value}" for key, value in sorted(entries.items()))


def stacked(value: Any, threshold: int) -> str:
  """The form of 2020: each element on a line of its own, under the first.

  Args:
    value: a pytree of NumPy arrays.
    threshold: elements above which `numpy.array2string` summarises.
  """
  if isinstance(value, (tuple, list)):
    items = [("", one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return _stack("[ ", items, " ]", threshold)
  if isinstance(value, dict):
    entries = [(f"{key}=", one) for key, one in _sorted(value)]
    return _stack("{ ", entries, " }", threshold)
  return _leaf(value, threshold)


def _stack(start: str, items: Sequence[tuple[str, Any]], end: str, threshold: int) -> str:
  lines = [_hang(label, stacked(one, threshold)) for label, one in items]
  return _hang(start, "\n".join(lines)) + end


def filled(value: Any, threshold: int, column: int = 0) -> str:
  """The form of 2023: on one line where it fits, else as `stacked`; tuples have parentheses.

  Args:
    value: a pytree of NumPy arrays.
    threshold: elements above which `numpy.array2string` summarises.
    column: where on its line the text begins.
  """
  if isinstance(value, (tuple, list)):
    start, end = ("( ", " )") if isinstance(value, tuple) else ("[ ", " ]")
    items = [("", one) for one in value]  # pyright: ignore[reportUnknownVariableType]
  elif isinstance(value, dict):
    start, end = "{ ", " }"
    items = [(f"{key}=", one) for key, one in _sorted(value)]
  else:
    return _leaf(value, threshold)
  inner = column + len(start)
  parts = [_hang(label, filled(one, threshold, inner + len(label))) for label, one in items]
  line = start + " ".join(parts) + end
  if "\n" not in line and column + len(line) <= WIDTH:
    return line
  return _hang(start, "\n".join(parts)) + end


def _sorted(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
  return sorted(value.items(), key=lambda item: item[0])


def _hang(label: str, text: str) -> str:
  """`text` after `label`, its further lines under its first."""
  return label + text.replace("\n", "\n" + " " * len(label))


def _leaf(value: Any, threshold: int) -> str:
  if isinstance(value, np.ndarray):
    return np.array2string(value, threshold=threshold)
  return str(value)
