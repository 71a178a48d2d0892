# SPDX-License-Identifier: Apache-2.0
"""Kernels, gates and taps in programs that XLA records as CUDA graphs, with conditional nodes.

XLA makes a graph of a run of kernels alone unless a program's options say more, as these do: loops
and branches become conditional nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import callgate as cg

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif("VIRTUAL_GPU" not in os.environ, reason="needs the virtual GPU"),
]

RECORDED = {
  "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,CONDITIONAL",
  "xla_gpu_graph_min_graph_size": 1,
}
RUNS = 4  # the first ones warm up, the next records, the others replay

twice = cg.cuda(
  "__global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }",
  grid=1, block=lambda x: x.size, out=lambda x: x, name="graphs.twice",
)  # fmt: skip
plus_one = cg.elementwise("float32 x", "float32 y", "y = x + 1", name="graphs.plus_one")


def counted(x: Any) -> Any:
  return lax.fori_loop(0, 5, lambda i, y: plus_one(twice(y)) + i, x)


def until(x: Any) -> Any:
  return lax.while_loop(lambda y: jnp.sum(y) < 1e5, twice, x)


def either(x: Any) -> Any:
  return lax.cond(x[0] > 3, lambda y: twice(y) + 1, lambda y: plus_one(y) * 3, x)


def one_of(x: Any) -> Any:
  branches = [lambda y: y * 5, twice, plus_one]
  return lax.switch(jnp.int32(x[0]) % 3, branches, x)


def nested(x: Any) -> Any:
  return lax.fori_loop(0, 3, lambda i, y: either(y) + one_of(y - i), x)


def reference(program: Callable[..., Any], x: Any) -> Any:
  """The program's results without graphs."""
  return jax.jit(program, compiler_options={"xla_gpu_enable_command_buffer": ""})(x)


@pytest.mark.parametrize("program", [counted, until, either, one_of, nested])
def test_loops_and_branches_of_kernels(program: Callable[..., Any]) -> None:
  recorded = jax.jit(program, compiler_options=RECORDED)
  for first in (0.0, 1.0, 2.0, 4.0):
    x = jnp.arange(8.0) + first
    want = np.asarray(reference(program, x))
    for _ in range(RUNS):
      np.testing.assert_array_equal(recorded(x), want)


def test_taps_in_loops_and_branches_send_in_every_run() -> None:
  seen: list[tuple[str, float]] = []

  def sent(name: str, y: Any) -> Any:
    return cg.tap(y, lambda value: seen.append((name, float(value[0]))), ordered=True)

  def program(x: Any) -> Any:
    x = lax.fori_loop(0, 3, lambda i, y: twice(sent("loop", y)) + i, x)
    return lax.cond(x[0] > 10, lambda y: sent("large", y) + 1, lambda y: sent("small", y), x)

  recorded = jax.jit(program, compiler_options=RECORDED)
  for first in (0.0, 1.0) * RUNS:
    x = jnp.zeros(4) + first
    got = recorded(x)
    cg.barrier()
    y, want = first, []
    for i in range(3):
      want.append(("loop", y))
      y = 2 * y + i
    want.append(("large" if y > 10 else "small", y))
    assert seen == want
    np.testing.assert_array_equal(got, np.full(4, y + (y > 10)))
    seen.clear()


def test_a_gate_that_is_recorded_and_one_that_is_not_stand_in_loops() -> None:
  calls: list[float] = []

  def in_place(out: Any, x: Any) -> None:
    del out, x

  same = cg.gate(
    in_place, out=lambda x: x, arrays="buffer", style="inplace", aliases={0: 0},
    command_buffer=True, name="graphs.same",
  )  # fmt: skip

  def host(x: Any) -> Any:
    calls.append(float(x[0]))
    return x + 1

  on_host = cg.gate(host, out=lambda x: x, effect="io", name="graphs.host")

  def program(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, y: on_host(same(twice(y)) + i), x)

  recorded = jax.jit(program, compiler_options=RECORDED)
  for _ in range(RUNS):
    calls.clear()
    np.testing.assert_array_equal(recorded(jnp.ones(4)), np.full(4, 19))
    assert calls == [2, 7, 18]


CONDITIONAL = """
import jax, jax.numpy as jnp
from jax import lax
import test_graphs

program = getattr(test_graphs, "{program}")
recorded = jax.jit(program, compiler_options=test_graphs.RECORDED)
for _ in range(test_graphs.RUNS):
  recorded(jnp.ones(8)).block_until_ready()
"""


@pytest.mark.parametrize("program", ["counted", "either"])
@pytest.mark.parametrize("call", ["cuGraphConditionalHandleCreate", "cuGraphLaunch"])
def test_they_are_conditional_nodes_of_graphs(program: str, call: str) -> None:
  """A driver that can't make them fails the programs above."""
  done = subprocess.run(
    [sys.executable, "-c", CONDITIONAL.format(program=program)],
    env={**os.environ, "VIRTUAL_GPU_FAIL": f"{call}:2"},
    cwd=os.path.dirname(__file__),
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert done.returncode != 0
  assert "CUDA_ERROR_OUT_OF_MEMORY" in done.stderr, done.stderr
