# SPDX-License-Identifier: Apache-2.0
"""Runs programs of other libraries without and with `callgate.install()`, and compares.

    python tools/ecosystem.py [--json FILE] [LIBRARY ...]

Programs are tests/ecosystem/*_program.py: `run()` returns results by name. Each runs in processes
of its own, once on JAX's callbacks and once on callgate's. The table shows the library's version,
how many calls came to callgate (callbacks that wait, and records of those that don't), and whether
the results are the same. A library that is not installed is a row that says so. Exit status: 1
where results differ, a program fails or none of its calls came to callgate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "ecosystem"
SECONDS = 300
SAME, SAME_BY_ITS_OWN, NOT_INSTALLED = "same", "same, by callbacks of its own", "not installed"


def main() -> int:
  """Runs what the command line asks for."""
  if sys.argv[1:2] == ["--run"]:
    return _run_here(sys.argv[2], sys.argv[3] == "installed", Path(sys.argv[4]))
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(known()))
  parser.add_argument("--json", type=Path)
  arguments = parser.parse_args()
  if unknown := set(arguments.libraries) - set(known()):
    parser.error(f"expected some of {', '.join(known())}, got {', '.join(sorted(unknown))}")
  rows = [compared(library) for library in arguments.libraries or known()]
  print(table(rows))
  if arguments.json:
    arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
  return int(any(row["verdict"] not in (SAME, SAME_BY_ITS_OWN, NOT_INSTALLED) for row in rows))


def known() -> list[str]:
  """The libraries that there are programs of."""
  return sorted(path.name.removesuffix("_program.py") for path in PROGRAMS.glob("*_program.py"))


def compared(library: str) -> dict[str, Any]:
  """A row of the table: the program of a library, run twice."""
  row: dict[str, Any] = {"library": library, "version": "", "calls": 0, "seconds": ["", ""]}
  try:
    row["version"] = importlib.metadata.version(library.replace("_", "-"))
  except importlib.metadata.PackageNotFoundError:
    return {**row, "verdict": NOT_INSTALLED}
  plain, installed = (_run(library, how) for how in ("plain", "installed"))
  row["seconds"] = [plain.get("seconds", ""), installed.get("seconds", "")]
  row["calls"] = installed.get("calls", 0)
  if failed := [one["failure"] for one in (plain, installed) if "failure" in one]:
    return {**row, "verdict": f"failed: {failed[0]}"}
  if different := differences(plain["results"], installed["results"]):
    return {**row, "verdict": f"differs: {', '.join(different)}"}
  if not row["calls"] and not installed["own"]:
    return {**row, "verdict": "same, but nothing came to callgate"}
  return {**row, "verdict": SAME if row["calls"] else SAME_BY_ITS_OWN}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
  """Names of results that are not the same, up to rounding."""
  import numpy as np

  def same(a: Any, b: Any) -> bool:
    if isinstance(a, (str, bool)):
      return a == b
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-5, atol=1e-6))

  return sorted(
    name for name in one.keys() | other.keys()
    if name not in one or name not in other or not same(one[name], other[name])
  )  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
  """The rows in columns."""
  head = ["library", "version", "calls", "plain, s", "installed, s", "results"]
  lines = [head] + [
    [row["library"], row["version"], str(row["calls"]), *map(str, row["seconds"]), row["verdict"]]
    for row in rows
  ]
  widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
  return "\n".join(
    "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for line in lines
  )


def _run(library: str, how: str) -> dict[str, Any]:
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder, "results.json")
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    command = [sys.executable, __file__, "--run", library, how, str(out)]
    try:
      done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS,
        check=False,
      )  # fmt: skip
    except subprocess.TimeoutExpired:
      return {"failure": f"{how}: took more than {SECONDS} s"}
    if done.returncode or not out.exists():
      last = (done.stderr.strip().splitlines() or ["no message"])[-1]
      return {"failure": f"{how}: exit code {done.returncode}: {last[:200]}"}
    return json.loads(out.read_text(encoding="utf-8"))


def _run_here(library: str, installed: bool, out: Path) -> int:
  """In a process of its own: runs a program, and writes what it returned."""
  import numpy as np

  import callgate

  if installed:
    callgate.install()
  sys.path.insert(0, str(PROGRAMS))
  program = importlib.import_module(f"{library}_program")
  traced = out.with_name("trace.json")
  with callgate.trace(traced):
    start = time.perf_counter()
    results = program.run()
    seconds = round(time.perf_counter() - start, 2)
    callgate.barrier()
  plain = {
    name: value if isinstance(value, (str, bool)) else np.asarray(value).tolist()
    for name, value in results.items()
  }
  sent = sum(one["sent"] for one in callgate._callgate.channel_stats().values())
  written = {
    "results": plain,
    "seconds": seconds,
    "calls": calls(traced) + sent,
    "own": getattr(program, "CALLBACKS_OF_ITS_OWN", False),
  }
  out.write_text(json.dumps(written), encoding="utf-8")
  return 0


def calls(trace: Path) -> int:
  """How many calls of gates a trace holds."""
  events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
  return sum(event.get("ph") == "X" for event in events)


if __name__ == "__main__":
  sys.exit(main())
