# SPDX-License-Identifier: Apache-2.0
"""The contract: Ctrl-C ends a program, the call raises KeyboardInterrupt, and the next is right."""

from __future__ import annotations

import functools
import json
from typing import Any

import contract
import contract_processes
import pytest
from contract import FOLDER, ROWS

pytestmark = pytest.mark.limit(420)  # a process asks fourteen rows
_OF_A_PROCESS = 14  # rows, neighbours in the table
# JAX's C++ code dispatches the second call; the third question is
# a loop of short programs in Python.
_PROCESS = """
import json, os, signal, sys, threading, time
import jax, numpy as np
sys.path.insert(0, %r)
import contract
import callgate as cg

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
X, begun = np.float32(3), threading.Event()

def interrupt():
  begun.wait()
  time.sleep(0.005)
  os.kill(os.getpid(), signal.SIGINT)

@cg.gate(out=lambda x: x, effect="io")
def begin(x):
  begun.set()
  return x

def ended(run):
  begun.clear()
  thread = threading.Thread(target=interrupt)
  thread.start()
  try:
    try:
      run()
    except Exception as error:
      how = f"{type(error).__name__}: {error}"[:300]
    else:
      how = "ended by itself"
    thread.join()  # the interrupt comes here if it has not come
  except KeyboardInterrupt:
    how = "KeyboardInterrupt"
  begun.set()
  thread.join()
  return how

def ask(name):
  row, host = contract.ROWS[name], contract.Host()
  f = row.make(host)

  def many(x, steps):
    x = begin(x)
    return jax.lax.fori_loop(0, steps, lambda i, x: f(x), x)

  def python():
    while True:
      short(X)
      if not begun.is_set():  # an interrupt within `set` would leave its lock held
        begun.set()

  long, short = jax.jit(many), jax.jit(f)
  with row.around():
    short(X).block_until_ready()
    answers = [ended(lambda: long(X, 2**31 - 1).block_until_ready()) for _ in ("first", "again")]
    answers.append(ended(python))
    try:
      cg.barrier()  # what the interrupts have ended is told there, if nobody else has asked
    except Exception:
      pass
    with cg.errors():
      answers.append(float(long(X, 2)) - 3)
  return answers

for name in %r:
  signal.alarm(150)  # a program that does not end
  print(json.dumps([name, ask(name)]), flush=True)
"""


@functools.cache
def _answers(number: int) -> dict[str, Any]:
  """The answers of one process's rows, and its exit status and standard error under ""."""
  some = contract.rows("interrupt")[number * _OF_A_PROCESS :][:_OF_A_PROCESS]
  asked = list(filter(contract.installed, some))
  process = contract_processes.run(_PROCESS % (str(FOLDER), asked), asked, timeout=400)
  lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
  return {**dict(map(json.loads, lines)), "": [process.returncode, process.stderr]}


@pytest.mark.parametrize("row", contract.rows("interrupt"))
def test_a_program_is_interrupted_and_the_next_one_is_right(row: str) -> None:
  answers = _answers(contract.rows("interrupt").index(row) // _OF_A_PROCESS)
  status, said = answers[""]
  assert (status, said if row in contract.rows("silence") else "") == (0, "")
  assert answers[row] == [*["KeyboardInterrupt"] * 3, pytest.approx(2 * ROWS[row].adds)]
