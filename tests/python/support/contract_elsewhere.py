# SPDX-License-Identifier: Apache-2.0
"""Programs of the contract's rows in another process, which has the table and nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from contract import FOLDER
from interpreters import output_of

_OTHER = """
import base64, contextlib, json, pickle, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import callgate as cg
sys.path.insert(0, %r)
import contract

said = {}
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


def added_elsewhere(made: Mapping[str, bytes], program: str) -> dict[str, Any]:
  """By row, what its program has added to 0 and to 1, or the text of its error.

  Args:
    made: each row's program, as bytes. One process runs all of them.
    program: an expression of `data`, the bytes, that loads the program there.
  """
  texts = {row: base64.b64encode(data).decode() for row, data in made.items()}
  return json.loads(output_of(_OTHER % (str(FOLDER), texts, program)).splitlines()[-1])
