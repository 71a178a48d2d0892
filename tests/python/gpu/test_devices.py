# SPDX-License-Identifier: Apache-2.0
"""Programs over several GPUs: `pytest -m gpu` where there are two or more."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh() -> Any:
  """All GPUs, up to eight, on one axis."""
  try:
    devices = jax.devices("cuda")
  except RuntimeError as error:
    pytest.skip(f"no CUDA device: {error}")
  if len(devices) < 2:
    pytest.skip(f"needs 2 GPUs, has {len(devices)}")
  size = 8 if len(devices) >= 8 else 2
  yield jax.sharding.Mesh(np.array(devices[:size]), ("d",))
  jax.effects_barrier()


def put(mesh: Any, x: Any, *spec: Any) -> Any:
  return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))


X = np.arange(64, dtype=np.float32).reshape(16, 4)


def test_a_rule_says_what_each_device_calls_with(mesh: Any) -> None:
  shapes: list[Any] = []

  def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    shapes.append((x.shape, w.shape))
    return x @ w

  gate = cg.gate(product, like=jnp.matmul, sharding="i k, k j -> i j")
  w = np.arange(12, dtype=np.float32).reshape(4, 3)
  y = jax.jit(gate)(put(mesh, X, "d"), put(mesh, w))
  np.testing.assert_array_equal(y, X @ w)
  assert shapes == [((16 // mesh.size, 4), (4, 3))] * mesh.size


def test_taps_know_their_shards_and_make_up_the_whole(mesh: Any) -> None:
  program = jax.jit(lambda x: cg.tap(x * 2, "shards") + 1)
  records: list[cg.Record] = []
  with cg.channel("shards", to=lambda value, info: records.append(cg.Record(value, info))):
    np.testing.assert_array_equal(program(put(mesh, X, "d")), X * 2 + 1)
  rows = 16 // mesh.size
  assert sorted(record.info.shard[0].start or 0 for record in records) == list(range(0, 16, rows))
  np.testing.assert_array_equal(cg.assemble(records), X * 2)


def test_ordered_gates_keep_their_order_on_each_device(mesh: Any) -> None:
  seen: dict[int, list[int]] = collections.defaultdict(list)

  @cg.gate(out=lambda x, i: x, effect="ordered", style="context", arrays="numpy", sharding="i,->i")
  def note(context: Any, out: Any, x: Any, i: Any) -> None:
    seen[context.device].append(int(i))
    out[...] = x + 1

  body = lambda x, i: (note(x, i), None)
  program = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(5))[0])
  np.testing.assert_array_equal(program(put(mesh, X[:, 0], "d")), X[:, 0] + 5)
  assert list(seen.values()) == [[0, 1, 2, 3, 4]] * mesh.size


def test_collective_gates_know_their_rank(mesh: Any) -> None:
  ranks: list[tuple[int, int]] = []

  @cg.gate(out=lambda x: x, style="context", collective=True, sharding="i -> i")
  def note(context: Any, out: Any, x: Any) -> None:
    ranks.append((context.rank, context.size))
    out[...] = context.rank

  y = jax.jit(note)(put(mesh, X[:, 0], "d"))
  np.testing.assert_array_equal(y, np.arange(16) // (16 // mesh.size))
  assert sorted(ranks) == [(rank, mesh.size) for rank in range(mesh.size)]


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_an_error_on_one_device_before_a_collective_hangs_nobody(mesh: Any, effect: Any) -> None:
  def fail(x: np.ndarray) -> np.ndarray:
    if 16.0 in x:
      raise KeyError("sixteen")
    return x

  gate = cg.gate(fail, out=lambda x: x, sharding="i j -> i j", effect=effect)
  program = jax.jit(lambda x: gate(x).sum())
  for _ in range(2):
    with pytest.raises(KeyError, match="sixteen"), cg.errors():
      assert np.isnan(program(put(mesh, X, "d")))
  assert program(put(mesh, X + 100, "d")) == (X + 100).sum()


def test_gradients_through_shard_map_are_jax_s(mesh: Any) -> None:
  gate = cg.gate(np.sin, like=jnp.sin)

  def loss(function: Any) -> Any:
    def part(w: Any, x: Any) -> Any:
      return jax.lax.psum((function(x * w)).sum(), "d")

    specs = (jax.P(), jax.P("d"))
    return jax.jit(jax.grad(jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=jax.P())))

  w, x = put(mesh, np.float32(0.5)), put(mesh, X, "d")
  np.testing.assert_allclose(loss(gate)(w, x), loss(jnp.sin)(w, x), rtol=1e-5)


def test_a_feed_gives_all_devices_the_same_items(mesh: Any) -> None:
  with cg.feed([np.float32(i) for i in range(3)]) as feed:
    program = jax.jit(lambda x: x + feed.next())
    for i in range(3):
      np.testing.assert_array_equal(program(put(mesh, X, "d")), X + i)


def test_kernels_run_on_each_device_s_part(mesh: Any) -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x * y + x")
  got = jax.jit(kernel)(put(mesh, X, "d"), put(mesh, X + 1, "d"))
  np.testing.assert_array_equal(got, X * (X + 1) + X)
