# SPDX-License-Identifier: Apache-2.0
"""Counters and traces of calls."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg


def wait(program: Any, *args: Any) -> Any:
  return jax.block_until_ready(program(*args))


def counted(**options: Any) -> cg.Gate:
  return cg.gate(lambda x: x + x, **{"out": lambda x: x, "effect": "io", **options})


def test_calls_and_bytes_are_counted() -> None:
  gate = counted()
  program = jax.jit(gate)
  for _ in range(5):
    wait(program, jnp.zeros((3, 4)))
  stats = cg.stats()[gate.name]
  assert (stats["calls"], stats["errors"]) == (5, 0)
  assert stats["bytes"] == 5 * 2 * 3 * 4 * 4  # an operand and a result of 12 float32


@pytest.mark.parametrize("thread", ["xla", "own"])
def test_lanes_and_steps_count_each(thread: str) -> None:
  gate = counted(thread=thread)
  wait(jax.jit(jax.vmap(gate)), jnp.zeros(7))
  wait(jax.jit(lambda xs: jax.lax.map(gate, xs)), jnp.zeros(5))
  assert cg.stats()[gate.name]["calls"] == 12


def test_errors_are_counted() -> None:
  def fail(x: Any) -> Any:
    raise ValueError

  gate = cg.gate(fail, out=lambda x: x, effect="io")
  for _ in range(3):
    with pytest.raises(jax.errors.JaxRuntimeError):
      wait(jax.jit(gate), np.float32(0))
  assert cg.stats()[gate.name]["errors"] == 3


def test_packed_arrays_count_the_bytes_they_take() -> None:
  gate = cg.gate(
    lambda x: np.float32(0),
    out=jax.ShapeDtypeStruct((), np.float32),
    arrays="buffer",
    effect="io",
  )
  wait(jax.jit(gate), jnp.zeros(10, "int4"))
  assert cg.stats()[gate.name]["bytes"] == 5 + 4


def test_a_gate_that_was_never_called_has_zeros() -> None:
  gate = counted()
  assert set(cg.stats()[gate.name].values()) == {0}


def test_time_is_measured_only_while_timing_is_on() -> None:
  gate = cg.gate(lambda x: (time.sleep(0.02), x)[1], out=lambda x: x, effect="io")
  program = jax.jit(gate)
  wait(program, np.float32(0))
  assert cg.stats()[gate.name]["python_seconds"] == 0
  with cg.config(timing=True):
    wait(program, np.float32(0))
  wait(program, np.float32(0))
  stats = cg.stats()[gate.name]
  assert 0.02 <= stats["python_seconds"] < 5
  assert 0 <= stats["gil_wait_seconds"] < 5


def test_waiting_for_the_gil_is_not_time_in_python() -> None:
  gate = counted(thread="own")
  program = jax.jit(lambda x: gate(x) + 1)
  wait(program, np.float32(0))
  with cg.config(timing=True):
    result = program(jnp.zeros((50, 50)))
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
      pass
    wait(lambda: result)
  stats = cg.stats()[gate.name]
  assert stats["gil_wait_seconds"] >= 0
  assert stats["python_seconds"] < 0.1


# -- traces ---
def read(path: Path) -> list[dict[str, Any]]:
  return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def calls(path: Path) -> list[dict[str, Any]]:
  """The trace's gate calls, without the long waits for the GIL that a busy machine adds."""
  return [event for event in read(path) if event["cat"] == "gate"]


def test_a_trace_has_one_complete_event_a_call(tmp_path: Path) -> None:
  gate = cg.gate(lambda x: (time.sleep(0.01), x)[1], out=lambda x: x, effect="io", name="traced")
  program = jax.jit(gate)
  wait(program, np.float32(0))
  with cg.trace(tmp_path / "trace.json"):
    for _ in range(3):
      wait(program, np.float32(0))
  wait(program, np.float32(0))
  events = calls(tmp_path / "trace.json")
  assert [e["name"] for e in events] == ["traced"] * 3
  for event in events:
    assert (event["ph"], event["pid"]) == ("X", os.getpid())
    assert event["dur"] >= 10_000  # microseconds
    assert isinstance(event["tid"], int)
  starts = [e["ts"] for e in events]
  assert starts == sorted(starts)
  assert all(b - a >= 10_000 for a, b in itertools.pairwise(starts))


def test_a_nested_call_shows_inside_its_outer_one_on_another_thread(tmp_path: Path) -> None:
  inner = jax.jit(counted(thread="own", name="inner"))
  outer = cg.gate(
    lambda x: np.asarray(inner(x.copy())), out=lambda x: x, thread="own", name="outer calls inner"
  )
  with cg.trace(str(tmp_path / "trace.json")):
    assert wait(jax.jit(outer), np.float32(2)) == 4
  events = {e["name"]: e for e in calls(tmp_path / "trace.json")}
  inside, around = events["inner"], events["outer calls inner"]
  assert inside["tid"] != around["tid"]
  assert around["ts"] <= inside["ts"]
  assert inside["ts"] + inside["dur"] <= around["ts"] + around["dur"]


def test_a_trace_is_written_after_an_exception_and_then_off(tmp_path: Path) -> None:
  gate = counted()
  program = jax.jit(gate)
  with pytest.raises(KeyError), cg.trace(tmp_path / "trace.json"):  # noqa: PT012
    wait(program, np.float32(0))
    raise KeyError
  assert len(calls(tmp_path / "trace.json")) >= 1
  before = cg.stats()[gate.name]
  wait(program, np.float32(0))
  assert cg.stats()[gate.name]["python_seconds"] == before["python_seconds"]


def test_traces_in_one_another_have_all_of_their_own_calls(tmp_path: Path) -> None:
  program = jax.jit(counted())
  outer, inner = cg.trace(tmp_path / "outer.json"), cg.trace(tmp_path / "inner.json")
  with outer:
    wait(program, np.float32(0))
    with inner:
      wait(program, np.float32(0))
    wait(program, np.float32(0))
  assert len(calls(tmp_path / "outer.json")) == 3
  assert len(calls(tmp_path / "inner.json")) == 1
  with inner:
    pass
  assert calls(tmp_path / "inner.json") == []


def test_a_trace_into_no_folder_is_refused_before_its_block(tmp_path: Path) -> None:
  with (
    pytest.raises(FileNotFoundError, match="got the missing folder"),
    cg.trace(tmp_path / "no" / "x"),
  ):
    raise AssertionError("entered")


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
  with cg.trace(tmp_path / "trace.json"):
    pass
  assert read(tmp_path / "trace.json") == []


# -- config ---
def current(option: str) -> Any:
  from callgate._runtime import config

  in_jax = config._in_jax.get(option)
  return config._values[option] if in_jax is None else in_jax.value


@pytest.mark.parametrize(
  ("option", "value"),
  [
    ("engine", "jax"),
    ("fast_dispatch", True),
    ("check_writes", True),
    ("timing", True),
    ("stall_seconds", 100.0),
  ],
)
def test_config_is_put_back_at_the_end_of_its_block(option: str, value: Any) -> None:
  before = current(option)
  with cg.config(**{option: value}):
    assert current(option) == value
    with cg.config(**{option: before}):
      assert current(option) == before
    assert current(option) == value
  assert current(option) == before
  with pytest.raises(KeyError), cg.config(**{option: value}):
    raise KeyError
  assert current(option) == before


def test_config_blocks_that_overlap_put_back_what_was_before_all() -> None:
  first, second = cg.config(checks=False), cg.config(checks=False, stall_seconds=7.0)
  first.__enter__()
  second.__enter__()  # as of another thread
  first.__exit__()
  assert (current("checks"), current("stall_seconds")) == (False, 7.0)
  second.__exit__()
  assert (current("checks"), current("stall_seconds")) == (True, 0.0)
  for _ in range(2):  # an object serves again
    with first:
      assert not current("checks")
    assert current("checks")


@pytest.mark.parametrize(
  ("option", "value"),
  [("engine", "tpu"), ("timing", 1), ("check_writes", "yes"), ("stall_seconds", -1)],
)
def test_a_wrong_option_is_refused_and_nothing_is_changed(option: str, value: Any) -> None:
  before = current("stall_seconds"), current("timing")
  with pytest.raises(cg.GateDefinitionError, match=f"config: {option}: expected"):
    cg.config(**{"stall_seconds": 5.0, option: value})
  assert (current("stall_seconds"), current("timing")) == before


def test_an_unknown_option_is_a_type_error() -> None:
  with pytest.raises(TypeError, match="tmiing"):
    cg.config(tmiing=True)  # pyright: ignore[reportCallIssue]


def test_kernels_are_not_among_the_gates_that_are_counted():
  kernel = cg.cpp("void f(cg::In<float, 0> x, cg::Out<float, 0> y) { y() = x(); }", out=lambda x: x)
  gate = cg.gate(lambda x: x, out=lambda x: x)
  assert float(kernel(1.0)) == float(gate(1.0)) == 1.0
  assert gate.name in cg.stats()
  assert kernel.name not in cg.stats()
