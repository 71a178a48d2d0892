# SPDX-License-Identifier: Apache-2.0
"""Describes how a call differs from a recorded one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from callgate._core.dtypes import Value, array_of, is_inexact
from callgate._replay import static
from callgate._replay.calls import Recorded, digest, text_of


def is_close(recorded: Recorded, operands: Sequence[Value], rtol: float, atol: float) -> bool:
  """True if the operands equal those of a recorded call, within a tolerance."""
  if recorded.types != tuple((code, shape) for code, shape, _ in operands):
    return False
  digests = zip(recorded.digests, operands, strict=True)
  different = [i for i, (known, came) in enumerate(digests) if known != digest(came)]
  if different and recorded.operands is None:
    return False
  return all(
    is_inexact(came.dtype)
    and np.allclose(_wide(came), _wide(recorded.arrays[i]), rtol, atol, equal_nan=True)
    for i, came in ((i, array_of(operands[i])) for i in different)
  )


def _wide(array: np.ndarray) -> np.ndarray:
  """Returns the array in a dtype in which NumPy can compare."""
  return array if array.dtype.kind in "fc" else array.astype(np.float64)


def difference(recorded: Recorded, came: Recorded) -> str:
  """Returns the first difference: "argument 'x': expected float32[3] with 1.0 at [0], got 2.0"."""
  if found := static.difference(recorded.static, came.static):
    return found
  if len(recorded.types) != len(came.types):
    return f"expected {len(recorded.types)} arrays, got {len(came.types)}"
  for index, type in enumerate(came.types):
    name, expected = recorded.names[index], recorded.types[index]
    if expected != type:
      return f"argument {name}: expected {text_of(expected)}, got {text_of(type)}"
    if came.digests[index] == recorded.digests[index]:
      continue
    if recorded.operands is None or came.operands is None:
      was = f"{text_of(expected)} with digest {recorded.digests[index].hex()}"
      return f"argument {name}: expected {was}, got one with digest {came.digests[index].hex()}"
    return f"argument {name}: {_elements(recorded.arrays[index], came.arrays[index])}"
  return "expected another call, got one with the same operands"


def of_results(recorded: Sequence[Value], came: Sequence[Value]) -> str:
  """Returns the first difference between the results of two calls; "" if there is none."""
  if len(recorded) != len(came):
    return f"expected {len(recorded)} results, got {len(came)}"
  for index, (one, other) in enumerate(zip(recorded, came, strict=True)):
    if one[:2] != other[:2]:
      return f"result {index}: expected {text_of(one[:2])}, got {text_of(other[:2])}"
    if one[2] != other[2]:
      return f"result {index}: {_elements(array_of(one), array_of(other))}"
  return ""


def _elements(expected: np.ndarray, came: np.ndarray) -> str:
  """Describes where two arrays of one type differ, bit by bit."""
  size = max(1, expected.dtype.itemsize)
  one, other = (x.reshape(-1, 1).view(np.uint8).reshape(-1, size) for x in (expected, came))
  differ = (one != other).any(axis=1)
  first = int(np.argmax(differ))
  index = [int(i) for i in np.unravel_index(first, expected.shape)]
  place = f" at {index}" if index else ""
  text = f"{expected.dtype.name}{list(expected.shape)}".replace(" ", "")
  counted = f" ({int(differ.sum())} of {expected.size} elements differ)" if index else ""
  was, now = expected.reshape(-1)[first], came.reshape(-1)[first]
  return f"expected {text} with {was}{place}, got {now}{counted}"
