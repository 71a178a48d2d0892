# SPDX-License-Identifier: Apache-2.0
"""Reads a set of weak references that other threads add to."""

from __future__ import annotations

import weakref
from typing import TypeVar

T = TypeVar("T")


def members(weak: weakref.WeakSet[T]) -> list[T]:
  """Returns the live members; plain `list()` raises if another thread adds one meanwhile."""
  while True:
    try:
      return list(weak)
    except RuntimeError:  # "Set changed size during iteration" (CPython 3.11 to 3.13)
      continue
