# SPDX-License-Identifier: Apache-2.0
"""Copies and pickles of things that belong to their process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import callgate as cg

THINGS = {
  "ticket": "<ticket of gate 'copies.square'> can't be pickled: .*; pass the value of result",
  "recording": "<callgate.record\\('.*calls'\\)> can't be pickled: .*; pass its path",
  "replay": "<callgate.replay\\('.*calls'\\)> can't be pickled: .*; pass its path",
  "checkpoints": "<Checkpoints in .*> can't be pickled: .*; make a new cg.Checkpoints",
}


@pytest.mark.parametrize("what", THINGS)
def test_things_of_a_process_are_their_copies_and_say_why_they_stay(
  what: str, tmp_path: Path
) -> None:
  square = cg.gate(lambda x: x * x, out=lambda x: x, name="copies.square")
  make: dict[str, Any] = {
    "ticket": lambda: square.start(np.float32(3)),
    "recording": lambda: cg.record(str(tmp_path / "calls")),
    "replay": lambda: cg.replay(str(tmp_path / "calls")),
    "checkpoints": lambda: cg.Checkpoints(tmp_path),
  }
  thing = make[what]()
  assert copy.copy(thing) is copy.deepcopy([thing])[0] is thing
  for pickled in (pickle, cloudpickle):
    with pytest.raises(pickle.PicklingError, match=THINGS[what]):
      pickled.dumps([thing])
  if what == "ticket":
    assert thing.result() == 9


class Scale:
  def __init__(self, by: float) -> None:
    self.by = by

  @cg.gate(out=lambda x: x)
  def scaled(self, x: Any) -> Any:
    return x * np.float32(self.by)


def test_a_bound_method_is_copied_and_pickled_with_its_object() -> None:
  one = Scale(3)
  for again in (copy.deepcopy(one.scaled), pickle.loads(pickle.dumps(one.scaled))):
    assert again.__self__ is not one
    assert again(np.float32(2)) == 6
  assert copy.copy(one.scaled) == one.scaled
