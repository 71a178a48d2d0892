# SPDX-License-Identifier: Apache-2.0
"""Feeds whose items are split over a mesh: each device takes its share, all of the same item."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import callgate as cg
from callgate._feed.producer import Producer

AXES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def mesh_of(kind: Any = AxisType.Auto) -> Any:
  return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def item(number: int) -> Any:
  x = np.arange(32, dtype=np.float32).reshape(8, 4) + 100 * number
  return {"x": x, "y": np.int32(number)}


def items(count: int) -> Iterator[Any]:
  return map(item, range(count))


def split_feed(count: int = 100, kind: Any = AxisType.Auto, **options: Any) -> cg.Feed:
  mesh = mesh_of(kind)
  sharding = {"x": NamedSharding(mesh, P("data", "model")), "y": NamedSharding(mesh, P())}
  return cg.feed(items(count), sharding=sharding, **options)


def check(found: Any, number: int) -> None:
  np.testing.assert_array_equal(found["x"], item(number)["x"])
  assert int(found["y"]) == number


@AXES
def test_each_device_has_its_share_of_the_same_item(kind: Any) -> None:
  with split_feed(kind=kind) as feed:
    program = jax.jit(lambda: [feed.next(), feed.next()])
    for call in range(3):
      for place, found in enumerate(program()):
        check(found, 2 * call + place)
        assert found["x"].sharding.spec == P("data", "model")
        assert {s.data.shape for s in found["x"].addressable_shards} == {(2, 2)}
        assert all(int(s.data) == 2 * call + place for s in found["y"].addressable_shards)
    assert feed.stats()["served"] == 6
  assert feed.shape["x"].shape == (8, 4)
  assert feed.shape["x"].sharding.spec == P("data", "model")


def test_no_device_sends_its_share_to_another() -> None:
  with split_feed() as feed:
    text = jax.jit(lambda w: feed.next()["x"] * w).lower(2.0).compile().as_text()
  assert "custom-call" in text
  assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in text]


@pytest.mark.parametrize(
  "spec", [P(), P("data"), P(None, "model"), P(("data", "model")), P("model", "data")]
)
def test_any_placement(spec: Any) -> None:
  sharding = NamedSharding(mesh_of(), spec)
  x = np.arange(64, dtype=np.float32).reshape(8, 8)
  with cg.feed([x, x + 1], sharding=sharding) as feed:
    found = jax.jit(feed.next)()
    np.testing.assert_array_equal(found, x)
    assert found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(feed.next(), x + 1)  # outside of programs


@AXES
def test_a_scan_takes_items_in_order_and_gradients_see_constants(kind: Any) -> None:
  with split_feed(kind=kind) as feed:

    @jax.jit
    def train(weight: Any) -> Any:
      def step(weight: Any, _: Any) -> Any:
        batch = feed.next()
        loss = lambda weight: (batch["x"] * weight).sum()
        return weight - 0 * jax.grad(loss)(weight), (loss(weight), batch["y"])

      return jax.lax.scan(step, weight, length=4)

    for call in range(2):
      _, (losses, numbers) = train(jnp.float32(1))
      assert numbers.tolist() == [4 * call + i for i in range(4)]
      np.testing.assert_allclose(losses, [item(4 * call + i)["x"].sum() for i in range(4)])


def test_inside_and_outside_of_programs_take_turns() -> None:
  with split_feed(6) as feed:
    check(jax.jit(feed.next)(), 0)
    found = next(feed)
    check(found, 1)
    assert found["x"].sharding.spec == P("data", "model")
    check(feed.next(), 2)
    check(jax.jit(feed.next)(), 3)
    assert [int(left["y"]) for left in feed] == [4, 5]


def test_the_end_of_the_data_and_a_default() -> None:
  with split_feed(1) as feed:
    program = jax.jit(feed.next)
    check(program(), 0)
    with pytest.raises(cg.EndOfFeed, match="ended after 1 item"), cg.errors():
      program()
  with split_feed(1, default={"x": 7.0, "y": -1}) as feed:
    check(jax.jit(feed.next)(), 0)
    found = jax.jit(feed.next)()
    assert found["x"].tolist() == [[7.0] * 4] * 8
    assert int(found["y"]) == -1


def test_the_iterators_exception() -> None:
  def broken() -> Iterator[Any]:
    yield item(0)
    raise OSError("gone")

  with cg.feed(broken(), sharding=NamedSharding(mesh_of(), P())) as feed:
    program = jax.jit(feed.next)
    check(program(), 0)
    with pytest.raises(OSError, match="gone"), cg.errors():
      program()


def test_after_a_program_that_failed_on_one_device_all_take_the_same_item() -> None:
  mesh, fails = mesh_of(), threading.Event()

  @cg.gate(out=lambda x: x, sharding="shard", style="context", effect="ordered")
  def checked(context: Any, out: Any, x: Any) -> None:
    out[...] = x
    if fails.is_set() and context.device == jax.devices()[3].id:
      raise ValueError("of one device")

  with split_feed() as feed:

    @jax.jit
    def program() -> Any:
      first = feed.next()
      x = jax.lax.with_sharding_constraint(first["x"], NamedSharding(mesh, P("data", "model")))
      return first["y"], checked(x).sum(), feed.next()["y"]

    assert [int(n) for n in program()[::2]] == [0, 1]
    fails.set()
    with pytest.raises(ValueError, match="of one device"), cg.errors():
      program()
    fails.clear()
    first, _, second = program()
    assert int(second) == int(first) + 1
    shards = [int(s.data) for s in first.addressable_shards]
    assert shards == [shards[0]] * 8
    assert shards[0] in (3, 4)


def test_takers_that_stopped_in_the_middle_begin_with_the_others() -> None:
  producer = Producer("shares", iter(range(100)), 10)
  producer.serve(lambda value, number: [np.asarray(value)], None, 2)

  def take(taker: int, run: int) -> int:
    producer.begin(taker, run)
    return int(producer.take(taker)[0])

  assert [take(0, 1), take(0, 1), take(1, 1)] == [0, 1, 0]
  assert [take(0, 2), take(1, 2), take(1, 2)] == [2, 2, 3]  # 1 is skipped by the second
  assert take(1, 3) == 4
  assert take(0, 3) == 4
  producer.close(5)


def test_a_run_whose_items_are_gone_is_an_error() -> None:
  producer = Producer("shares", iter(range(100)), 10)
  producer.serve(lambda value, number: [np.asarray(value)], None, 2)
  for taker, run in ((0, 1), (0, 2)):
    producer.begin(taker, run)
    producer.take(taker)
  for run in (1, 1, 1):  # takes the items of run 2, since the other stopped early
    producer.begin(1, run)
    producer.take(1)
  producer.begin(0, 2)
  producer.take(0)
  with pytest.raises(cg.GateError, match=r"failed on some devices .* make a new feed"):
    producer.begin(1, 2)
  producer.close(5)


def test_refusals() -> None:
  mesh = mesh_of()
  other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

  def refused(match: str, sharding: Any) -> None:
    with pytest.raises(cg.GateDefinitionError, match=match):
      cg.feed(items(2), sharding=sharding, name="refused")

  refused("sharding: expected a jax.sharding.NamedSharding", P("data"))
  refused(
    "expected a jax.sharding.NamedSharding", jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  refused(
    "expected one mesh for all",
    {"x": NamedSharding(mesh, P()), "y": NamedSharding(other, P())},
  )
  refused("expected the items' structure", {"z": NamedSharding(mesh, P())})
  refused(r"that the mesh divides, got .* for int32\[\]", NamedSharding(mesh, P("data")))
  with split_feed() as feed:
    unknown = pytest.raises(cg.GateError, match="callbacks don't know the device")
    with unknown, cg.config(engine="jax"):
      feed.next()
    with pytest.raises(cg.GateError, match=r"split over a mesh.* outside jax.vmap"):
      jax.vmap(lambda x: x + feed.next()["y"])(jnp.arange(3))
    with pytest.raises(cg.GateError, match=r"outside jax.shard_map"):
      jax.jit(
        jax.shard_map(
          lambda x: x + feed.next()["x"], mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
      )(jnp.ones((8, 4)))


def test_a_feed_that_nobody_has_ends_its_thread() -> None:
  feed = split_feed(name="dropped with shares")
  check(jax.jit(feed.next)(), 0)
  name = f"callgate {feed.name}"
  del feed
  for _ in range(100):
    gc.collect()
    thread = next((t for t in threading.enumerate() if t.name == name), None)
    if thread is None:
      return
    thread.join(0.1)
  raise AssertionError("the thread is still there")
