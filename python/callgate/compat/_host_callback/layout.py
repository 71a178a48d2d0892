"""How `id_print` lays a pytree out as text, in its form of 2020 and in that of 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def write(output_stream: Any, entries: Mapping[str, Any], body: str) -> None:
  """Writes a line of sorted `key: value`, if there are entries, then the body."""
  first = " ".join(f"{key}: {value}" for key, value in sorted(entries.items()))
  text = f"{first}\n{body}\n" if first else f"{body}\n"
  if output_stream is not None:
    output_stream.write(text)
  else:
    print(text, end="", flush=True)


def text_of(value: Any, threshold: int, width: int = 0, column: int = 0) -> str:
  """The form of 2020: each element on a line of its own, under the first.

  With a width that of 2023: on one line where it fits, and tuples have parentheses.
  `column` is where on its line the text begins.
  """
  if isinstance(value, (tuple, list)):
    start, end = ("( ", " )") if width and isinstance(value, tuple) else ("[ ", " ]")
    items: list[tuple[str, Any]] = [("", one) for one in value]  # pyright: ignore[reportUnknownVariableType]
  elif isinstance(value, dict):
    start, end = "{ ", " }"
    entries: list[tuple[Any, Any]] = sorted(value.items(), key=lambda item: item[0])  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownLambdaType]
    items = [(f"{key}=", one) for key, one in entries]
  elif isinstance(value, np.ndarray):
    return np.array2string(value, threshold=threshold)
  else:
    return str(value)
  inner = column + len(start)
  parts = [_hang(label, text_of(one, threshold, width, inner + len(label))) for label, one in items]
  line = start + " ".join(parts) + end
  if "\n" in line or column + len(line) > width:
    return _hang(start, "\n".join(parts)) + end
  return line


def _hang(label: str, text: str) -> str:
  """`text` after `label`, its further lines under its first."""
  return label + text.replace("\n", "\n" + " " * len(label))
