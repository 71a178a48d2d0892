# SPDX-License-Identifier: Apache-2.0
"""Cases of `compat.sharded_jit` for two processes of four CPU devices.

python sharded_jit_processes.py ADDRESS PROCESS FILE     writes {case: "" or what failed} as JSON

Both processes run the same cases in the same order. A case that needs the other process calls a
program of both; none waits for the other otherwise, so that a failure in one is reported by both.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sharded_jit_support import X, case, message_of, report

from callgate.compat.sharded_jit import PartitionSpec as P
from callgate.compat.sharded_jit import sharded_jit, with_sharding_constraint


def mine(array: np.ndarray, axis: int = 0) -> np.ndarray:
  """This process's half of an array."""
  return np.split(array, 2, axis)[jax.process_index()]


def check(result: jax.Array, expected: np.ndarray, tile: tuple[int, ...]) -> None:
  """`result` is a part on this process's four devices."""
  assert result.is_fully_addressable
  np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-5)
  assert [shard.data.shape for shard in result.addressable_shards] == [tile] * 4
  assert [s.device for s in result.addressable_shards] == jax.local_devices()


@case
def each_process_passes_and_gets_its_part() -> None:
  f = sharded_jit(
    lambda x, w: (x @ w, x.sum()),
    in_parts=(P(8, 1), None),
    out_parts=(P(8, 1), None),
    local_in_parts=(P(4, 1), None),
    local_out_parts=(P(4, 1), None),
  )
  w = X.T / 64
  y, total = f(mine(X), w)
  check(y, mine(X @ w), (1, 8))
  check(total, X.sum(), ())


@case
def the_function_sees_whole_arrays() -> None:
  shapes = []

  def f(x):
    shapes.append(x.shape)
    return x - x.mean(0)

  g = sharded_jit(f, P(4, 2), P(4, 2), local_in_parts=P(2, 2), local_out_parts=P(2, 2))
  check(g(mine(X)), mine(X - X.mean(0)), (2, 4))
  assert shapes == [(8, 8)]


@case
def local_parts_follow_from_the_devices() -> None:
  f = sharded_jit(lambda x: x * 2, in_parts=P(2, 4), out_parts=P(1, 8))
  check(f(mine(X)), mine(X * 2, 1), (8, 1))
  f = sharded_jit(lambda x: x.T, in_parts=(P(8, 1),), out_parts=P(2, 4))
  check(f(mine(X)), mine(X.T), (4, 2))


@case
def pytrees_are_split_leaf_by_leaf() -> None:
  f = sharded_jit(
    lambda tree, n: {"a": tree["a"] * n, "b": (tree["b"] + 1,)},
    in_parts=({"a": P(8, 1), "b": None},),
    out_parts={"a": P(1, 8), "b": None},
    local_in_parts=({"a": P(4, 1), "b": None},),
    local_out_parts={"a": P(1, 4), "b": None},
    static_argnums=1,
  )
  out = f({"a": mine(X), "b": X[0]}, 3)
  check(out["a"], mine(3 * X, 1), (8, 1))
  check(out["b"][0], X[0] + 1, (8,))


@case
def random_keys_are_arrays_like_others() -> None:
  def draw(key, keys):
    return key, keys, jax.random.uniform(key, (8, 2)) + jax.vmap(jax.random.uniform)(keys)[0]

  keys = jax.random.split(jax.random.key(1), 8)
  own = keys[:4] if jax.process_index() == 0 else keys[4:]
  f = sharded_jit(draw, (None, P(8)), (None, P(8), P(8, 1)))
  key, again, result = f(jax.random.key(0), own)
  expected = np.asarray(draw(jax.random.key(0), keys)[2])
  check(result, mine(expected), (1, 2))
  np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(own))
  assert key == jax.random.key(0)


@case
def results_go_back_in_without_moving_or_compiling() -> None:
  traces = []

  def f(x):
    traces.append(x.shape)
    return x + x[::-1]

  g = sharded_jit(f, P(8, 1), P(8, 1), local_in_parts=P(4, 1), local_out_parts=P(4, 1))
  y = g(mine(X))
  with jax.transfer_guard("disallow"):
    z = g(y)
  y = X + X[::-1]
  check(z, mine(y + y[::-1]), (1, 8))
  assert traces == [(8, 8)]


@case
def replicated_everywhere_needs_a_local_count() -> None:
  f = sharded_jit(lambda x: x + 1, None, None, num_partitions=8, local_num_partitions=4)
  check(f(X), X + 1, (8, 8))
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, None, None, num_partitions=8)(X))
  assert "expected local_num_partitions" in text
  assert "how many of the 8 partitions" in text
  assert "(4 of 8)" in text

  def constrained(x):
    return with_sharding_constraint(x, P(2, 4)) * 2

  check(sharded_jit(constrained, None, None, local_num_partitions=4)(X), X * 2, (8, 8))
  text = message_of(ValueError, lambda: sharded_jit(constrained, None, None)(X))
  assert "how many of the 8 partitions" in text


@case
def few_partitions_are_each_process_s_own() -> None:
  index = jax.process_index()
  f = sharded_jit(lambda x: x.sum(0) + index, in_parts=P(2, 1), out_parts=P(2))
  result = f(X + index)
  np.testing.assert_array_equal(result, (X + index).sum(0) + index)
  assert [s.device for s in result.addressable_shards] == jax.local_devices()[:2]
  check(sharded_jit(lambda x: x, P(4, 1), P(4, 1), local_in_parts=P(4, 1))(X), X, (2, 8))


@case
def loops_gradients_and_constraints_are_inside() -> None:
  def loss(x):
    y = with_sharding_constraint(jnp.sin(x), P(1, 8))
    return lax.fori_loop(0, 3, lambda _, y: y * 0.5, y).sum()

  f = sharded_jit(jax.value_and_grad(loss), P(8, 1), (None, P(8, 1)))
  value, gradient = f(mine(X))
  check(value, np.sin(X).sum() / 8, ())
  check(gradient, mine(np.cos(X) / 8), (1, 8))


@case
def inside_jit_arrays_are_whole() -> None:
  inner = sharded_jit(lambda x: x * 2, P(8, 1), P(8, 1))
  result = jax.jit(lambda x: inner(x + 1))(X)
  assert result.shape == (8, 8)
  for shard in result.addressable_shards:
    np.testing.assert_array_equal(shard.data, (X[shard.index] + 1) * 2)
  text = message_of(ValueError, lambda: inner(result))
  assert "array over 8 devices of several processes: shape [8, 8]" in text


@case
def errors_name_the_numbers() -> None:
  def error(*args, x=X, **kwargs):
    return message_of(ValueError, lambda: sharded_jit(lambda x: x, *args, **kwargs)(x))

  text = error(P(16, 1), None)
  assert text == "sharded_jit computation requires 16 devices, but only 8 devices are available."
  text = error(P(8, 1), None, local_in_parts=P(8, 1))
  assert text == (
    "sharded_jit computation requires 8 local devices, but only 4 local devices are available."
  )
  text = error(P(6, 1), None)
  assert "must use all devices: expected 8 partitions, got 6" in text
  assert "4 local devices" in text
  text = error(P(4, 1), None, local_num_partitions=2)
  assert "expected 8 partitions, got 4, 2 of them local" in text
  text = error(P(8, 1), None, local_num_partitions=2)
  assert "expected 4 local partitions of 8, got 2" in text
  text = error(P(8, 1), None, local_in_parts=P(2, 2))
  assert "local_in_parts: expected PartitionSpec(4, 1) for array 0" in text
  assert (
    "the part of PartitionSpec(8, 1) on the 4 local devices of 8, got PartitionSpec(2, 2)" in text
  )
  text = error(P(8, 1), P(8, 1), local_out_parts=P(1, 4))
  assert "local_out_parts: expected PartitionSpec(4, 1) for array 0" in text
  text = error(P(8, 1), None, x=X[:3])
  assert "splits evenly into PartitionSpec(4, 1), got shape [3, 8]" in text


def main(address: str, process: int, file: str) -> None:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes=2, process_id=process)
  assert (jax.device_count(), jax.local_device_count()) == (8, 4)
  report(file)  # not printed: the network library prints
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
