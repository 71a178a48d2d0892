# SPDX-License-Identifier: Apache-2.0
"""How many random programs were right, by the part of callgate and the transformation around it.

python tests/programs/counts.py OTHER.json ...  # adds counts to those that the page is made of
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

FILE = pathlib.Path(__file__).parent / "counts.json"  # of which `docs/what_works.md` is made


@dataclasses.dataclass
class Refusal:
  """Programs that were refused by the same words, and what all of them have."""

  programs: int
  have: set[str]


@dataclasses.dataclass
class Counts:
  """Numbers of programs.

  Attributes:
    programs: programs that were right, by the version of JAX.
    cells: those with a part inside of a transformation, or run in a way: on one device, over more.
    refusals: by the words of `refusals.py`.
  """

  programs: dict[str, int] = dataclasses.field(default_factory=dict)
  cells: dict[str, dict[str, tuple[int, int]]] = dataclasses.field(default_factory=dict)
  refusals: dict[str, Refusal] = dataclasses.field(default_factory=dict)

  def add_right(self, jax: str, pairs: Iterable[tuple[str, str]], over_devices: bool) -> None:
    """Counts a program with these pairs of a part and what it is in."""
    self.programs[jax] = self.programs.get(jax, 0) + 1
    for part, around in set(pairs):
      self._add(part, around, (0, 1) if over_devices else (1, 0))

  def add_refused(self, words: str, have: Iterable[str], programs: int = 1) -> None:
    known = self.refusals.setdefault(words, Refusal(0, set(have)))
    known.programs += programs
    known.have &= set(have)

  def add(self, other: Counts) -> None:
    for version, count in other.programs.items():
      self.programs[version] = self.programs.get(version, 0) + count
    for part, row in other.cells.items():
      for around, counts in row.items():
        self._add(part, around, counts)
    for words, refusal in other.refusals.items():
      self.add_refused(words, refusal.have, refusal.programs)

  def _add(self, part: str, around: str, counts: tuple[int, int]) -> None:
    row = self.cells.setdefault(part, {})
    one, more = row.get(around, (0, 0))
    row[around] = one + counts[0], more + counts[1]

  def write(self, file: pathlib.Path) -> None:
    sets: Any = lambda value: sorted(value) if isinstance(value, set) else vars(value)
    file.write_text(
      json.dumps(vars(self), indent=1, sort_keys=True, default=sets) + "\n", encoding="utf-8"
    )


def read(file: pathlib.Path) -> Counts:
  """The counts in a file; none where there is none."""
  if not file.exists():
    return Counts()
  data = json.loads(file.read_text(encoding="utf-8"))
  refusals = {
    words: Refusal(known["programs"], set(known["have"]))
    for words, known in data["refusals"].items()
  }
  return Counts(data["programs"], data["cells"], refusals)


if __name__ == "__main__":
  whole = read(FILE)
  for name in sys.argv[1:]:
    whole.add(read(pathlib.Path(name)))
  whole.write(FILE)
