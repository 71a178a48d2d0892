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


@pytest.mark.parametrize("wait", ["cg.barrier()", "cg.held()"])
def test_arrays_over_a_views_memory_that_a_gate_made(wait: str) -> None:
  program = f"""
import threading
import jax, jax.numpy as jnp, numpy as np, callgate as cg
from callgate._jax import dispatch
from callgate._objects import table

listed, begun, find = threading.Event(), threading.Event(), dispatch.live_arrays

def noting():
  try:
    return find()
  finally:
    threading.Timer(0.2, listed.set).start()

dispatch.live_arrays = noting

def gate(x):
  other = x.addressable_data(0)  # another jax.Array over the same memory
  begun.set()
  assert listed.wait(60)
  return np.asarray(other) + 1

handle = cg.hold(lambda n: [n], name="lists")(3)
gate = cg.gate(gate, out=lambda x: x, arrays="jax")
run = jax.jit(lambda x, large: (gate(x), large @ large))  # too long to run inline
large = jnp.ones((600, 600))
for _ in range(3):
  listed.clear(), begun.clear()
  result, _ = run(jnp.zeros((2, table.WORDS), jnp.uint32), large)
  assert begun.wait(60)
  {wait}
  assert result.sum() == result.size
print("whole")
"""
  assert output_of(program) == "whole\n"
