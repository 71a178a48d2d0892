# SPDX-License-Identifier: Apache-2.0
"""The open run of this process, for modules that can't import `_runs`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class OpenRun:
  """Facts about a run, known when its block begins.

  Attributes:
    folder: an absolute path.
    config: values that JSON can represent.
    results: returns the results so far, likewise.
  """

  name: str
  folder: str
  config: dict[str, Any]
  notes: str
  tags: tuple[str, ...]
  results: Callable[[], dict[str, Any]]


_run: OpenRun | None = None  # atomic: one assignment


def run() -> OpenRun | None:
  """Returns the open run; None outside its block."""
  return _run


def begin(one: OpenRun | None) -> None:
  """Sets the open run, or None."""
  global _run
  _run = one


def based(path: str) -> str:
  """Returns the place of a file: a relative path is in the open run's folder."""
  return path if _run is None or "://" in path else os.path.join(_run.folder, path)


def resolved(path: str) -> str:
  """Returns the same as an absolute path; without a run, of the current working directory."""
  return path if "://" in path else os.path.abspath(based(path))


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
  """Returns a config's numbers and texts by keys such as "model.width"; lists are values."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    inner = flat(value, f"{before}{key}.") if isinstance(value, dict) and value else None
    found |= {f"{before}{key}": value} if inner is None else inner
  return found
