# SPDX-License-Identifier: Apache-2.0
"""The contract: copies and pickles of a jitted function run, here and in another process."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import contract
import contract_processes
import jax
import numpy as np
import pytest
from contract import FOLDER, ROWS, Host
from free_threaded import FREE, fails_to_unpickle

import callgate as cg

cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

X = np.float32(3)


class Portable(Host):
  """A host that pickles: without its lock and without what it has seen."""

  def __reduce__(self) -> Any:
    return Host, (self.error, self.plus)


def _pickled(row: str) -> bytes:
  return cloudpickle.dumps(jax.jit(ROWS[row].make(Portable())))


@pytest.mark.parametrize("row", ROWS)
def test_a_copy_and_a_pickle_run_or_say_why_not(row: str) -> None:
  part = ROWS[row]
  f = part.make(Portable())
  copied = copy.deepcopy({"held": [f]})["held"][0]
  with part.around():
    assert float(jax.jit(copied)(X)) == 3 + part.adds
    if "pickle" in part.refuses:
      with pytest.raises(Exception, match=part.refuses["pickle"]):
        cloudpickle.dumps(jax.jit(f))
      return
    program = cloudpickle.loads(cloudpickle.dumps(jax.jit(f)))
    for value in (1, 2):
      assert float(program(np.float32(value))) == value + part.adds
    cg.barrier()


# A process that has the table and nothing else.
_ELSEWHERE = """
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
      program = pickle.loads(data)
      said[row] = [float(program(np.float32(n))) - n for n in range(2)]
      cg.barrier()
  except Exception as error:
    said[row] = str(error)
  with contextlib.suppress(Exception):
    cg.barrier()
print(json.dumps(said))
"""


def _fails_elsewhere(row: str) -> bool:
  return "pickle elsewhere" in ROWS[row].refuses


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
  """By row, what its pickle's program has added in another process, or the text of its error."""
  asked = filter(contract.installed, contract.rows("pickle"))
  asked = (row for row in asked if not (FREE and _fails_elsewhere(row)))
  texts = {row: base64.b64encode(_pickled(row)).decode() for row in asked}
  done = contract_processes.run(_ELSEWHERE % (str(FOLDER), texts), texts)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, marks=fails_to_unpickle) if _fails_elsewhere(row) else row
    for row in contract.rows("pickle")
  ],
)
def test_a_pickle_runs_in_another_process_or_says_why_not(
  row: str, elsewhere: dict[str, Any]
) -> None:
  part, said = ROWS[row], elsewhere[row]
  if _fails_elsewhere(row):
    assert part.refuses["pickle elsewhere"] in said
  else:
    assert said == [part.adds] * 2
