# SPDX-License-Identifier: Apache-2.0
"""The contract: what a program holds lasts as long as the program, and nothing stays behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import contract
import jax
import numpy as np
import pytest
from contract import ROWS, Host
from waiting import until

import callgate as cg
from callgate import _callgate

X = np.float32(3)


def _collect() -> None:
  cg.barrier()
  gc.collect()
  _callgate.drain()
  gc.collect()


def _until_gone(watch: weakref.ref[Any], what: str) -> None:
  def is_gone() -> bool:
    _collect()
    return watch() is None

  until(is_gone, what)


@pytest.mark.parametrize("row", contract.rows("kept"))
def test_a_compiled_program_keeps_the_function_and_frees_it(row: str) -> None:
  host = Host()
  watch = weakref.ref(host)
  with ROWS[row].around():
    compiled = jax.jit(ROWS[row].make(host)).lower(X).compile()
    del host
    jax.clear_caches()
    _collect()
    for _ in range(2):
      assert float(compiled(X)) == 3 + ROWS[row].adds
    if ROWS[row].each:
      assert watch() is not None
    del compiled
    _until_gone(watch, f"the function of a program of {row} that is gone")


@pytest.mark.parametrize("row", contract.rows("cycle"))
def test_a_reference_cycle_is_freed(row: str) -> None:
  class Cycle(Host):
    f: Any

  host = Cycle()
  host.f = ROWS[row].make(host)
  watch = weakref.ref(host)
  with ROWS[row].around():
    jax.block_until_ready(jax.jit(host.f)(X))
    del host
    jax.clear_caches()
    _until_gone(watch, f"{row} in a cycle with its function")


@pytest.mark.parametrize("row", contract.rows("dropped"))
def test_a_function_that_is_dropped_with_its_programs_is_gone(row: str) -> None:
  """Though JAX's caches are never cleared."""
  before: set[str] = set()
  with ROWS[row].around():
    for turn in range(2):
      host = Host()
      watch = weakref.ref(host)
      f = ROWS[row].make(host)
      ways = [f, jax.vmap(f)] if row in contract.rows("values vmap") else [f]
      program = jax.jit(lambda *given, ways=ways: [g(x) for g, x in zip(ways, given, strict=True)])
      jax.block_until_ready(program(*[X, np.array([X, X])][: len(ways)]))
      del host, f, ways, program
      _until_gone(watch, f"the function of {row} gone")
      if turn == 0:  # with names that the part keeps for all its programs
        before = set(_callgate.registered_names())
    until(lambda: set(_callgate.registered_names()) <= before, f"the names of {row} gone")
