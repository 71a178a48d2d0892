# SPDX-License-Identifier: Apache-2.0
"""Taps under `jax.pmap`: each device's record says its place in the stack of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import callgate as cg

XS = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
Seen = list[tuple[Any, Any]]


def stacked(seen: Seen, leaf: Callable[[Any], Any] = lambda tree: tree) -> np.ndarray:
  """The whole, put together by the records' slices; each element by one record alone."""
  infos = [info for _, info in seen]
  assert all(info.global_shape == infos[0].global_shape for info in infos)
  whole, times = (np.zeros(leaf(infos[0].global_shape), np.float32) for _ in range(2))
  for value, info in seen:
    whole[leaf(info.shard)] = leaf(value)
    times[leaf(info.shard)] += 1
  np.testing.assert_array_equal(times, np.ones_like(times))
  return whole


@pytest.mark.parametrize("name", [None, "i"])
@pytest.mark.parametrize("devices", [None, [3, 1, 0, 2]])
def test_shards_are_slices_of_the_stack(name: str | None, devices: list[int] | None) -> None:
  seen: Seen = []

  def f(x: Any) -> Any:
    return cg.tap(2 * x, lambda value, info: seen.append((value, info)))

  given = devices and [jax.devices()[n] for n in devices]
  program = jax.pmap(f, devices=given, **({} if name is None else {"axis_name": name}))
  for _ in range(2):
    seen.clear()
    np.testing.assert_array_equal(program(XS), 2 * XS)
    cg.barrier()
    assert len(seen) == 4
    np.testing.assert_array_equal(stacked(seen), 2 * XS)
    assert all(info.first for _, info in seen)


def test_of_each_leaf_and_lane() -> None:
  seen: Seen = []

  @jax.jit
  def inner(x: Any) -> Any:
    cg.tap({"x": x, "sum": x.sum()}, lambda value, info: seen.append((value, info)))
    return x

  jax.pmap(jax.vmap(inner))(XS)
  cg.barrier()
  assert len(seen) == 12
  for lane in range(3):
    of_lane = [(value, info) for value, info in seen if info.lane == (lane,)]
    np.testing.assert_array_equal(stacked(of_lane, lambda tree: tree["x"]), XS[:, lane])
    np.testing.assert_array_equal(stacked(of_lane, lambda tree: tree["sum"]), XS[:, lane].sum(-1))


def test_records_are_assembled_as_shards_are() -> None:
  with cg.channel("pmap.whole") as channel:
    records = channel.records()
    jax.pmap(lambda x: cg.tap({"x": x, "sum": x.sum()}, channel))(XS)
    cg.barrier()
  whole = cg.assemble(records)
  np.testing.assert_array_equal(whole["x"], XS)
  np.testing.assert_array_equal(whole["sum"], XS.sum((1, 2)))


def test_batches_have_the_numbers_of_shards() -> None:
  seen: Seen = []
  with cg.channel("pmap.batch", to=lambda value, info: seen.append((value, info)), batch=True):
    jax.pmap(lambda x: cg.tap(x, "pmap.batch"))(XS)
    cg.barrier()
  shards = np.concatenate([info.shard for _, info in seen])
  np.testing.assert_array_equal(XS[shards], np.concatenate([value for value, _ in seen]))


def test_in_a_shard_map_of_the_users_there_is_none() -> None:
  seen: Seen = []

  def f(x: Any) -> Any:
    return cg.tap(x, lambda value, info: seen.append((value, info)))

  mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
  spec = PartitionSpec("i")
  jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.asarray(XS))
  cg.barrier()
  assert [info.shard for _, info in seen] == [None] * 4
