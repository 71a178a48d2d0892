# SPDX-License-Identifier: Apache-2.0
"""callgate's exceptions in pickles and copies, and the lane that they name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._core import errors, foreign
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


def test_a_copy_of_an_error_can_get_its_site() -> None:
  again = pickle.loads(pickle.dumps(cg.CheckError("no", {"x": np.ones(2)})))
  errors.set_site(again, "train.py:3")
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


ADDRESS = "https://callgate.github.io/callgate/messages"
# The user wrote the text of these exceptions.
_OWN_TEXT = {"CheckError", "EndOfFeed", "RecordedError", "VerifyError"}
_PUBLIC = {
  kind
  for module in (cg, cg.sinks)
  for name in module.__all__
  if isinstance(kind := getattr(module, name), type) and issubclass(kind, Exception)
}


def pages(error: BaseException) -> int:
  return sum(ADDRESS in note for note in getattr(error, "__notes__", ()))


@pytest.mark.parametrize("kind", sorted(_PUBLIC, key=repr), ids=lambda kind: kind.__name__)
def test_the_last_note_of_each_exception_leads_to_the_page_of_its_messages(kind: Any) -> None:
  error = kind(*_ARGUMENTS.get(kind.__name__, ("what happened",)))
  expected = kind.__name__ not in _OWN_TEXT
  before = issubclass(kind, (cg.GateDefinitionError, cg.CompileError))
  page = "messages" if before else "messages_running"
  assert issubclass(kind, cg.GateError)
  for note in ("called here", "then there", "called here"):
    foreign.add_note(error, note)
  for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
    assert one.__notes__[:2] == ["called here", "then there"]
    assert pages(one) == len(one.__notes__) - 2 == expected
    assert not expected or one.__notes__[-1].endswith(f"/{page}/")


def test_all_public_exceptions_are_known() -> None:
  assert {cg.GateError, cg.HandleError, cg.ReplayError, cg.sinks.SinkError} <= _PUBLIC
  assert {kind.__name__ for kind in _PUBLIC} >= _OWN_TEXT
  assert len(_PUBLIC) >= 20


_COUNT = jax.ShapeDtypeStruct((), np.int32)


def raised_at_a_definition() -> None:
  cg.gate(np.sort)(1.0)


def raised_by_a_replay() -> None:
  with cg.replay(__file__):
    pass


def raised_by_a_closed_thread() -> None:
  with cg.thread("errors") as thread:
    pass
  thread.start()


def raised_by_a_feed() -> None:
  feed = cg.feed(np.arange(3))
  feed.close()
  next(feed)


def raised_by_a_handle() -> None:
  with cg.errors():
    jax.jit(lambda words: cg.use(len, cg.Handle(words), out=_COUNT))(np.zeros(2, np.uint32))


def raised_in_a_program() -> None:
  with cg.errors():
    jax.jit(cg.gate(lambda x: x[:1], out=lambda x: x))(np.ones(2, np.float32))


def raised_in_a_worker(x: Any) -> Any:
  raise cg.HandleError("of a worker")


def raised_by_a_worker() -> None:
  with cg.workers(1) as pool, cg.errors():
    jax.jit(cg.gate(raised_in_a_worker, out=lambda x: x, run_on=pool))(1.0)


@pytest.mark.parametrize(
  "raised",
  [
    raised_at_a_definition, raised_by_a_replay, raised_by_a_closed_thread, raised_by_a_feed,
    raised_by_a_handle, raised_in_a_program, raised_by_a_worker,
  ],
)  # fmt: skip
def test_an_error_leads_to_the_page_once_wherever_it_is_raised(raised: Any) -> None:
  with pytest.raises(cg.GateError) as caught:
    raised()
  assert pages(caught.value) == 1


def test_the_page_follows_the_place_of_the_call() -> None:
  for _ in range(2):
    with pytest.raises(cg.ResultError) as caught:
      raised_in_a_program()
    called, page = caught.value.__notes__
    assert ", called at " in called
    assert ADDRESS in page


def test_a_frozen_subclass_has_the_note() -> None:
  @dataclasses.dataclass(frozen=True)
  class Frozen(cg.GateError):
    value: int

  assert pages(Frozen(3)) == 1


def test_a_text_of_the_user_needs_no_page() -> None:
  with pytest.raises(cg.CheckError) as caught, cg.errors():
    jax.jit(lambda x: cg.check(x < 0, "no"))(1.0)
  assert pages(caught.value) == 0
