# SPDX-License-Identifier: Apache-2.0
"""Taps in programs over several devices: 4 CPU devices in a process of their own."""

from __future__ import annotations

from interpreters import output_of

PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), "x")
seen = []
def keep(value, info):
  seen.append((info.device, np.asarray(value).tolist()))
"""
FOUR = "--xla_force_host_platform_device_count=4"


def run(body: str) -> str:
  return output_of(PRELUDE + body, XLA_FLAGS=FOUR).strip()


def test_in_shard_map_each_device_taps_its_own_part():
  assert (
    run(
      """
f = jax.shard_map(lambda x: cg.tap(x * 2, keep), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
y = jax.jit(f)(jnp.arange(8.0))
cg.barrier()
print(y.tolist() == [2.0 * i for i in range(8)], sorted(seen))
"""
    )
    == f"True {[(d, [4.0 * d, 4.0 * d + 2]) for d in range(4)]}"
  )


def test_in_shard_map_ordered_taps_keep_order_on_each_device():
  assert (
    run(
      """
def f(x):
  def step(c, i):
    cg.tap(c[0] + i, keep, ordered=True)
    return c, None
  return jax.lax.scan(step, x, jnp.arange(20.0))[0]
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
jax.block_until_ready(g(100 * jnp.arange(4.0)))
cg.barrier()
per_device = [[v for d, v in seen if d == k] for k in range(4)]
print(per_device == [[100.0 * k + i for i in range(20)] for k in range(4)])
"""
    )
    == "True"
  )


def test_automatically_partitioned_programs_gather_the_value_when_asked_to():
  assert (
    run(
      """
x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
for effect in ("io", "dataflow"):
  y = jax.jit(lambda x: cg.tap(x + 1, keep, effect=effect, sharding="gather") * 2)(x)
  assert y.tolist() == [2 * (i + 1.0) for i in range(8)]
cg.barrier()
print([v for _, v in seen] == 2 * [[i + 1.0 for i in range(8)]])
"""
    )
    == "True"
  )


def test_a_check_that_fails_on_one_device_hangs_nothing():
  assert (
    run(
      """
def f(x):
  cg.check(x[0] < 3, "too much: {x}", x=x)
  return jax.lax.psum(x, "x")
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
try:
  with cg.errors():
    jax.block_until_ready(g(jnp.arange(4.0)))
except cg.CheckError as error:
  print(error.message)
"""
    )
    == "too much: [3.]"
  )


def test_pmap_taps_on_each_device():
  assert (
    run(
      """
jax.block_until_ready(jax.pmap(lambda x: cg.tap(x, keep))(jnp.arange(4.0)))
cg.barrier()
print(sorted(v for _, v in seen))
"""
    )
    == "[0.0, 1.0, 2.0, 3.0]"
  )
