# SPDX-License-Identifier: Apache-2.0
"""A recording of objects that devices made of equal values gave one device another's."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import tempfile

import jax
import numpy as np

import callgate as cg

mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "e"))
P = jax.sharding.PartitionSpec
hold = cg.hold(lambda x: x.copy())


def use(made, x):
  assert made == x


def each(x):
  cg.use(use, hold(x), x, out=None, effect="ordered")
  return x


run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P(("d", "e"))))
x = np.float32([1, 2])
for _ in range(8):
  with tempfile.TemporaryDirectory() as folder:
    with cg.record(f"{folder}/calls"):
      run(x)
      cg.barrier()
    with cg.replay(f"{folder}/calls") as replay:
      run(x)
      cg.barrier()
    assert replay.left == 0
