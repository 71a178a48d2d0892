"""Reads the kernels that a PTX text declares, with the sizes of their parameters.

What a compiler says of a kernel's parameters elsewhere is held against this: it is what the driver
goes by.
"""

from __future__ import annotations

import dataclasses
import re

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(
  r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)\b"
  r"(?P<pointer>\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?"
  r"\s+[\w$]+(?:\[(?P<count>\d+)\])?"
)


@dataclasses.dataclass(frozen=True)
class Declared:
  """One parameter of a kernel, as declared.

  Attributes:
    size: in bytes.
    align: its alignment in bytes.
  """

  size: int
  align: int


def entries(ptx: str) -> dict[str, tuple[Declared, ...]]:
  """The kernels of a PTX text by name, each with its parameters."""
  text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
  return {m[1]: tuple(map(_declared, _PARAM.finditer(m[2] or ""))) for m in _ENTRY.finditer(text)}


def _declared(match: re.Match[str]) -> Declared:
  size = int(re.sub(r"\D", "", match["type"])) // 8
  align = int(match["align"]) if match["align"] else size
  return Declared(size * int(match["count"] or 1), align)


def offsets(declared: tuple[Declared, ...]) -> tuple[int, ...]:
  """Where each parameter lies in the block that a launch passes."""
  found: list[int] = []
  end = 0
  for parameter in declared:
    end = -(-end // parameter.align) * parameter.align
    found.append(end)
    end += parameter.size
  return tuple(found)
