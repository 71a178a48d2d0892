# SPDX-License-Identifier: Apache-2.0
"""Type checkers know a gate's parameters, and what it returns."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import callgate

USES = Path(__file__).resolve().parents[1] / "support" / "typed_uses.py"
PACKAGE = Path(callgate.__file__).parents[1]  # the folder that callgate is imported from


def marked(checker: str) -> list[int]:
  lines = enumerate(USES.read_text().splitlines(), 1)
  return [n for n, line in lines if re.search(rf"# error(: {checker})?(  # noqa.*)?$", line)]


def run(*command: str, cwd: Path) -> str:
  done = subprocess.run(
    [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, timeout=900
  )
  assert done.returncode in (0, 1), done.stdout + done.stderr
  return done.stdout


def reported_by_pyright(folder: Path) -> dict[int, str]:
  shutil.copy(USES, folder)
  config = {"include": [USES.name], "extraPaths": [str(PACKAGE)], "pythonVersion": "3.11"}
  (folder / "pyrightconfig.json").write_text(json.dumps(config))
  found = run("pyright", "--outputjson", "--pythonpath", sys.executable, cwd=folder)
  return {
    one["range"]["start"]["line"] + 1: one["message"]
    for one in json.loads(found)["generalDiagnostics"]
    if one["severity"] == "error"
  }


def reported_by_mypy(folder: Path) -> dict[int, str]:
  path = "" if PACKAGE.name == "site-packages" else f"mypy_path = {PACKAGE}\n"
  (folder / "mypy.ini").write_text(f"[mypy]\n{path}[mypy-callgate.*]\nfollow_imports = silent\n")
  found = run("mypy", "--config-file", "mypy.ini", "--cache-dir", ".", str(USES), cwd=folder)
  return {int(n): text for n, text in re.findall(r"\.py:(\d+): error: (.*)", found)}


@pytest.mark.limit(400)
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_type_checkers_find_the_wrong_uses_and_no_others(checker: str, tmp_path: Path) -> None:
  for needed in (checker, "torch"):
    if importlib.util.find_spec(needed) is None:
      pytest.skip(f"{needed} is not installed: make lint-types installs it")
  found = {"pyright": reported_by_pyright, "mypy": reported_by_mypy}[checker](tmp_path)
  assert found.keys() == set(marked(checker)), found
