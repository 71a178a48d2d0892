# SPDX-License-Identifier: Apache-2.0
"""Arrays that XLA's collectives make for calls of a compiled program, read from its HLO text."""

from __future__ import annotations

import collections
import math
import re

import ml_dtypes
import numpy as np

_LINE = re.compile(
  r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?P<opcode>custom-call|all-gather|all-gather-done|"
  r'all-to-all|collective-permute|collective-permute-done|all-reduce)\(.*op_name="(?P<op>[^"]*)"'
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\w*)\[(?P<dims>[\d,]*)\]")


def by_operation(hlo: str) -> dict[str, int]:
  """Bytes on each device for one call, by the operation as JAX and callgate name it.

  That is, "jit(f)/while/body/callgate/NAME". Where several calls have a name, it is what they have
  on average.
  """
  calls: collections.Counter[str] = collections.Counter()
  moved: collections.Counter[str] = collections.Counter()
  for match in filter(None, map(_LINE.match, hlo.splitlines())):
    if match["opcode"] == "custom-call":
      calls[match["op"]] += 1
    else:
      moved[match["op"]] += _nbytes(match["type"])
  return {op: moved[op] // count for op, count in calls.items()}


def _nbytes(text: str) -> int:
  """The bytes of the arrays of an HLO type."""
  arrays = (
    (math.prod(map(int, filter(None, m["dims"].split(",")))), m["dtype"])
    for m in _ARRAY.finditer(text)
  )
  return sum(count * _bits(dtype) // 8 for count, dtype in arrays)


def _bits(dtype: str) -> int:
  if dtype == "pred":
    return 8
  if plain := re.fullmatch(r"(?:[fsuc]|bf)(\d+)", dtype):
    return int(plain[1])
  named = getattr(ml_dtypes, f"float{dtype.removeprefix('f')}", np.uint8)  # f8e4m3fn
  return np.dtype(named).itemsize * 8
