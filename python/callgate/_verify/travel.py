# SPDX-License-Identifier: Apache-2.0
"""Questions about other processes: exports, pickles, and shards on four devices.

Shards need devices that this process may lack, so another process simulates four.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax import export as jax_export

from callgate._call.function import ArrayFunction
from callgate._core import pickling
from callgate._core.errors import GateDefinitionError
from callgate._places import travel
from callgate._runtime import config, targets
from callgate._verify.subject import Fault, NotAsked, Subject, difference

DEVICES = 4
_LONGEST = 120.0  # seconds until that process counts as hanging
# Processes of `shards`. Atomic: single steps; emptied by the end of each.
_running: set[subprocess.Popen[bytes]] = set()


def export(subject: Subject) -> str:
  """Exports a program with the call, reloads it, and runs it."""
  subject.compared()
  if config.engine() == "jax":
    raise NotAsked("config(engine='jax'): JAX exports no callbacks")
  make = jax_export.export(jax.jit(subject.flat), disabled_checks=targets.export_checks())
  exported = make(*subject.leaves())
  again = jax_export.deserialize(exported.serialize())
  if found := difference(subject.results, subject.run(jax.jit(again.call))):
    raise Fault(f"the exported program: {found}")
  return "an exported program gives the same results"


def pickled(subject: Subject) -> str:
  """Pickles the function, reloads it, and calls it."""
  how = ""
  if isinstance(getattr(subject.core, "run_on", None), concurrent.futures.Executor):
    raise NotAsked("its executor belongs to this process")
  try:
    data = pickle.dumps(subject.function)
  except Exception:  # noqa: BLE001 - functions that no module holds
    if subject.core.origin is None or not subject.core.travels:
      raise NotAsked(f"a {subject.core.kind} needs a module's name for it to be pickled") from None
    data, how = travel.dumps(subject.core.label, subject.function), " (by cloudpickle)"
  again = pickling.made_anew(subject.function, data)  # in this process it would be the same one
  if not isinstance(again, ArrayFunction):
    raise Fault(f"expected a {type(subject.function).__name__} from its pickle, got {again!r}")
  subject.compared()
  other = Subject(again, subject.args, subject.kwargs)
  if other.blocked:
    raise Fault(f"the pickle's: {other.blocked[1]}")
  if found := difference(subject.results, other.results):
    raise Fault(f"the pickle's: {found}")
  return f"a pickle gives the same results{how}"


def shards(subject: Subject) -> str:
  """Compares results of split arguments with results of whole ones, in another process."""
  rule = subject.core.sharding
  if rule is None or rule == "gather":
    raise NotAsked("no sharding rule")
  subject.compared()
  try:
    request = travel.dumps(
      subject.core.label, (subject.function, subject.args, dict(subject.kwargs))
    )
  except GateDefinitionError as error:
    raise NotAsked(f"its process needs a pickle: {error}") from error
  with tempfile.TemporaryDirectory(prefix="callgate-verify-") as folder:
    path = pathlib.Path(folder)
    (path / "request").write_bytes(request)
    answer = _run(path)
  if (reason := answer.get("skipped")) is not None:
    raise NotAsked(reason)
  if (fault := answer.get("fault")) is not None:
    raise Fault(fault)
  return answer["message"]


def _run(folder: pathlib.Path) -> dict[str, str]:
  """Returns the answer of `shards.py` in a process with simulated devices."""
  env = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES),
    "JAX_ENABLE_X64": str(int(jnp.result_type(float).itemsize == 8)),
  }
  code = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
  code += "from callgate._verify import shards; shards.answer(sys.argv[1])"
  command = [sys.executable, "-c", code, str(folder), json.dumps(sys.path)]
  with subprocess.Popen(
    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
  ) as process:
    _running.add(process)
    try:
      printed, _ = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
      process.kill()
      raise Fault(f"a process with {DEVICES} devices gave no answer in {_LONGEST:g} s") from None
    finally:
      process.kill()
      _running.discard(process)
  try:
    return json.loads((folder / "answer").read_text(encoding="utf-8"))
  except FileNotFoundError:
    last = printed.decode(errors="replace").strip()[-2000:]
    status = process.returncode
    raise Fault(f"a process with {DEVICES} devices ended with status {status}: {last}") from None


def end_processes() -> None:
  """Ends the processes that still run."""
  for process in list(_running):
    process.kill()
