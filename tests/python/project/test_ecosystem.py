# SPDX-License-Identifier: Apache-2.0
"""`tools/ecosystem.py`: the comparison of other libraries' programs without and with install()."""

from __future__ import annotations

import tomllib
from typing import Any

import project_tools
import pytest
from interpreters import run

TOOL = project_tools.TOOLS / "ecosystem.py"


@pytest.fixture
def tool() -> Any:
  return project_tools.load("ecosystem")


def test_a_program_of_equinox_is_the_same_with_install() -> None:
  pytest.importorskip("equinox", reason="equinox is not installed")
  done = run(TOOL, "equinox")
  assert done.returncode == 0, done.stdout + done.stderr
  row = done.stdout.splitlines()[1].split()
  assert row[0] == "equinox"
  assert int(row[2]) > 0
  assert row[-1] == "same"


def test_programs_that_differ_fail_or_come_nowhere_are_told(tool: Any, monkeypatch: Any) -> None:
  monkeypatch.setattr(tool.importlib.metadata, "version", lambda name: "1.0")
  found: dict[str, Any] = {}
  monkeypatch.setattr(tool, "_run", lambda library, how: found[how])

  def verdict(plain: Any, installed: Any) -> str:
    found.update(plain=plain, installed=installed)
    return tool.compared("any")["verdict"]

  one = {"results": {"x": [1.0, 2.0], "t": "a"}, "calls": 3, "own": False}
  assert verdict(one, one) == "same"
  other = {**one, "results": {"x": [1.0, 2.5], "t": "b"}}
  assert verdict(one, other) == "differs: t, x"
  assert verdict(one, {**one, "results": {"x": [1.0], "t": "a"}}) == "differs: x"
  assert verdict(one, {**one, "calls": 0}) == "same, but nothing came to callgate"
  assert verdict(one, {**one, "calls": 0, "own": True}) == "same, by callbacks of its own"
  assert verdict(one, {"failure": "installed: gone"}) == "failed: installed: gone"


def test_every_library_of_the_list_has_a_program_and_a_requirement(tool: Any) -> None:
  listed = tomllib.loads((TOOL.parents[1] / "pyproject.toml").read_text())
  needed = listed["dependency-groups"]["ecosystem"]
  names = {one.split("[")[0].split(">")[0].replace("-", "_") for one in needed}
  assert set(tool.known()) <= names
  assert len(tool.known()) == 12


def test_an_unknown_library_is_refused() -> None:
  done = run(TOOL, "nolib")
  assert done.returncode == 2
  assert "expected some of blackjax" in done.stderr
