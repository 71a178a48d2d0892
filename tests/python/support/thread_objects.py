# SPDX-License-Identifier: Apache-2.0
"""Objects that take no other thread than that which made them, as many libraries' do."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np


class Checked:
  """Notes each use of it on another thread than its own, its end included, and counts who lives."""

  live: ClassVar[int] = 0
  wrong: ClassVar[list[str]] = []
  threads: ClassVar[set[int]] = set()  # that made some

  def __init__(self, value: Any = 0.0) -> None:
    self.value, self.own = np.array(value, np.float32), threading.get_ident()
    Checked.live += 1
    Checked.threads.add(self.own)

  def check(self, what: str) -> None:
    if threading.get_ident() != self.own:
      Checked.wrong.append(what)

  def add(self, x: Any) -> Any:
    self.check("add")
    return np.float32(self.value.sum()) + np.asarray(x)

  def solve(self, b: Any) -> Any:
    """As a factorisation of the diagonal matrix of its value."""
    self.check("solve")
    return (b / self.value).astype(np.float32)

  def __del__(self) -> None:
    self.check("end")
    Checked.live -= 1

  @classmethod
  def forget(cls) -> None:
    cls.wrong.clear()
    cls.threads.clear()
