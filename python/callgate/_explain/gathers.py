# SPDX-License-Identifier: Apache-2.0
"""Reads the arrays that XLA's collectives produce for calls from a compiled program's HLO text."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

_LINE = re.compile(
  r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[a-z][\w\-]*)"
  r"\((?P<operands>[^)]*)\)"
  r'(?:.*op_name="(?P<op>[^"]*)")?'
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\w*)\[(?P<dims>[\d,]*)\]")
_COLLECTIVES = {
  "all-gather", "all-gather-done", "all-to-all", "collective-permute", "collective-permute-done",
  "all-reduce",
}  # fmt: skip
_PASSED_ON = {"bitcast", "copy", "get-tuple-element", "reshape", "transpose"}


def by_operation(hlo: str) -> dict[str, int]:
  """Returns bytes on each device for one call, by the operation's name in JAX and callgate.

  A name is such as "jit(f)/while/body/callgate/NAME". Several calls of one name get their average.
  A collective belongs to the call whose name it has, or else to the call whose operand it produces.
  """
  lines = {match["name"]: match for match in filter(None, map(_LINE.match, hlo.splitlines()))}
  calls = [line for line in lines.values() if line["opcode"] == "custom-call" and line["op"]]
  made = {name: line["op"] for name, line in lines.items() if line["opcode"] in _COLLECTIVES}
  count = collections.Counter(line["op"] for line in calls)
  for call in calls:
    for name in _sources(call, lines):
      if name in made and made[name] not in count:
        made[name] = call["op"]
  moved: collections.Counter[str] = collections.Counter()
  for name, op in made.items():
    moved[op] += _nbytes(lines[name]["type"])
  return {op: moved[op] // number for op, number in count.items()}


def _sources(line: re.Match[str], lines: Mapping[str, re.Match[str]]) -> Iterator[str]:
  """Yields the names of the operations that produce an operation's operands."""
  for name in re.findall(r"%([\w.\-]+)", line["operands"]):
    if name in lines:
      yield name
      if lines[name]["opcode"] in _PASSED_ON:
        yield from _sources(lines[name], lines)


def _nbytes(text: str) -> int:
  """Returns the bytes of the arrays of an HLO type."""
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
