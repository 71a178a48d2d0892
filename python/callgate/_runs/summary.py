# SPDX-License-Identifier: Apache-2.0
"""`run.summary`: a run's results by name, which are written to `run.json` at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

from callgate._core import options
from callgate._runs import values


class Result(NamedTuple):
  """A value as it was set, and as JSON has it."""

  given: Any
  plain: Any


class Summary(MutableMapping[str, Any]):
  """A run's results by name: `run.summary["accuracy"] = 0.97`; reading returns the value as set."""

  def __init__(
    self, held: dict[str, Result], change: Callable[[str, Result | None], None]
  ) -> None:  # fmt: skip
    self._held = held  # the run's results
    self._change = change  # sets a result, also in run.json, or removes it for None

  def __getitem__(self, name: str) -> Any:
    return self._held[name].given

  def __setitem__(self, name: str, value: Any) -> None:
    options.text("run", "summary", name, "a string for each key")
    self._change(name, Result(value, values.plain("run: summary", value, name)))

  def __delitem__(self, name: str) -> None:
    self._change(name, None)

  def __iter__(self) -> Iterator[str]:
    return iter(list(self._held))

  def __len__(self) -> int:
    return len(self._held)

  def __repr__(self) -> str:
    return repr(dict(self))
