# SPDX-License-Identifier: Apache-2.0
"""The contract: functions jitted before the import, programs under way at the end, and exports."""

from __future__ import annotations

import re
from typing import Any

import contract
import contract_processes
import jax
import numpy as np
import pytest
from contract import FOLDER, ROWS, Host

import callgate as cg

X = np.float32(3)

_JITTED_BEFORE = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)

part = {}
program = jax.jit(lambda x: part["f"](x))
twice = jax.jit(lambda x: 2 * x)
twice(np.float32(1))

sys.path.insert(0, %r)
import contract

class Own(Exception):
  pass

row = contract.ROWS[%r]
fails = row.tells and "error" not in row.refuses
host = contract.Host((lambda: Own("own")) if fails else None)
with row.around():
  part["f"] = row.make(host)
  found = [float(program(np.float32(n))) - n for n in range(4)]
  calls = len(host.seen())
  print(found == [row.adds] * 4, float(twice(np.float32(2))), calls if row.each else 4)
  if fails:
    import callgate as cg
    try:
      with cg.errors():
        jax.block_until_ready(program(np.float32(contract.BAD)))
    except Exception as error:
      print(type(error).__name__)
  last = [program(np.float32(n)) for n in range(3)]
  if fails:
    jax.block_until_ready(program(np.float32(contract.BAD)))
"""


@pytest.mark.parametrize("row", ROWS)
def test_jitted_before_the_import_and_ended_with_programs_under_way(row: str) -> None:
  """The process ends by an error that nobody catches, after one that was caught, or without."""
  done = contract_processes.run(_JITTED_BEFORE % (str(FOLDER), row), [row])
  first, *then = (line for line in done.stdout.splitlines() if not line.startswith("printed"))
  assert first.split() == ["True", "4.0", "4"]
  if not ROWS[row].tells or "error" in ROWS[row].refuses:
    said = done.stderr if row in contract.rows("silence") else ""
    assert (done.returncode, then, said) == (0, [], "")
    return
  told = "Own" if ROWS[row].raises is None else ROWS[row].raises.__name__
  assert (done.returncode, then) == (1, [told])
  assert re.search(rf"^(callgate\.)?{told}: ", done.stderr, re.MULTILINE), done.stderr
  uncaught = [line for line in done.stderr.splitlines() if "Error: INTERNAL" in line]
  assert len(uncaught) <= 1, done.stderr


@pytest.mark.parametrize("row", ROWS)
def test_an_export_runs_or_says_why_not(row: str) -> None:
  part = ROWS[row]
  host = Host()
  f = part.make(host)
  with part.around():
    if "export" in part.refuses:
      with pytest.raises(Exception, match=part.refuses["export"]):
        jax.export.export(jax.jit(lambda x: f(x)))(X)
      return
    exported = jax.export.export(jax.jit(lambda x: f(x)), disabled_checks=cg.export_checks())(X)
    loaded = jax.export.deserialize(exported.serialize())
    for _ in range(2):
      assert float(jax.jit(loaded.call)(X)) == 3 + part.adds
    if part.each:
      assert host.seen() == [3.0, 3.0]
    cg.barrier()


@pytest.mark.parametrize("row", ROWS)
def test_a_program_is_compiled_once(row: str) -> None:
  """Equal functions, each traced anew, find JAX's program where nothing tells them apart."""
  f: Any = ROWS[row].make(Host())
  with ROWS[row].around():
    program = jax.jit(f)
    for value in range(3):
      program(np.float32(value))
    assert program._cache_size() == 1
    cg.barrier()
