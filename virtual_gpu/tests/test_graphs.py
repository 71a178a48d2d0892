# SPDX-License-Identifier: Apache-2.0
"""Programs that XLA records as CUDA graphs, loops and branches as conditional nodes among them.

XLA makes a graph of a run of kernels alone unless a program's options say more, as these do.
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

RECORDED = {
  "xla_gpu_enable_command_buffer": "FUSION,WHILE,CONDITIONAL",
  "xla_gpu_graph_min_graph_size": 1,
}
RUNS = 4  # the first ones warm up, the next records, the others replay


def twice(x: Any) -> Any:
  return 2 * x


def plus_one(x: Any) -> Any:
  return jnp.sort(x) + 1  # branches of arithmetic alone become a selection


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
  """What the program computes without graphs."""
  return jax.jit(program, compiler_options={"xla_gpu_enable_command_buffer": ""})(x)


@pytest.mark.parametrize("program", [counted, until, either, one_of, nested])
def test_loops_and_branches(program: Callable[..., Any]) -> None:
  recorded = jax.jit(program, compiler_options=RECORDED)
  for first in (0.0, 1.0, 2.0, 4.0):
    x = jnp.arange(8.0) + first
    want = np.asarray(reference(program, x))
    for _ in range(RUNS):
      np.testing.assert_array_equal(recorded(x), want)


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
