# SPDX-License-Identifier: Apache-2.0
"""tools/check_times.py, which says where the check's processor time goes, and stray_output.py."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import stray_output
from interpreters import FOLDER

TOOL = pathlib.Path(__file__).parents[3] / "tools" / "check_times.py"
BURN = "sum(range(4_000_000))"  # some tens of milliseconds


def tool(
  *words: str, notes: pathlib.Path | None, program: pathlib.Path = TOOL
) -> subprocess.CompletedProcess[str]:
  environment = {**os.environ, "CALLGATE_CHECK_TIMES": str(notes or "")}
  command = [sys.executable, str(program), *words]
  return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def rows(notes: pathlib.Path) -> list[dict[str, object]]:
  return [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]


def test_a_command_keeps_its_outputs_and_status_and_leaves_its_times(
  tmp_path: pathlib.Path,
) -> None:
  notes = tmp_path / "times.jsonl"
  ended = tool("run", "step", "a name", "sh", "-c", "echo out; exit 5", notes=notes)
  assert (ended.returncode, ended.stdout) == (5, "out\n")
  (row,) = rows(notes)
  assert (row["kind"], row["name"], row["status"]) == ("step", "a name", 5)
  ended = tool("run", "step", "a name", "sh", "-c", "echo out; exit 5", notes=None)
  assert (ended.returncode, ended.stdout) == (5, "out\n")
  assert len(rows(notes)) == 1


def test_descendants_count_even_if_their_parent_ends_first(tmp_path: pathlib.Path) -> None:
  notes = tmp_path / "times.jsonl"
  burning = f"{sys.executable} -c 'for _ in range(8): {BURN}' >/dev/null 2>&1"
  tool("run", "step", "waited for", "sh", "-c", burning, notes=notes)
  tool("run", "step", "orphan", "sh", "-c", f"({burning}) & exit 0", notes=notes)
  waited_for, orphan = (float(str(row["user"])) for row in rows(notes))
  assert waited_for > 0
  assert orphan > 0


def report(path: pathlib.Path, seconds: dict[str, float]) -> None:
  case = (
    '<testcase classname="tests.python.{}" name="{}"><properties>'
    '<property name="processor_seconds" value="{}"/></properties></testcase>'
  )
  cases = "".join(case.format(*name.rsplit(".", 1), value) for name, value in seconds.items())
  path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")


def test_a_table_adds_up_steps_and_folders_and_two_are_compared(tmp_path: pathlib.Path) -> None:
  tables: list[str] = []
  for run, (step, slow) in enumerate([(60.0, 8.0), (30.0, 2.0)]):
    root = tmp_path / str(run)
    (root / "build").mkdir(parents=True)
    (root / "tools").mkdir()
    copy = root / "tools" / "check_times.py"
    copy.write_text(TOOL.read_text())
    notes = root / "build" / "check-times.jsonl"
    row = {"name": "make test", "clock": 40, "user": step, "system": 3.0, "status": 0}
    notes.write_text(json.dumps({"kind": "step", **row}) + "\n")
    found = {
      "gate.test_a.test_x": slow,
      "gate.test_a.test_y[a/b::c]": 1.0,
      "kernel.c.test_b.test_z": 0.5,
    }
    report(root / "build" / "python-tests.xml", found)
    written = root / "table.json"
    text = tool("table", "--write", str(written), notes=notes, program=copy).stdout
    assert f"{step + 3:.1f}  the whole check" in text
    assert f"{slow + 1:.1f}      2  python-tests: gate" in text
    assert "0.5      1  python-tests: kernel/c" in text
    assert text.index("gate/test_a::test_x") < text.index("gate/test_a::test_y[a/b::c]")
    tables.append(str(written))
  compared = tool("compare", *tables, notes=None).stdout.splitlines()
  assert [line.split() for line in compared if "the whole check" in line] == [
    ["63.0", "33.0", "-30.0", "the", "whole", "check"]
  ]
  assert [line.split()[:3] for line in compared if "folder: python-tests: gate" in line] == [
    ["9.0", "3.0", "-6.0"]
  ]


def test_a_run_that_passes_and_prints_an_ignored_exception_fails() -> None:
  program = FOLDER / "stray_output.py"
  raises = "class A:\n  def __del__(self): 1 / 0\nA()\nprint('end')"
  run = lambda source: subprocess.run(
    [sys.executable, str(program), sys.executable, "-c", source],
    capture_output=True,
    text=True,
    check=False,
  )
  ended = run(raises)
  assert ended.returncode == 1
  assert "expected a run that prints no exception" in ended.stdout
  assert "ZeroDivisionError" in ended.stderr
  assert run("print('end')").returncode == 0
  assert run(f"{raises}\nraise SystemExit(7)").returncode == 7


def test_known_lines_have_a_reason() -> None:
  assert all(len(reason) > 20 for reason in stray_output.KNOWN.values())
