# SPDX-License-Identifier: Apache-2.0
"""callgate's exceptions in pickles and copies, and the lane that they name."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._core import errors
from callgate.compat._host_callback import TapFunctionException

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
  "CheckError": ("expected more", {"x": np.arange(3.0), "y": (np.int32(1),)}, "train.py:3"),
  "KernelError": ("scale", "bad alloc"),
  "ConsumerError": ("no space left", 7),
  "ProcessError": (1, "ValueError", "no"),
  "RecordedError": ("ValueError", "no"),
  "CompileError": ("the compiler failed", "line 3: error"),
  "ResultShapeError": (0, (2,), (3,)),
  "TapFunctionException": ("functions of taps raised", [KeyError("k"), ValueError("v")]),
}
_CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
_KINDS = [kind for kind in _CLASSES if issubclass(kind, Exception)] + [TapFunctionException]


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_an_exception_is_the_same_in_a_pickle_and_a_copy(kind: Any, copied: Any) -> None:
  error = kind(*_ARGUMENTS.get(kind.__name__, ("what happened",)))
  error.add_note("where")
  again = copied(error)
  assert (type(again), str(again), again.args) == (kind, str(error), error.args)
  assert repr(again.__dict__) == repr(error.__dict__)
  assert again.__notes__[-1] == "where"


def test_a_copy_of_an_error_can_be_told_its_site() -> None:
  again = pickle.loads(pickle.dumps(cg.CheckError("no", {"x": np.ones(2)})))
  again.at("train.py:3")
  assert str(again) == "no\n  x = [1. 1.]\n  checked at train.py:3"


def test_a_raised_check_s_error_goes_to_another_process_with_its_values() -> None:
  program = jax.jit(lambda x: cg.check(x < 0, "expected less than 0, got {x}", x=x))
  with pytest.raises(cg.CheckError) as caught, cg.errors():
    program(2.0)
  error = pickle.loads(pickle.dumps(caught.value))
  assert isinstance(error, cg.CheckError)
  assert error.message == "expected less than 0, got 2.0"
  assert isinstance(error.values["x"], np.ndarray)
  assert error.values["x"] == 2.0


def refuse(x: Any) -> Any:
  if x > 4:
    raise ValueError("too much")
  return x


def notes_of_failure(gate: cg.Gate, levels: int) -> list[str]:
  """The notes of what the last of 6 values raises, in so many levels of lanes."""
  f: Any = gate
  for _ in range(levels):
    f = jax.vmap(f)
  x = np.arange(6, dtype=np.float32).reshape(2, 3) if levels == 2 else np.arange(6.0)
  with pytest.raises(ValueError, match="too much") as caught, cg.errors():
    jax.block_until_ready(jax.jit(f)(x if levels else 5.0))
  return caught.value.__notes__


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_failure_under_vmap_names_the_lane(engine: str, levels: int) -> None:
  # JAX's own callback of a gate without effects has no lanes to tell of.
  (note,) = notes_of_failure(cg.gate(refuse, out=lambda x: x, effect="ordered"), levels)
  assert note.count(" in lane ") == bool(levels)
  assert ["", " in lane 5", " in lane (1, 2)"][levels] in note


@pytest.mark.parametrize("place", ["workers", "executor"])
def test_a_failure_elsewhere_names_the_lane(place: str, tmp_path: Path) -> None:
  there = cg.workers(2) if place == "workers" else ThreadPoolExecutor(2)
  with there as run_on:
    gate = cg.gate(refuse, out=lambda x: x, run_on=run_on)
    for recorded in (contextlib.nullcontext(), cg.record(tmp_path / "failures.cgr")):
      with recorded:
        for levels, which in enumerate(("", " in lane 5", " in lane (1, 2)")):
          notes = notes_of_failure(gate, levels)
          (note,) = (n for n in notes if n.startswith("callgate: raised in"))
          assert which in note
          assert note.count(" in lane ") == bool(levels)


ADDRESS = "https://callgate.github.io/callgate/messages/"


def test_the_notes_of_an_error_lead_to_the_page_of_messages() -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    cg.gate(np.sort)(1.0)
  assert ADDRESS in caught.value.__notes__[0]
  gate = cg.gate(lambda x: x[:1], out=lambda x: x)
  for _ in range(2):
    with pytest.raises(cg.ResultError) as caught_later, cg.errors():
      jax.jit(gate)(np.ones(2, np.float32)).block_until_ready()
    called, page = caught_later.value.__notes__
    assert ", called at " in called
    assert ADDRESS in page


def test_the_user_s_own_words_need_no_page() -> None:
  with pytest.raises(cg.CheckError) as caught, cg.errors():
    jax.jit(lambda x: cg.check(x < 0, "no"))(1.0)
  assert ADDRESS not in "".join(caught.value.__notes__)
