# SPDX-License-Identifier: Apache-2.0
"""The run that is open in this process, as the modules below runs see it: what it is, and where."""

from __future__ import annotations

import dataclasses
import os
from typing import Any


@dataclasses.dataclass(frozen=True)
class OpenRun:
  """The facts about a run that its block begins with.

  Attributes:
    folder: an absolute path.
    config: values that JSON has.
  """

  name: str
  folder: str
  config: dict[str, Any]
  notes: str
  tags: tuple[str, ...]


_run: OpenRun | None = None  # under the GIL: one assignment


def run() -> OpenRun | None:
  """The open run; None outside of its block."""
  return _run


def begin(one: OpenRun | None) -> None:
  """From here on this run is open, or none."""
  global _run
  _run = one


def based(path: str) -> str:
  """Where something is to be written: a relative path lies in the open run's folder."""
  return path if _run is None or "://" in path else os.path.join(_run.folder, path)


def resolved(path: str) -> str:
  """The same from the root: without a run, of the working directory as it is now."""
  return path if "://" in path else os.path.abspath(based(path))


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
  """A config's numbers and texts by their keys: "model.width" of nested ones; lists are values."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    inner = flat(value, f"{before}{key}.") if isinstance(value, dict) and value else None
    found |= {f"{before}{key}": value} if inner is None else inner
  return found
