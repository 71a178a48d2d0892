# SPDX-License-Identifier: Apache-2.0
"""The contract: the next process runs what one has exported, and finds what it has compiled."""

from __future__ import annotations

import json
from typing import Any

import contract
import contract_processes
import pytest
from contract import FOLDER, ROWS

pytestmark = pytest.mark.limit(300)  # two processes, which import all that the rows need
# They run this, one after the other, each for all rows that are asked. The second loads the first
# one's exports three times: before it makes anything, once it has made the same rows, as a module
# does that it imports, and once it has traced them.
_PROCESS = """
import contextlib, hashlib, itertools, json, os, pathlib, shutil, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import callgate as cg
sys.path.insert(0, %r)
import contract

X, hits = np.float32(3), []
rows = %r
said = {name: {} for name in rows}
exports = pathlib.Path(%r)
jax.monitoring.register_event_listener(
  lambda name, **_: name == "/jax/compilation_cache/cache_hits" and hits.append(name)
)

def ask(name, question, run):
  with contract.ROWS[name].around():
    try:
      said[name][question] = run()
      cg.barrier()
    except Exception as error:
      said[name][question] = str(error)
    with contextlib.suppress(Exception):
      cg.barrier()

def called(name):
  exported = jax.export.deserialize(bytearray((exports / name).read_bytes()))
  return [float(exported.call(np.float32(n))) - n for n in range(2)]

def compiled(f):
  lowered = jax.jit(lambda x: f(x)).lower(X)
  hits.clear()
  program, found = lowered.compile(), len(hits)
  text = hashlib.sha1(lowered.as_text().encode()).hexdigest()
  return [float(program(X)) - 3, found, text]

def exported(f):
  made = jax.export.export(jax.jit(lambda x: f(x)), disabled_checks=cg.export_checks())(X)
  return made.serialize()

can_export = [name for name in contract.rows("export") if name in rows]
saved, number = exports / "saved", itertools.count()
is_second = saved.exists()
for name in can_export if is_second else ():
  ask(name, "nothing made", lambda: called(name))
# Programs that save hold their folder's name.
shutil.rmtree(saved, ignore_errors=True)
saved.mkdir()
contract._path = lambda: saved / str(next(number))
made = {name: contract.ROWS[name].make(contract.Host()) for name in rows}
for name in can_export if is_second else ():
  ask(name, "made", lambda: called(name))
for name, f in made.items():
  ask(name, "compiled", lambda: compiled(f))
  if name in can_export:
    with contract.ROWS[name].around():
      program = exported(f)  # twice, since names may be numbered by traces
      if not is_second:
        (exports / name).write_bytes(program)
for name in can_export if is_second else ():
  ask(name, "traced", lambda: called(name))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def two(
  request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
  """By process and row, what the row has said to each question."""
  asked = {
    item.callspec.params["row"] for item in request.session.items if item.path == request.path
  }
  rows = [row for row in ROWS if row in asked and contract.installed(row)]
  folder = tmp_path_factory.mktemp("next")
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  source = _PROCESS % (str(FOLDER), rows, str(folder))
  said: list[dict[str, Any]] = []
  for _ in range(2):
    done = contract_processes.run(source, rows, timeout=140, environment=environment)
    assert done.returncode == 0, done.stderr
    said.append(json.loads(done.stdout.splitlines()[-1]))
  return said


@pytest.mark.parametrize("row", contract.rows("export"))
def test_an_export_runs_in_another_process_or_says_why_not(
  row: str, two: list[dict[str, Any]]
) -> None:
  """Its name brings the part, which defines it; or the process defines it first."""
  part, said = ROWS[row], two[1][row]
  assert said["traced"] == [part.adds] * 2
  if "export elsewhere" in part.refuses:
    assert part.refuses["export elsewhere"] in said["made"]
  else:
    assert said["made"] == [part.adds] * 2
  if row in contract.DEFINED_BY_USERS:
    assert contract.DEFINE in said["nothing made"]
  else:
    assert said["nothing made"] == [part.adds] * 2


@pytest.mark.parametrize("row", ROWS)
def test_the_next_process_finds_the_program_in_the_persistent_cache(
  row: str, two: list[dict[str, Any]]
) -> None:
  first, second = (said[row]["compiled"] for said in two)
  assert first == [ROWS[row].adds, 0, second[2]]
  assert second == [ROWS[row].adds, 1, first[2]]
