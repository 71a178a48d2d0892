# SPDX-License-Identifier: Apache-2.0
"""The steps of docs/contributing_parts.md, in a copy of the tree, give a part that works."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from interpreters import FOLDER, Module, succeed
from project_tools import load

import callgate as cg

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "contributing_parts.md").read_text(encoding="utf-8")
FILES = re.findall(r"^<!-- file: \./(\S+) -->\n```python\n(.*?)^```", PAGE, re.M | re.DOTALL)
CHANGES = re.findall(r"^--- (\S+)\n(.*?)(?=^---|^```)", PAGE, re.M | re.DOTALL)
COPIED = [
  *("python", "docs/design.md", "pyproject.toml", "tests/check_layers.py"),
  *("tests/python/conftest.py", "tests/python/contract", "tests/python/support"),
]


def changed(text: str, change: str) -> str:
  """A file's text with the added lines around the one line that the page shows of it."""
  lines = change.splitlines()
  (place,) = (i for i, line in enumerate(lines) if line.startswith(" "))
  begins, dots, _ = lines[place][1:].partition("...")
  found = [x for x in text.splitlines() if x == begins or (dots and x.startswith(begins))]
  assert len(found) == 1, (
    f"contributing_parts.md shows {lines[place]!r}, which is there {len(found)} times"
  )
  lines[place] = "+" + found[0]
  return text.replace(found[0], "\n".join(line.removeprefix("+") for line in lines), 1)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The tree after the page's steps."""
  root = tmp_path_factory.mktemp("tree")
  for name in COPIED:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, root / name)
  for built in Path(cg.__file__).parent.iterdir():  # the module, which is installed alone
    if not (target := root / "python" / "callgate" / built.name).exists():
      target.symlink_to(built.resolve())
  for name, text in FILES:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")
  for name, changes in CHANGES:
    text = (root / name).read_text(encoding="utf-8")
    for change in changes.split("@@\n"):
      text = changed(text, change)
    (root / name).write_text(text, encoding="utf-8")
  return root


def test_the_part_breaks_no_layer_and_says_what_guards_its_state(tree: Path) -> None:
  succeed(tree / "tests" / "check_layers.py", tree)
  assert load("module_state").read(tree)[1] == []


def test_the_parts_own_test_and_its_row_in_the_contract_pass(tree: Path) -> None:
  own, contract = tree / "tests/python/counter", tree / "tests/python/contract"
  rows = (contract / f"test_{name}.py" for name in ("values", "processes", "next_process"))
  said = succeed(
    Module("pytest"), "-q", "-p", "no:cacheprovider", "-k", "counter", own, *rows,
    cwd=tree, environment={"PYTHONPATH": f"{tree / 'python'}:{FOLDER}"}, timeout=110,
  )  # fmt: skip
  assert re.search(r"^\d\d passed", said, re.MULTILINE), said
