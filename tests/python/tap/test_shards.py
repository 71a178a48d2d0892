# SPDX-License-Identifier: Apache-2.0
"""Taps in programs over several devices: a record a shard, and whole arrays from their records."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from property_checks import examples
from split_arrays import MESHES, X, mesh, moves, put, specs

import callgate as cg


def records(function: Callable[..., Any], *args: Any, times: int = 1) -> list[cg.Record]:
  """The records that a program's taps sent to a channel, which `function` gets."""
  found: list[cg.Record] = []

  def keep(value: Any, info: cg.TapInfo) -> None:
    found.append(cg.Record(value, info))

  with cg.channel("sharded", to=keep) as channel:
    program = jax.jit(lambda *args: function(channel, *args))
    for _ in range(times):
      jax.block_until_ready(program(*args))
    cg.barrier()
  return found


def starts(found: list[cg.Record]) -> list[tuple[int, ...]]:
  return sorted(tuple(s.start for s in record.info.shard) for record in found)


def test_a_record_a_shard_with_its_place_and_device() -> None:
  on = mesh()
  x = put(X, on, "a", "b")
  found = records(lambda ch, x: cg.tap(x, ch), x)
  assert len(found) == 8
  for record in found:
    np.testing.assert_array_equal(record.value, X[record.info.shard])
    assert record.info.global_shape == (16, 8)
  places = {shard.device.id: shard.index for shard in x.addressable_shards}
  assert {r.info.device: r.info.shard for r in found} == places
  assert moves(lambda x: cg.tap(x, "sharded"), x) == set()


def test_copies_are_delivered_once_or_all() -> None:
  x = put(X, mesh(), "a")
  once = records(lambda ch, x: cg.tap(x, ch), x)
  assert starts(once) == [(0, 0), (4, 0), (8, 0), (12, 0)]
  every = records(lambda ch, x: cg.tap(x, ch, replicas="all"), x)
  assert starts(every) == sorted(starts(once) * 2)
  assert {r.info.device for r in every} == set(range(8))
  assert [r.info.device % 2 == 0 for r in every] == [r.info.first for r in every]
  alone = records(lambda ch, x: cg.tap(x.sum(), ch), x)
  assert [(float(r.value), r.info.shard) for r in alone] == [(X.sum(), ())]


def test_each_part_of_leaves_split_in_different_ways_is_some_records_first() -> None:
  on = mesh()
  tree = {"both": put(X, on, "a", "b"), "rows": put(X, on, "a"), "whole": put(X, on)}
  found = records(lambda ch, x: cg.tap(x, ch), tree)
  assert len(found) == 8
  for leaf, count in (("both", 8), ("rows", 4), ("whole", 1)):
    shards = [r.info.shard[leaf] for r in found if r.info.first[leaf]]
    assert len(shards) == len(set(map(str, shards))) == count
  (alone,) = records(lambda ch, x: cg.tap(x, ch), 2.0)
  assert alone.info.first is None


def test_gather_sends_one_record_of_the_whole() -> None:
  (record,) = records(lambda ch, x: cg.tap(x, ch, sharding="gather"), put(X, mesh(), "a", "b"))
  np.testing.assert_array_equal(record.value, X)
  assert record.info.shard == (slice(0, 16), slice(0, 8))


def test_a_rule_says_which_dimensions_are_whole() -> None:
  found = records(lambda ch, x: cg.tap(x, ch, sharding="i [j]"), put(X, mesh(), "a", "b"))
  assert starts(found) == [(0, 0), (4, 0), (8, 0), (12, 0)]
  for record in found:
    np.testing.assert_array_equal(record.value, X[record.info.shard])


@pytest.mark.parametrize(
  "rule", ["i [j]", P("a"), "gather", (P("a"), ())], ids=["text", "spec", "gather", "specs"]
)
def test_a_function_of_the_mesh_says_which_dimensions_are_whole(rule: Any) -> None:
  seen: list[Any] = []

  def ask(mesh: Any, x: Any) -> Any:
    seen.append((dict(mesh.shape), x.shape, x.sharding.spec))
    return rule

  on = mesh()
  x = put(X, on, "a", "b")
  with jax.set_mesh(on):
    found = records(lambda ch, x: cg.tap(x, ch, sharding=ask), x)
    lanes = records(lambda ch, x: jax.vmap(lambda r: cg.tap(r, ch, where=r[0] >= 0))(x), x)
  assert seen == [({"a": 4, "b": 2}, (16, 8), P("a", "b"))]
  assert starts(found) == ([(0, 0)] if rule == "gather" else [(0, 0), (4, 0), (8, 0), (12, 0)])
  np.testing.assert_array_equal(cg.assemble(found), X)
  assert len(lanes) == 32


@pytest.mark.parametrize("sharding", ["i", "i j ->  k", "", 3])
def test_a_rule_that_does_not_fit_is_refused(sharding: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="tap 'sharded': sharding"):
    records(lambda ch, x: cg.tap(x, ch, sharding=sharding), put(X, mesh(), "a"))


def test_a_pytree_of_arrays_that_lie_differently() -> None:
  on = mesh()
  value = {"w": put(X, on, "a", "b"), "v": put(X[:, 0].copy(), on, "b"), "n": put(np.int32(3), on)}
  found = records(lambda ch, v: cg.tap(v, ch), value)
  assert len(found) == 8
  for record in found:
    assert set(record.info.shard) == {"w", "v", "n"}
    np.testing.assert_array_equal(record.value["w"], X[record.info.shard["w"]])
    np.testing.assert_array_equal(record.value["v"], X[:, 0][record.info.shard["v"]])
    assert (record.info.shard["n"], record.value["n"]) == ((), 3)
  whole = cg.assemble(found)
  np.testing.assert_array_equal(whole["w"], X)
  np.testing.assert_array_equal(whole["v"], X[:, 0])
  assert whole["n"] == 3


@hypothesis.given(st.data())
@examples(10, suppress_health_check=list(hypothesis.HealthCheck))
def test_whole_arrays_come_from_their_records(data: st.DataObject) -> None:
  on = mesh(data.draw(st.sampled_from(sorted(MESHES)), "mesh"))
  shapes = data.draw(
    st.lists(st.sampled_from([(8, 8), (8,), (4, 8, 2), ()]), min_size=1, max_size=3)
  )
  effect: Any = data.draw(st.sampled_from(["io", "dataflow"]), "effect")
  lanes = data.draw(st.booleans(), "under vmap")
  arrays = [np.arange(8 * int(np.prod(s)), dtype=np.int32).reshape(8, *s) for s in shapes]
  inputs = [put(x, on, *data.draw(specs(x.shape, on), "sharding")) for x in arrays]

  def program(channel: cg.Channel, *xs: Any) -> Any:
    tap = lambda *xs: cg.tap(xs, channel, effect=effect)
    return (jax.vmap(tap) if lanes else tap)(*xs)

  found = records(program, *inputs)
  groups: dict[Any, list[cg.Record]] = collections.defaultdict(list)
  for record in found:
    groups[record.info.lane].append(record)
  assert sorted(groups) == ([(i,) for i in range(8)] if lanes else [()])
  for lane, some in groups.items():
    for got, want in zip(cg.assemble(some), arrays, strict=True):
      np.testing.assert_array_equal(got, want[lane] if lanes else want)


def test_lanes_have_the_number_they_have_in_the_program() -> None:
  x = put(X, mesh("8"), "a")
  found = records(lambda ch, x: jax.vmap(lambda r: cg.tap(r, ch, where=r[0] > 60))(x), x)
  assert sorted(r.info.lane for r in found) == [(i,) for i in range(8, 16)]
  for record in found:
    np.testing.assert_array_equal(record.value, X[record.info.lane])


def test_batches_know_their_lanes_and_shards() -> None:
  seen: list[tuple[np.ndarray, cg.BatchInfo]] = []
  with cg.channel("batched", to=lambda v, info: seen.append((v, info)), batch=64) as channel:
    jax.jit(jax.vmap(lambda r: cg.tap(r, channel)))(put(X, mesh("8"), "a"))
    cg.barrier()
  for value, info in seen:
    np.testing.assert_array_equal(value, X[info.lane[:, 0]])
    np.testing.assert_array_equal(info.shard, info.lane[:, 0] // 2)
  assert sum(len(value) for value, _ in seen) == 16


def test_logical_sizes_are_the_wholes() -> None:
  x = put(X, mesh(), "a", "b")
  found = records(lambda ch, x, n: cg.tap(x, ch, logical_shape=(n, 5)), x, 10)
  kept = np.zeros((10, 5), np.float32)
  for record in found:
    rows, columns = record.info.shard
    if record.value.size:
      height, width = record.value.shape
      place = slice(rows.start, rows.start + height), slice(columns.start, columns.start + width)
      kept[place] = record.value
  np.testing.assert_array_equal(kept, X[:10, :5])


def test_ordered_taps_keep_the_program_order_on_each_device() -> None:
  def program(channel: cg.Channel, x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
      cg.tap(c, channel, ordered=True, name="first")
      cg.tap(c, channel, ordered=True, name="second")
      return c + 1, None

    return jax.lax.scan(body, x, length=5)[0]

  names: dict[int, list[str]] = collections.defaultdict(list)
  for record in records(program, put(X, mesh("8"), "a")):
    names[record.info.device].append(record.info.name)
  assert names == {device: ["first", "second"] * 5 for device in range(8)}


def test_sequence_numbers_count_on_each_device() -> None:
  numbers: dict[int, list[int]] = collections.defaultdict(list)
  for record in records(lambda ch, x: cg.tap(cg.tap(x, ch), ch), put(X, mesh("8"), "a")):
    numbers[record.info.device].append(record.info.seq)
  assert numbers == {device: [0, 1] for device in range(8)}


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_gradients_are_tapped_as_they_lie(effect: Any) -> None:
  def program(channel: cg.Channel, x: Any) -> Any:
    roles = ("primal", "cotangent")
    return jax.grad(lambda x: (cg.tap(x, channel, roles=roles, effect=effect) ** 2).sum())(x)

  found = records(program, put(X, mesh("8"), "a"))
  by_role: dict[str, list[cg.Record]] = collections.defaultdict(list)
  for record in found:
    by_role[record.info.role].append(record)
  np.testing.assert_array_equal(cg.assemble(by_role["primal"]), X)
  np.testing.assert_array_equal(cg.assemble(by_role["cotangent"]), 2 * X)


def test_taps_on_an_explicit_mesh() -> None:
  on = mesh(kind=AxisType.Explicit)
  with jax.set_mesh(on):
    found = records(lambda ch, x: cg.tap(x, ch) * 2, put(X, on, "a", "b"))
  np.testing.assert_array_equal(cg.assemble(found), X)
  assert len(found) == 8


@pytest.mark.parametrize("axes", [None, {"a"}])
@pytest.mark.parametrize("check", [True, False])
def test_in_a_shard_map_every_device_sends_what_it_has(axes: Any, check: bool) -> None:
  on = mesh()
  spec = P("a", "b") if axes is None else P("a")

  def program(channel: cg.Channel, x: Any) -> Any:
    options = {} if axes is None else {"axis_names": axes}
    tap = lambda x: cg.tap(x, channel)
    return jax.shard_map(tap, mesh=on, in_specs=spec, out_specs=spec, check_vma=check, **options)(x)

  found = records(program, put(X, on, "a", "b"))
  assert len(found) == 8
  assert {r.info.shard for r in found} == {None}
  assert sum(float(r.value.sum()) for r in found) == X.sum()


@pytest.mark.parametrize("manual", [False, True])
def test_every_device_sends_the_same_steps(manual: bool) -> None:
  on = mesh("8")
  x = put(np.zeros(8, np.float32), on, "a")

  def calls(channel: cg.Channel, x: jax.Array) -> jax.Array:
    def body(step: Any, x: jax.Array) -> jax.Array:
      cg.tap(x + step, channel, every=5)
      return x

    def program(x: jax.Array) -> jax.Array:
      return jax.lax.fori_loop(0, 12, body, x)

    if manual:
      return jax.shard_map(program, mesh=on, in_specs=P("a"), out_specs=P("a"))(x)
    return program(x)

  seen: dict[int, list[float]] = {}
  for record in records(calls, x, times=3):
    seen.setdefault(record.info.device, []).append(float(record.value[0]))
  # Executions 0, 5, 10, ... of each device, which has twelve a call.
  assert seen == {device: [0, 5, 10, 3, 8, 1, 6, 11] for device in range(8)}


def test_an_ordered_tap_in_a_partly_automatic_shard_map() -> None:
  on = mesh()

  def program(channel: cg.Channel, x: Any) -> Any:
    def loop(x: Any) -> Any:
      def step(carry: Any, n: Any) -> Any:
        cg.tap(n, channel, ordered=True)
        return carry + n, None

      def last(carry: Any) -> Any:
        return cg.tap(carry, channel, name="end", ordered=True)

      return jax.lax.cond(True, last, lambda c: c, jax.lax.scan(step, x, jnp.arange(5.0))[0])

    return jax.shard_map(loop, mesh=on, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(x)

  if jax.__version_info__ < (0, 11):  # XLA ends the process
    with pytest.raises(cg.GateDefinitionError, match="tap 'sharded': ordered=True works in progr"):
      records(program, put(X, on, "a"))
    return
  seen: dict[int, list[Any]] = {}
  for record in records(program, put(X, on, "a"), times=3):
    seen.setdefault(record.info.device, []).append((record.info.name, np.ravel(record.value)[0]))
  assert len(seen) == 8
  for device, of_device in seen.items():
    names = [("sharded", n) for n in range(5)]
    assert [of_device[6 * k : 6 * k + 5] for k in range(3)] == [names] * 3, device
    assert [name for name, _ in of_device[5::6]] == ["end"] * 3


def test_a_program_of_one_device_has_no_shards() -> None:
  (record,) = records(lambda ch, x: cg.tap(x, ch), X)
  assert record.info.shard is None
  assert record.info.global_shape is None
  assert cg.assemble([record]) is record.value


def test_shards_are_in_streams(tmp_path: Any) -> None:
  path = tmp_path / "run.cgs"
  with cg.channel("streamed", to=cg.sinks.Stream(path)) as channel:
    jax.block_until_ready(jax.jit(lambda x: cg.tap(x, channel))(put(X, mesh(), "a", "b")))
  found = list(cg.open_stream(path))
  assert len(found) == 8
  for record in found:
    assert record.shard is not None
    np.testing.assert_array_equal(record.leaves[""], X[record.shard[""]])
  np.testing.assert_array_equal(cg.assemble(found), X)


def test_lanes_and_pytrees_of_shards_are_in_streams(tmp_path: Any) -> None:
  path = tmp_path / "run.cgs"
  with cg.channel("streamed", to=cg.sinks.Stream(path)) as channel:
    tap = jax.vmap(lambda x: cg.tap({"a": x, "b": x[0]}, channel))
    jax.block_until_ready(jax.jit(tap)(put(X, mesh(), "a", "b")))
  lanes: dict[int, list[Any]] = collections.defaultdict(list)
  for record in cg.open_stream(path):
    lanes[record.lane].append(record)
  assert sorted(lanes) == list(range(16))
  for lane, found in lanes.items():
    value = cg.assemble(found)
    np.testing.assert_array_equal(value["['a']"], X[lane])
    assert value["['b']"] == X[lane, 0]


def test_missing_shards_and_foreign_ones_are_told_of() -> None:
  found = records(lambda ch, x: cg.tap(x, ch), put(X, mesh(), "a", "b"))
  with pytest.raises(
    ValueError, match=r"leaf 0 of tap 'sharded', of shape \[16, 8\], got 112 of 128"
  ):
    cg.assemble(found[1:])
  with pytest.raises(ValueError, match="got none"):
    cg.assemble([])
  other = records(lambda ch, x: cg.tap(x, ch, name="other"), put(X, mesh(), "a", "b"))
  with pytest.raises(ValueError, match="one tap and one lane, got 'other'"):
    cg.assemble([*found, *other])
  (whole,) = records(lambda ch, x: cg.tap(x, ch), X)
  with pytest.raises(ValueError, match="one record with the whole value"):
    cg.assemble([whole, whole])


def test_shards_of_several_executions_or_steps_are_no_value() -> None:
  x = put(X, mesh(), "a", "b")
  twice = records(lambda ch, x: cg.tap(x, ch), x, times=2)
  runs = sorted({record.info.run for record in twice})
  assert len(runs) == 2
  with pytest.raises(ValueError, match="one record of each device, got 2 of device"):
    cg.assemble(twice)
  mixed = [r for r in twice if (r.info.run == runs[0]) == (r.info.device < 4)]
  with pytest.raises(
    ValueError, match=f"one execution, got records of the runs {runs[0]}, {runs[1]}"
  ):
    cg.assemble(mixed)
  np.testing.assert_array_equal(cg.assemble([r for r in twice if r.info.run == runs[1]]), X)
  steps = records(lambda ch, x: jax.lax.fori_loop(0, 3, lambda i, c: cg.tap(c + 1, ch), x), x)
  with pytest.raises(ValueError, match="one record of each device, got 3 of device"):
    cg.assemble(steps)


def test_a_consumer_may_run_sharded_programs() -> None:
  on = mesh("8")
  sums: list[float] = []

  def consume(value: np.ndarray) -> None:
    sums.append(float(jax.jit(jnp.sum)(jax.device_put(value, NamedSharding(on, P())))))

  with cg.channel("nested", to=consume) as channel:
    jax.block_until_ready(jax.jit(lambda x: cg.tap(x, channel))(put(X, on, "a")))
    cg.barrier()
  assert sum(sums) == X.sum()
