# SPDX-License-Identifier: Apache-2.0
"""Classes as gates: their objects live in the workers, one in each or one for each lane."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worker_functions import COUNTER_OUTS, Counter, Fails

import callgate as cg


def test_an_object_keeps_its_state(one: cg.Workers, engine: str) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=one)
  assert [float(jax.jit(gate)(0.0)) for _ in range(3)] == [1, 2, 3]
  stepped = jax.jit(gate.step)(1.0, 2.0)
  assert int(stepped["count"]) == 13
  assert float(stepped["sum"]) == 3
  assert float(jax.jit(gate)(0.0)) == 14


def test_a_class_with_arguments(one: cg.Workers, engine: str) -> None:
  gate = cg.gate(functools.partial(Counter, start=5), out=COUNTER_OUTS, effect="io", run_on=one)
  assert float(jax.jit(gate)(0.0)) == 6


def test_lanes_have_objects_of_their_own(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=two, affinity="lane")
  lanes = jax.jit(jax.vmap(gate))
  for turn in range(1, 4):
    np.testing.assert_array_equal(lanes(jnp.zeros(5)), jnp.full(5, float(turn)))
  np.testing.assert_array_equal(lanes(jnp.zeros(7)), jnp.array([4.0] * 5 + [1.0] * 2))


@pytest.fixture(scope="module")
def one() -> Iterator[cg.Workers]:
  with cg.workers(1) as workers:
    yield workers


@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_lanes_on_several_devices_have_objects_of_their_own(two: cg.Workers, effect: Any) -> None:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect=effect, run_on=two, affinity="lane")
  parts = jax.sharding.PartitionSpec("d")
  lanes = jax.jit(jax.shard_map(jax.vmap(gate), mesh=mesh, in_specs=parts, out_specs=parts))
  for turn in range(1, 4):
    np.testing.assert_array_equal(lanes(jnp.zeros(8)), np.full(8, turn))


def test_a_lane_stays_on_its_worker(two: cg.Workers) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=two, affinity="lane")
  where = jax.jit(jax.vmap(gate.where))
  first = np.asarray(where(jnp.zeros(6)))
  assert len(set(first.tolist())) == 2
  for _ in range(5):
    np.testing.assert_array_equal(where(jnp.zeros(6)), first)


def test_scan_steps_the_objects_in_order(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=two, affinity="lane")

  def body(total: Any, _: Any) -> Any:
    counts = jax.vmap(gate)(jnp.zeros(3))
    return total + counts, counts

  total, counts = jax.jit(lambda: jax.lax.scan(body, jnp.zeros(3), length=4))()
  np.testing.assert_array_equal(total, [10.0] * 3)
  np.testing.assert_array_equal(counts[:, 0], [1, 2, 3, 4])


def test_a_lane_that_has_no_number_has_no_object(one: cg.Workers) -> None:
  mesh = jax.make_mesh((1,), ("d",))
  P = jax.sharding.PartitionSpec

  def inside(gate: Any, x: Any) -> Any:
    mapped = jax.shard_map(gate, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.lax.cond(x > 1, mapped, lambda x: x, x)

  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=one, affinity="lane")
  with pytest.raises(
    cg.GateDefinitionError, match=r"Counter.*affinity='lane'.*needs a lane number"
  ):
    jax.jit(jax.vmap(functools.partial(inside, gate)))(jnp.arange(4.0))
  selected = lambda x: jnp.where(x > 1, gate(x), x)
  np.testing.assert_array_equal(jax.jit(jax.vmap(selected))(jnp.arange(4.0)), [0, 1, 3, 4])
  other = cg.gate(lambda x: x + 1, out=lambda x: x, effect="io", run_on=one)
  program = jax.jit(jax.vmap(functools.partial(inside, other)))
  np.testing.assert_array_equal(program(jnp.arange(4.0)), [0, 1, 3, 4])


def test_an_ordered_class_in_a_scan(one: cg.Workers) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="ordered", run_on=one)
  body = lambda c, _: (gate(c), None)
  assert float(jax.jit(lambda: jax.lax.scan(body, 0.0, length=4))()[0]) == 10


def test_ordered_lanes_have_objects_of_their_own(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="ordered", run_on=two, affinity="lane")
  both = jax.jit(lambda x: (jax.vmap(gate)(x), jax.vmap(gate.step)(x, x)))
  for turn in (1.0, 12.0):
    first, second = both(jnp.zeros(3))
    np.testing.assert_array_equal(first, [turn] * 3)
    np.testing.assert_array_equal(second["count"], [turn + 10] * 3)


def test_an_object_that_can_not_be_made_is_told(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(Fails, out=lambda x: x, run_on=two)
  with pytest.raises(ValueError, match="no object"), cg.errors():
    jax.block_until_ready(jax.jit(gate)(1.0))


def test_two_gates_of_a_class_have_two_objects(one: cg.Workers) -> None:
  a, b = (cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=one) for _ in range(2))
  assert [float(jax.jit(g)(0.0)) for g in (a, a, b)] == [1, 2, 1]


def test_methods_that_are_none_and_results_that_are_missing(two: cg.Workers) -> None:
  gate = cg.gate(Counter, out={"step": COUNTER_OUTS["step"]}, effect="io", run_on=two)
  with pytest.raises(AttributeError, match="no method or attribute 'jump'"):
    _ = gate.jump
  with pytest.raises(cg.GateDefinitionError, match="the results of 'where' are not known"):
    gate.where(1.0)
  assert gate.step is gate.step


def test_a_class_that_runs_in_this_process_is_a_function_as_before() -> None:
  half = cg.gate(np.float32, out=lambda x: x)
  assert jax.jit(half)(2.0) == 2.0


class Starting:
  def start(self, x: Any) -> Any:
    return x


def test_a_method_that_a_gates_own_name_hides_is_refused_where_out_names_it(
  one: cg.Workers,
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"method 'start' .* rename it"):
    cg.gate(Starting, out={"start": jnp.float32(0)}, run_on=one)
