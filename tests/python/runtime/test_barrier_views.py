# SPDX-License-Identifier: Apache-2.0
"""A barrier leaves the arrays alone that gates have over XLA's memory while they run."""

from __future__ import annotations

import pytest
from interpreters import output_of

PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, callgate as cg

mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
gate = cg.gate(lambda x: x, out=lambda x: x, arrays="jax", sharding="shard"OPTIONS)
x = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, jax.P("d")))
run = jax.jit(lambda x: jax.lax.scan(lambda c, _: (gate(c), None), x, length=20)[0])
for _ in range(15):
  run(x)
  cg.barrier()
  with cg.errors():
    run(x)
print("whole")
"""


@pytest.mark.parametrize("options", ["", ', thread="own"'])
def test_a_barrier_while_gates_have_jax_arrays(options: str) -> None:
  assert output_of(PROGRAM.replace("OPTIONS", options)) == "whole\n"
