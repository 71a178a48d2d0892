# SPDX-License-Identifier: Apache-2.0
"""The random programs can find faults: their oracle is right, and wrong answers are seen."""

from __future__ import annotations

import pathlib
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(pathlib.Path(__file__).parents[2] / "programs"))

import asked
import checks
import counted
import counts
import duals
import in_order
import judge
import page
import planted
import ways_further
from arithmetic import Unary
from counts import Counts, Refusal
from oracle import Event, Lane, Machine
from program import Array, Body, Program, Step, Var

values = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4).map(np.asarray)


def smooth(x, library):
  a = library.sin(x) if library is jnp else duals.sin(x)
  if library is jnp:
    return jnp.tanh(a * x + 0.5) * a
  return duals.mul(duals.tanh(duals.shifted(duals.mul(a, x), 0.5)), a)


@given(values)
def test_derivatives_by_dual_numbers_are_those_of_jax(x: np.ndarray) -> None:
  one = np.ones_like(x)
  first = smooth(duals.Dual(1, x, one), np)
  second = smooth(duals.Dual(2, duals.Dual(1, x, one), one), np)
  f = lambda x: smooth(x, jnp)
  slope = lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
  x32 = jnp.asarray(x, jnp.float32)
  np.testing.assert_allclose(duals.plain(first), f(x32), rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(first.tangent, slope(x32), rtol=1e-3, atol=1e-4)
  curvature = jax.jvp(slope, (x32,), (jnp.ones_like(x32),))[1]
  np.testing.assert_allclose(second.tangent.tangent, curvature, rtol=1e-3, atol=1e-3)


LANES = [Lane((("lane 1", i), ("loop2", k))) for i in range(2) for k in range(2)]
EXPECTED = [(Event("gate", (float(k),)), lane) for lane in LANES for k in [lane.path[1][1]]]


@pytest.mark.parametrize(
  ("found", "said"),
  [
    ([0.0, 1.0], ""),  # lanes that share all operands share the call
    ([0.0, 0.0, 1.0, 1.0], ""),
    ([0.0, 1.0, 1.0], ""),
    ([0.0], "(1.0,) 0 times"),
    ([0.0, 0.0, 0.0, 1.0], "(0.0,) 3 times"),
    ([0.0, 1.0, 2.0], "got (2.0,), expected one of"),
  ],
)
def test_wrong_events_are_seen(found: list[float], said: str) -> None:
  answer = judge.wrong_events([("gate", (x,)) for x in found], EXPECTED, 1, devices=False)
  assert said in answer
  assert bool(said) == bool(answer)


def test_wrong_results_and_orders_are_seen() -> None:
  right = [np.array([1.0, 2.0])]
  assert not judge.wrong_results([right], right)
  assert "execution 1" in judge.wrong_results([right, [np.array([1.0, 2.1])]], right)
  events = [(Event("gate", (float(k),)), Lane((("loop", k),))) for k in range(2)]
  assert not judge.wrong_order([("gate", (0.0,)), ("gate", (1.0,))], events, {"gate"})
  assert judge.wrong_order([("gate", (1.0,)), ("gate", (0.0,))], events, {"gate"})


def test_the_oracle_runs_a_program() -> None:
  from parts import Tap

  x, y, z = (Var(i, Array((2,), "float32")) for i in range(3))
  tap = Tap("tap", x.type, ordered=False, dataflow=False, where=None, channel=False)
  body = Body((x,), (Step(Unary("half"), (x,), (y,)), Step(tap, (y,), (z,))), (z,))
  machine = Machine()
  results, events = machine.call(Program(body, (np.array([1.0, 3.0]),)))
  np.testing.assert_array_equal(results, [[0.75, 1.75]])
  assert events == [(Event("tap", (0.75, 1.75)), Lane())]


def test_each_lane_takes_an_item_of_its_own_and_its_derivative_the_same() -> None:
  machine = Machine()
  assert [machine.take(lane, "feed") for lane in LANES] == [0, 1, 2, 3]
  assert [machine.take(lane.quietly(), "feed") for lane in LANES] == [0, 1, 2, 3]
  assert machine.taken == {"feed": 4}


def test_the_oracle_knows_the_values_by_which_checks_fail() -> None:
  x, y = (Var(i, Array((2,), "float32")) for i in range(2))
  program = Body((x,), (Step(checks.Decided("check", 0.5), (x,), (y,)),), (y,))
  machine = Machine()
  for values, failing in (([0.25, 0.5], {"check": [0.75]}), ([0.0, 0.25], {})):
    machine.call(Program(program, (np.array(values),)))
    assert machine.failing == failing


def test_a_program_whose_parts_count_runs_alone() -> None:
  x, y = (Var(i, Array((), "float32")) for i in range(2))
  one = lambda op: Program(Body((x,), (Step(op, (x,), (y,)),), (y,)), ())
  fits = lambda op: ways_further.fitting(["jit", "two threads", "checks"], one(op))
  assert fits(counted.CountedFeed("feed")) == ["jit"]
  assert fits(checks.Decided("check", 0.5)) == ["checks"]
  assert fits(Unary("half")) == ["jit", "two threads"]


def test_a_program_that_may_make_a_nan_is_asked_where_it_comes_from() -> None:
  x, y = (Var(i, Array((2,), "float32")) for i in range(2))
  nan = asked.MaybeNan("nan1", "log")
  program = Program(Body((x,), (Step(nan, (x,), (y,)),), (y,)), (np.zeros(2),))
  assert ways_further.fitting(["jit", asked.FIND_NAN, asked.VERIFIED], program) == [asked.FIND_NAN]
  machine = Machine()
  machine.call(program)
  assert asked.lines(program, asked.FIND_NAN, machine) == ["NANS = {'nan1': 'log'}"]
  assert asked.lines(program, "jit", machine) == []


def test_effects_in_several_places_happen_in_their_order() -> None:
  x = np.zeros(())
  for place, k in (("here", 1), ("scan", 2)):
    op = in_order.InOrder("sent", "tap ordered", ("jit", place), Array((), "float32"))
    machine = Machine()
    op.run(machine, [Lane()], [{}], [[x]])
    assert [event.values for event, _ in machine.events] == [(0.0,), (1.0,), (1.25,)][: k + 1]


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_planted_faults_apply_to_the_source() -> None:
  faults = planted.faults()
  assert faults
  for fault in faults:
    planted.plant(fault, planted.ROOT, dry=True)


def test_programs_concern_planted_faults_by_their_parts() -> None:
  fault = planted.Fault("one", "", "", ("vmap.*> tap", "cond|switch"), is_cpp=False)
  case = lambda *places: types.SimpleNamespace(places=lambda: frozenset(places))
  assert fault.concerns(case("vmap > jit > tap io", "switch"))
  assert not fault.concerns(case("vmap > jit > tap io"))
  assert not fault.concerns(case("vmap", "tap io", "switch"))
  assert planted.Fault("all", "", "", (), is_cpp=False).concerns(case("way: jit"))


def test_counts_of_two_searches_add_up_and_are_read_as_they_were_written(
  tmp_path: pathlib.Path,
) -> None:
  whole, other = Counts(), Counts()
  whole.add_right("0.10.2", [("gate io", "vmap"), ("gate io", "vmap")], over_devices=False)
  whole.add_refused("no derivative", {"hold", "grad"})
  other.add_right("0.12.0", [("gate io", "vmap"), ("tap", "scan")], over_devices=True)
  other.add_refused("no derivative", {"use", "grad"})
  whole.write(tmp_path / "counts.json")
  read = counts.read(tmp_path / "counts.json")
  read.add(other)
  assert read.programs == {"0.10.2": 1, "0.12.0": 1}
  assert read.cells == {"gate io": {"vmap": (1, 1)}, "tap": {"scan": (0, 1)}}
  assert read.refusals == {"no derivative": Refusal(2, {"grad"})}


def test_the_page_has_what_is_inside_of_what() -> None:
  one = Counts()
  one.add_right("0.10.2", [("gate io", "vmap"), ("gate io", "way: sharded")], over_devices=True)
  text = page.section(one)
  row = next(line for line in text.splitlines() if line.startswith("| `gate` |"))
  assert row.count("0 + 1") == 2
