# SPDX-License-Identifier: Apache-2.0
"""`replay(path, ignore=, match=, record_new=)`: which call answers, and new calls."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

asked: list[tuple[float, ...]] = []


@pytest.fixture
def path(tmp_path: Path) -> Path:
  asked.clear()
  return tmp_path / "calls.cgr"


@cg.gate(out=jax.ShapeDtypeStruct((), jnp.float32), effect="io", name="choices.draw")
def draw(x: Any, seed: Any, *, params: Any = None) -> Any:
  del params
  asked.append((float(x), float(np.sum(seed))))
  if x < 0:
    raise ValueError("negative")
  return np.float32(x + 100 * np.sum(seed))


@cg.gate(out=lambda x: x, effect="ordered", name="choices.next")
def following(x: Any) -> Any:
  asked.append((float(x),))
  return -x


def failing_with(error: str, program: Any, *args: Any, kind: Any = cg.ReplayError) -> None:
  with pytest.raises(kind, match=error), cg.errors():
    jax.block_until_ready(program(*args))


def record(path: Path, program: Any, *calls: Any, **options: Any) -> None:
  with cg.record(path, **options):
    for args in calls:
      jax.block_until_ready(program(*args))
  asked.clear()


# -- ignore ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("operands", ["arrays", "digest"])
def test_ignored_arguments_are_not_compared(path: Path, engine: str, operands: Any) -> None:
  record(path, jax.jit(draw), (1.0, 5), (2.0, 6), operands=operands)
  by_name = jax.jit(lambda x, seed: draw(x, seed=seed))
  with cg.replay(path, ignore=("seed",)) as replay:
    assert jax.jit(draw)(2.0, 7) == 602
    assert by_name(1.0, jnp.arange(3)) == 501  # of another type, too
    failing_with("only the 2 recorded calls", by_name, 1.0, 5)
  assert (asked, replay.answered, replay.left) == ([], 2, 0)
  with cg.replay(path, ignore=["seed"]):
    failing_with(r"argument 'x': expected float32\[\] ", by_name, 3.0, 5)
  with cg.replay(path):
    failing_with(r"argument 'seed': expected int32\[\] ", by_name, 1.0, 9)


def test_an_ignored_pytree_is_left_out_whole_and_tolerances_count_beside_it(path: Path) -> None:
  program = jax.jit(lambda x, params: draw(x, 5, params=params))
  record(path, program, (1.0, {"w": jnp.ones(2), "b": jnp.ones(())}))
  with cg.replay(path, ignore=("params",), rtol=1e-2):
    assert program(1.001, {"w": jnp.zeros(3)}) == 501
  with cg.replay(path, ignore=("seed", "x")):
    failing_with(r"argument 'params'\['w'\]", program, 1.0, {"w": jnp.zeros(2), "b": jnp.ones(())})


class Mode(enum.Enum):
  LOW = 1
  HIGH = 2


@cg.gate(out=jax.ShapeDtypeStruct((), jnp.float32), effect="io", name="choices.scaled")
def scaled(x: Any, params: Any = None, *, by: Any = 1) -> Any:
  asked.append((float(x),))
  return np.float32(x * (by.value if isinstance(by, Mode) else by) + (params is None))


@pytest.mark.parametrize("operands", ["arrays", "digest"])
@pytest.mark.parametrize(("one", "other"), [(2, 3), (2, 2.0), (Mode.LOW, Mode.HIGH)], ids=str)
def test_static_arguments_are_compared(
  path: Path, engine: str, one: Any, other: Any, operands: Any
) -> None:
  def program(by: Any) -> Any:
    return jax.jit(lambda x: scaled(x, by=by))

  record(path, program(one), (1.0,), (4.0,), operands=operands)
  with cg.replay(path) as replay:
    failing_with("argument 'by': expected ", program(other), 4.0)
    failing_with("argument 'by': expected .*, got no static value", jax.jit(scaled), 4.0)
    answer = program(one)(4.0)
  assert (asked, replay.answered, replay.left) == ([], 1, 1)
  with cg.replay(path, ignore=("by",)) as replay:
    assert program(other)(4.0) == answer
  assert replay.answered == 1


def test_calls_on_one_line_are_told_apart_by_their_static_arguments(path: Path) -> None:
  both = jax.jit(lambda x: (scaled(x, by=2), scaled(x, by=3)))
  swapped = jax.jit(lambda x: (scaled(x, by=3), scaled(x, by=2)))
  record(path, both, (1.0,))
  with cg.replay(path):
    assert both(1.0) == (3, 4)
  with cg.replay(path):
    assert swapped(1.0) == (4, 3)


def test_static_parts_of_a_pytree_are_compared(path: Path) -> None:
  def program(mode: str) -> Any:
    return jax.jit(lambda x: scaled(x, {"w": x, "mode": mode}))

  record(path, program("fast"), (1.0,))
  with cg.replay(path):
    failing_with(r"argument 'params'\['mode'\]: expected 'fast', got 'slow'", program("slow"), 1.0)
    assert program("fast")(1.0) == 1


def test_match_gets_static_arguments(path: Path) -> None:
  record(path, jax.jit(lambda x: scaled(x, by=2)), (1.0,))

  def close(call: Any, recorded: Any) -> bool:
    return call.kwargs["by"] == recorded.kwargs["by"] + 1

  with cg.replay(path, match=close):
    assert jax.jit(lambda x: scaled(x, by=3))(1.0) == 3


def test_a_name_that_no_recorded_gate_has_is_refused(path: Path) -> None:
  record(path, jax.jit(draw), (1.0, 5))
  with pytest.raises(cg.ReplayError, match=r"ignore: expected .*\('seed', 'x'\), got 'sed'"):
    cg.replay(path, ignore=("seed", "sed")).__enter__()
  with pytest.raises(cg.GateDefinitionError, match=r"replay: ignore: expected .*got 'seed'"):
    cg.replay(path, ignore="seed")


# -- match -----------------------------------------------------------------------------------------
def test_a_function_chooses_the_call_that_answers(path: Path, engine: str) -> None:
  record(path, jax.jit(draw), (1.0, 5), (2.0, 6), (3.0, 7))

  def match(call: Any, recorded: Any) -> bool:
    assert call.gate == call.name == recorded.gate == recorded.name == "choices.draw"
    assert recorded.args[1] == recorded.kwargs["seed"]
    return call.args[0] == recorded.kwargs["x"] + 10

  program = jax.jit(lambda x: draw(x, seed=0))
  with cg.replay(path, match=match) as replay:
    assert program(12.0) == 602
    assert program(11.0) == 501
    failing_with("expected a call that match= accepts", program, 11.0)
  assert (asked, replay.answered, replay.left) == ([], 2, 1)


def test_a_matched_call_answers_once_unless_it_is_pure(path: Path) -> None:
  pure = cg.gate(lambda x: x + 1, out=lambda x: x, name="choices.pure")
  programs = {True: jax.jit(pure), False: jax.jit(lambda x: draw(x, 0))}
  for is_pure, program in programs.items():
    where = path.with_suffix(f".{is_pure}")
    record(where, program, (1.0,))
    with cg.replay(where, match=lambda call, recorded: True):
      assert program(5.0) == program(5.0) + 0 if is_pure else program(5.0) == 1
      if not is_pure:
        failing_with("only the 1", program, 5.0)


def test_ordered_calls_are_matched_in_their_order(path: Path) -> None:
  record(path, jax.jit(following), (1.0,), (2.0,))
  with cg.replay(path, match=lambda call, recorded: bool(call.args[0] > recorded.args[0])):
    assert jax.jit(following)(1.5) == -1
    failing_with("expected a call that match= accepts", jax.jit(following), 1.5)
    assert jax.jit(following)(2.5) == -2


def test_what_match_raises_fails_the_program_and_it_stands_alone(path: Path) -> None:
  record(path, jax.jit(draw), (1.0, 5), operands="digest")
  with pytest.raises(cg.ReplayError, match="match: expected a recording with operands"):
    cg.replay(path, match=lambda call, recorded: True).__enter__()
  record(path, jax.jit(draw), (1.0, 5), overwrite=True)
  with cg.replay(path, match=lambda call, recorded: 1 / 0):
    failing_with("division by zero", jax.jit(draw), 1.0, 5, kind=ZeroDivisionError)
  for more in ({"rtol": 1.0}, {"atol": 1.0}, {"ignore": ("x",)}):
    with pytest.raises(cg.GateDefinitionError, match="match: expected None beside"):
      cg.replay(path, match=lambda call, recorded: True, **more)


# -- record_new ------------------------------------------------------------------------------------
def test_new_calls_are_made_and_added(path: Path, engine: str) -> None:
  program = jax.jit(draw)
  record(path, program, (1.0, 5))
  with cg.replay(path, record_new=True) as replay:
    assert program(1.0, 5) == 501
    assert program(2.0, 6) == 602
    failing_with("negative", program, -1.0, 0, kind=ValueError)
  assert asked == [(2, 6), (-1, 0)]
  assert (replay.answered, replay.called, replay.left) == (1, 2, 0)
  for options in ({}, {"record_new": True}):
    with cg.replay(path, **options) as replay:
      assert (program(2.0, 6), program(1.0, 5)) == (602, 501)
      failing_with("negative", program, -1.0, 0, kind=ValueError)
    assert (replay.answered, replay.called, replay.left) == (3, 0, 0)
  assert len(asked) == 2
  with cg.open_stream(path) as stream:
    assert [one.seq for one in stream] == [0, 1, 2]


def test_a_file_that_is_not_there_is_made(path: Path) -> None:
  program = jax.jit(jax.vmap(draw, (0, None)))
  for called in (3, 0):
    with cg.replay(path, record_new=True) as replay:
      np.testing.assert_array_equal(program(jnp.arange(3.0), 1), [100, 101, 102])
    assert (replay.called, len(asked)) == (called, 3)
  with pytest.raises(FileNotFoundError):
    cg.replay(path.with_suffix(".none")).__enter__()


@pytest.mark.parametrize("operands", ["arrays", "digest"])
def test_new_calls_are_kept_as_the_others_are_and_whole(path: Path, operands: Any) -> None:
  program = jax.jit(draw)
  record(path, program, (1.0, 5), operands=operands)
  with cg.replay(path, record_new=True, ignore=("seed",)):
    assert program(1.0, 6) == 501
    assert program(2.0, 6) == 602
  with cg.replay(path) as replay:
    assert (program(1.0, 5), program(2.0, 6)) == (501, 602)
  with cg.open_stream(path) as stream:
    assert len({tuple(sorted(one.leaves)) for one in stream}) == 1
  assert replay.left == 0


def test_ordered_calls_are_added_behind_the_recorded_ones(path: Path) -> None:
  program = jax.jit(following)
  record(path, program, (1.0,), (2.0,))
  with cg.replay(path, record_new=True):
    assert program(1.0) == -1
    failing_with(r"argument 'x': expected float32\[\] with 2.0, got 3.0", program, 3.0)
    assert program(2.0) == -2
    assert program(3.0) == -3
  with cg.replay(path):
    assert [float(program(x)) for x in (1.0, 2.0, 3.0)] == [-1, -2, -3]
  assert asked == [(3.0,)]
