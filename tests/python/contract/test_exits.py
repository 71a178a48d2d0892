# SPDX-License-Identifier: Apache-2.0
"""The contract: a script that has caught its programs' errors ends without a word, by status 0."""

from __future__ import annotations

import contract
import contract_processes
import pytest
from contract import FOLDER, ROWS

_PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
sys.path.insert(0, %r)
import contract

x, row = np.float32(contract.BAD), contract.ROWS[%r]

def work(x):  # so much that the program runs on a thread of XLA's
  step = lambda i, y: jnp.sin(y @ y) * 1e-3
  return jax.lax.fori_loop(0, 100, step, jnp.full((64, 64), x))

def by_errors(program):
  with cg.errors():
    jax.block_until_ready(program(x))

def by_a_wait(program):
  jax.block_until_ready(program(x))

def ask():
  with row.around():  # id_tap raises at the end of its block
    f = row.make(contract.Host(lambda: ValueError("own")))
    program = jax.jit(lambda x: (f(x), work(x)))
    for way in (by_errors, by_a_wait) if row.tells else (by_errors,):
      for _ in range(2):  # the second by JAX's C++ dispatch
        try:
          way(program)
        except Exception as error:
          print(type(error).__name__)

try:
  ask()
except Exception as error:
  print(type(error).__name__)
print("the end", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("row", contract.rows("error"))
def test_errors_that_a_script_has_caught_are_not_told_at_its_end(row: str) -> None:
  done = contract_processes.run(_PROCESS % (str(FOLDER), row), [row])
  before, _, after = done.stderr.partition("the end\n")
  assert after == ""
  assert done.returncode == 0, before
  assert not ROWS[row].tells or done.stdout
