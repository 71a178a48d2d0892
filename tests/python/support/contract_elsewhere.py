# SPDX-License-Identifier: Apache-2.0
"""Programs of the contract's rows in another process, which has the table and nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from contract import FOLDER, platforms
from interpreters import output_of

_OTHER = """
import base64, contextlib, json, pickle, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import callgate as cg
sys.path.insert(0, %r)
import contract

said = {}
made = [contract.ROWS[row].make(contract.Host()) for row in %r]
for row, text in %r.items():
  data = base64.b64decode(text)
  try:
    with contract.ROWS[row].around():
      program = %s
      said[row] = [float(program(np.float32(n))) - n for n in range(2)]
      cg.barrier()
  except Exception as error:
    said[row] = str(error)
  with contextlib.suppress(Exception):
    cg.barrier()
print(json.dumps(said))
"""

# A process of its own, so that names without a number are those of the other process, too.
_EXPORTING = """
import base64, json, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import callgate as cg
sys.path.insert(0, %r)
import contract

exports = {}
made = {row: contract.ROWS[row].make(contract.Host()) for row in %r}
for row, f in made.items():
  with contract.ROWS[row].around():
    exported = jax.export.export(jax.jit(f), disabled_checks=cg.export_checks())(np.float32(3))
  exports[row] = base64.b64encode(exported.serialize()).decode()
print(json.dumps(exports))
"""


def added_elsewhere(
  programs: Mapping[str, bytes], load: str, made: Sequence[str] = ()
) -> dict[str, Any]:
  """By row, what its program has added to 0 and to 1, or the text of its error.

  Args:
    programs: each row's program, as bytes. One process runs all of them.
    load: an expression of `data`, the bytes, that loads the program there.
    made: the rows that the process has made, but not called, before it loads a program.
  """
  texts = {row: base64.b64encode(data).decode() for row, data in programs.items()}
  said = output_of(_OTHER % (str(FOLDER), list(made), texts, load), **platforms())
  return json.loads(said.splitlines()[-1])


def exports(rows: Sequence[str]) -> dict[str, bytes]:
  """By row, its exported program, from a process that has made all of them in this order."""
  made = json.loads(
    output_of(_EXPORTING % (str(FOLDER), list(rows)), **platforms()).splitlines()[-1]
  )
  return {row: base64.b64decode(text) for row, text in made.items()}
