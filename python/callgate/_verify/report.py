# SPDX-License-Identifier: Apache-2.0
"""The answers to the questions about one gate or kernel."""

from __future__ import annotations

import dataclasses

from callgate._core.errors import VerifyError


@dataclasses.dataclass(frozen=True)
class VerifyResult:
  """The answer to one question of `verify`.

  Attributes:
    name: the question, as "vmap".
    ok: False if the answer was wrong; a question that was skipped has True.
    message: what was compared or, of a failure, what was expected and what came.
    skipped: why it was not asked; "" if it was.
  """

  name: str
  ok: bool
  message: str = ""
  skipped: str = ""


@dataclasses.dataclass(frozen=True)
class VerifyReport:
  """The answers of `verify` about one gate or kernel; `str()` makes a table of them.

  Attributes:
    label: the kind and name of the gate or kernel: "gate 'score'".
    results: a `VerifyResult` for each question, always in the same order.
  """

  label: str
  results: tuple[VerifyResult, ...]

  @property
  def ok(self) -> bool:
    """True if no question that was asked failed."""
    return not self.failed

  @property
  def failed(self) -> tuple[str, ...]:
    """The names of the questions that failed."""
    return tuple(one.name for one in self.results if not one.ok)

  def raise_for_failed(self) -> None:
    """Does nothing if the report is ok.

    Raises:
      VerifyError: a question failed; its text has each that did, with its message.
    """
    wrong = [one for one in self.results if not one.ok]
    if wrong:
      lines = "".join(f"\n  {one.name}: {_indented(one.message)}" for one in wrong)
      what = f"{self.label}: {len(wrong)} of {len(self.results)} questions failed{lines}"
      raise VerifyError(what, self.failed)

  def __str__(self) -> str:
    asked = sum(not one.skipped for one in self.results)
    count = f"{asked} questions asked, {len(self.failed)} failed"
    width = max((len(one.name) for one in self.results), default=0)
    lines = [f"{self.label}: {count}"]
    for one in self.results:
      state = "skipped" if one.skipped else "ok" if one.ok else "FAILED"
      first, *others = (one.skipped or one.message).splitlines() or [""]
      lines.append(f"  {one.name:{width}}  {state:7}  {first}".rstrip())
      lines += [f"{'':{width + 13}}{line}".rstrip() for line in others]
    return "\n".join(lines)


def _indented(text: str) -> str:
  return text.replace("\n", "\n    ")
