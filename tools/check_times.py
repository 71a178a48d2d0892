# SPDX-License-Identifier: Apache-2.0
"""Processor time of the check: measures commands, prints the table of a run, compares two tables.

    python tools/check_times.py run KIND NAME COMMAND...   # runs it, and notes its times
    python tools/check_times.py table [--write FILE]       # the table of what was noted
    python tools/check_times.py compare BEFORE AFTER       # two files of `table --write`

`run` does no more than run the command unless CALLGATE_CHECK_TIMES names a file, to which it adds a
line of JSON. KIND is "step" (a part of .ci/run; steps add up to the whole) or a part of a step:
"build", "install", "tests". Processor time is user and system time of the command and of its
descendants; the clock measures the machine and its other work. `table` reads that file, and
the property `processor_seconds` of each test in the JUnit files build/*-tests*.xml.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEAREST = 100  # tests that the table names
_PR_SET_CHILD_SUBREAPER = 36

Table = dict[str, Any]


def run(kind: str, name: str, command: list[str]) -> int:
  """Runs a command, adds its times to the file of CALLGATE_CHECK_TIMES; returns its exit status."""
  notes = os.environ.get("CALLGATE_CHECK_TIMES")
  if not notes:
    os.execvp(command[0], command)
  with contextlib.suppress(
    AttributeError, OSError
  ):  # Linux: orphans become this process's children
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  begin = time.monotonic()
  process = subprocess.Popen(command)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
  status = process.wait()
  _reap_orphans()
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  row = {
    "kind": kind,
    "name": name,
    "clock": round(time.monotonic() - begin, 1),
    "user": round(used.ru_utime, 1),
    "system": round(used.ru_stime, 1),
    "status": status,
  }
  with open(notes, "a", encoding="utf-8") as file:
    file.write(json.dumps(row) + "\n")
  return status if status >= 0 else 128 - status


def _reap_orphans(seconds: float = 60.0) -> None:
  """Waits for descendants whose parents have ended, so that their times count."""
  end = time.monotonic() + seconds
  with contextlib.suppress(ChildProcessError):
    while time.monotonic() < end:
      if os.waitpid(-1, os.WNOHANG)[0] == 0:
        time.sleep(0.02)


def tests_of(file: Path) -> list[tuple[str, float]]:
  """The tests of a JUnit file that ran, and the processor seconds of each."""
  found: list[tuple[str, float]] = []
  for case in ElementTree.parse(file).iter("testcase"):
    for entry in case.iter("property"):
      if entry.get("name") == "processor_seconds":
        module = case.get("classname", "").removeprefix("tests.python.").replace(".", "/")
        found.append((f"{module}::{case.get('name')}", float(entry.get("value", 0))))
  return found


def table_of(notes: Iterable[str], reports: Iterable[Path]) -> Table:
  """The table of a run: its steps, what they spent, its folders of tests, its dearest tests."""
  rows = [json.loads(line) for line in notes if line.strip()]
  folders: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
  tests: list[tuple[str, float]] = []
  for report in sorted(reports):
    for name, seconds in tests_of(report):
      folder = folders[f"{report.stem}: {name.partition('::')[0].rpartition('/')[0]}"]
      folder[0] += 1
      folder[1] += seconds
      tests.append((f"{report.stem}: {name}", seconds))
  dearest = sorted(tests, key=lambda test: -test[1])[:DEAREST]
  return {
    "rows": rows,
    "folders": {name: [count, round(seconds, 1)] for name, (count, seconds) in folders.items()},
    "tests": [[name, round(seconds, 1)] for name, seconds in dearest],
  }


def text_of(table: Table) -> str:
  """The table as text, in seconds."""
  lines: list[str] = []
  kinds = dict.fromkeys(row["kind"] for row in table["rows"])
  for kind in sorted(kinds, key=lambda kind: kind != "step"):
    rows = [row for row in table["rows"] if row["kind"] == kind]
    lines += ["", f"processor s   user  system  clock  {kind}"]
    for row in rows:
      total = row["user"] + row["system"]
      lines.append(
        f"{total:11.1f} {row['user']:6.1f} {row['system']:7.1f} {row['clock']:6.1f}  {row['name']}"
      )
    if kind == "step":
      total = sum(row["user"] + row["system"] for row in rows)
      lines.append(f"{total:11.1f}  the whole check ({total / 60:.1f} minutes)")
  lines += ["", "processor s  tests  folder"]
  for name, (count, seconds) in sorted(table["folders"].items(), key=lambda item: -item[1][1]):
    lines.append(f"{seconds:11.1f} {count:6d}  {name}")
  count = sum(count for count, _ in table["folders"].values())
  seconds = sum(seconds for _, seconds in table["folders"].values())
  lines.append(f"{seconds:11.1f} {count:6d}  all tests")
  lines += ["", f"processor s  the {len(table['tests'])} dearest tests"]
  lines += [f"{seconds:11.1f}  {name}" for name, seconds in table["tests"]]
  return "\n".join(lines)


def comparison(before: Table, after: Table) -> str:
  """Steps, builds and folders of two tables side by side, the greatest change first."""

  def totals(table: Table) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in table["rows"]:
      seconds = row["user"] + row["system"]
      found[f"{row['kind']}: {row['name']}"] += seconds
      if row["kind"] == "step":
        found["the whole check"] += seconds
    for name, (count, seconds) in table["folders"].items():
      found[f"folder: {name} "] += seconds
      found["all tests"] += seconds
      found["number of tests"] += count
    return found

  first, second = totals(before), totals(after)
  lines = ["     before       after      change"]
  for name in sorted({*first, *second}, key=lambda name: -abs(second[name] - first[name])):
    lines.append(
      f"{first[name]:11.1f} {second[name]:11.1f} {second[name] - first[name]:+11.1f}  {name}"
    )
  return "\n".join(lines)


def main() -> int:
  """The command line."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  commands = parser.add_subparsers(dest="command", required=True)
  runs = commands.add_parser("run", help="run a command and note its times")
  runs.add_argument("kind")
  runs.add_argument("name")
  runs.add_argument("words", nargs=argparse.REMAINDER)
  prints = commands.add_parser("table", help="print the table of the noted times")
  prints.add_argument("--write", type=Path, help="write the table here as JSON, too")
  compares = commands.add_parser("compare", help="compare two tables")
  compares.add_argument("before", type=Path)
  compares.add_argument("after", type=Path)
  chosen = parser.parse_args()
  if chosen.command == "run":
    return run(chosen.kind, chosen.name, chosen.words)
  if chosen.command == "compare":
    tables = [json.loads(path.read_text()) for path in (chosen.before, chosen.after)]
    print(comparison(*tables))
    return 0
  notes = Path(os.environ.get("CALLGATE_CHECK_TIMES") or ROOT / "build" / "check-times.jsonl")
  lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
  table = table_of(lines, (ROOT / "build").glob("*-tests*.xml"))
  if chosen.write:
    chosen.write.write_text(json.dumps(table, indent=1) + "\n")
  print(text_of(table))
  return 0


if __name__ == "__main__":
  sys.exit(main())
