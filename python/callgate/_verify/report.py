# SPDX-License-Identifier: Apache-2.0
"""The report of `verify` about one gate or kernel."""

from __future__ import annotations

import dataclasses

from callgate._core.errors import VerifyError


@dataclasses.dataclass(frozen=True)
class VerifyResult:
  """The answer to one question of `verify`.

  Attributes:
    name: the question, such as "vmap".
    ok: False if the question failed; True if it passed or was skipped.
    message: the comparison that was made; after a failure the expected and the actual value.
    skipped: the reason why the question was skipped; "" if it was not.
  """

  name: str
  ok: bool
  message: str = ""
  skipped: str = ""


@dataclasses.dataclass(frozen=True)
class VerifyReport:
  """The answers of `verify` about one gate or kernel; `str()` formats them as a table.

  Attributes:
    label: the kind and name of the gate or kernel: "gate 'score'".
    results: a `VerifyResult` for each question, always in the same order.
  """

  label: str
  results: tuple[VerifyResult, ...]

  @property
  def ok(self) -> bool:
    """True if no question failed."""
    return not self.failed

  @property
  def failed(self) -> tuple[str, ...]:
    """The names of the questions that failed."""
    return tuple(one.name for one in self.results if not one.ok)

  def raise_for_failed(self) -> None:
    """Raises an exception if a question failed.

    Raises:
      VerifyError: a question failed; the text has the message of each failed question.
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
