# SPDX-License-Identifier: Apache-2.0
"""The contract: threads that use a part at once, for the first time in their process."""

from __future__ import annotations

import json
from typing import Any

import contract
import contract_processes
import pytest
from contract import FOLDER, ROWS

pytestmark = pytest.mark.limit(300)  # a process, which imports all that the rows need
_PROCESS = """
import json, sys, threading
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import callgate as cg
sys.path.insert(0, %r)
import contract

rows, said = %r, {}

def ask(name):
  found, begin = [None] * 4, threading.Barrier(4)

  def run(n):
    try:
      f = contract.ROWS[name].make(contract.Host())
      begin.wait()
      found[n] = float(jax.jit(lambda x: f(x))(np.float32(n))) - n
    except Exception as error:
      begin.abort()  # the others wait for a thread that has made its part
      found[n] = f"{type(error).__name__}: {error}"

  with contract.ROWS[name].around():
    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    cg.barrier()
  return found

sys.setswitchinterval(1e-6)
for name in rows:
  said[name] = ask(name)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> dict[str, Any]:
  """By row, what each of four threads got."""
  asked = {
    item.callspec.params["row"] for item in request.session.items if item.path == request.path
  }
  rows = [row for row in ROWS if row in asked and contract.installed(row)]
  done = contract_processes.run(_PROCESS % (str(FOLDER), rows), rows, timeout=280)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("row", contract.rows("threads"))
def test_threads_that_begin_at_once_get_what_one_gets(row: str, said: dict[str, Any]) -> None:
  assert said[row] == [ROWS[row].adds] * 4
