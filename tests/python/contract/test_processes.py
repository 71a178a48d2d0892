# SPDX-License-Identifier: Apache-2.0
"""The contract: functions jitted before the import, programs under way at the end, and exports."""

from __future__ import annotations

import pathlib
from typing import Any

import contract
import jax
import numpy as np
import pytest
from contract import ROWS, Host
from interpreters import output_of

import callgate as cg

SUPPORT = pathlib.Path(contract.__file__).parent
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

host, row = contract.Host(), contract.ROWS[%r]
with row.around():
  part["f"] = row.make(host)
  found = [float(program(np.float32(n))) - n for n in range(4)]
  print(found == [row.adds] * 4, float(twice(np.float32(2))), len(host.seen()) if row.each else 4)
  last = [program(np.float32(n)) for n in range(3)]
"""


@pytest.mark.parametrize("row", contract.rows("another process"))
def test_jitted_before_the_import_and_under_way_at_the_end(row: str) -> None:
  printed = output_of(_JITTED_BEFORE % (str(SUPPORT), row))
  assert printed.split("\\n")[0].split() == ["True", "4.0", "4"]


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


@pytest.mark.parametrize("row", ROWS)
def test_a_program_is_compiled_once(row: str) -> None:
  """Equal functions, each traced anew, find JAX's program where nothing tells them apart."""
  f: Any = ROWS[row].make(Host())
  with ROWS[row].around():
    program = jax.jit(f)
    for value in range(3):
      program(np.float32(value))
    assert program._cache_size() == 1
