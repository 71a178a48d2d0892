# SPDX-License-Identifier: Apache-2.0
"""The contract: a fork's child runs its parent's program or is told why not; the parent goes on."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import contract
import contract_processes
import pytest
from contract import FOLDER, ROWS
from interpreters import run_python

# One process runs all rows, and one child of it asks them all again.
ON_CPU = [row for row in ROWS if contract.installed(row)]

_PROCESS = """
import atexit, contextlib, json, os, signal, sys, warnings
warnings.simplefilter("ignore")  # Python and JAX warn of forks in a process with threads
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, %r)
import contract
import callgate as cg

X = np.float32(3)
blocks = contextlib.ExitStack()
programs = {}
for name in %r:
  row, host = contract.ROWS[name], contract.Host()
  program = jax.jit(row.make(host))
  blocks.enter_context(row.around())
  programs[name] = row, host, program
  program(X).block_until_ready()
  cg.barrier()

def ask(name):
  row, host, program = programs[name]
  before = len(host.seen())
  try:
    with cg.errors():
      added = float(program(X)) - 3
  except Exception as error:
    return str(error)
  return [added, len(host.seen()) - before]

def ask_all(file):
  for name in programs:
    signal.alarm(20)  # a hang ends the process: the rows to come have no answer
    print(json.dumps([name, ask(name)]), file=file, flush=True)
  signal.alarm(0)

read, write = os.pipe()
child = os.fork()
if child == 0:
  os.close(read)
  ask_all(os.fdopen(write, "w"))
  os._exit(0)
os.close(write)
in_child = os.fdopen(read).read()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(in_child + "end of the child")
ask_all(sys.stdout)
under_way = [program(np.float32(n)) for _, _, program in programs.values() for n in range(3)]
blocks.close()
sys.exit(abs(status))
"""


def _answers(text: str) -> dict[str, Any]:
  return dict(json.loads(line) for line in text.splitlines() if not line.startswith("printed"))


@pytest.fixture(scope="module")
def process() -> subprocess.CompletedProcess[str]:
  asked = list(filter(contract.installed, ON_CPU))
  return contract_processes.run(_PROCESS % (str(FOLDER), asked), asked)


@pytest.mark.parametrize("row", ON_CPU)
def test_a_fork_s_child_runs_or_is_told_and_the_parent_goes_on(
  row: str, process: subprocess.CompletedProcess[str]
) -> None:
  in_child, in_parent = map(_answers, process.stdout.split("end of the child\n"))
  in_child, in_parent = (answers.get(row, "no answer") for answers in (in_child, in_parent))
  part = ROWS[row]
  ran = [part.adds, 1] if part.each else [part.adds, in_parent[1]]
  assert in_parent == ran
  if "fork" in part.refuses:
    assert part.refuses["fork"] in in_child
  else:
    assert in_child == ran


def test_a_process_with_programs_of_all_rows_under_way_ends_in_silence(
  process: subprocess.CompletedProcess[str],
) -> None:
  assert process.stderr == ""
  assert process.returncode == 0


def test_a_fork_s_child_of_a_process_without_channels_has_barriers_and_channels() -> None:
  process = run_python(
    """
import os, warnings
warnings.simplefilter("ignore")
import jax
import callgate as cg

program = jax.jit(cg.gate(lambda x: x + 1, out=lambda x: x, effect="io"))
program(1.0)
cg.barrier()
if child := os.fork():
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
  value = program(2.0)
  with cg.channel("of the child", to=[].append) as channel:
    cg.barrier()
    channel.flush()
  os._exit(int(value))
"""
  )
  assert (process.stdout, process.stderr) == ("3\n", "")
