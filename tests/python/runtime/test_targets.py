# SPDX-License-Identifier: Apache-2.0
"""A message names the file of its call, whatever other files are called."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._runtime import targets

SOURCE = """
import callgate as cg

def negate(gate, x):
  return gate(x)
"""


def module_of(folder: pathlib.Path) -> Any:
  folder.mkdir()
  (folder / "model.py").write_text(SOURCE)
  spec = importlib.util.spec_from_file_location(folder.name, folder / "model.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_an_error_names_its_own_file_among_others_of_that_name(tmp_path: pathlib.Path) -> None:
  def fail(x: Any) -> Any:
    raise ValueError("no")

  modules = [module_of(tmp_path / name) for name in ("one", "two", "three")]
  gates = [cg.gate(fail, out=lambda x: x, effect="io") for _ in modules]
  programs = [
    jax.jit(lambda x, module=module, gate=gate: module.negate(gate, x))
    for module, gate in zip(modules, gates, strict=True)
  ]
  for program in programs:  # all are traced before the first is asked
    program.lower(np.float32(1))
  for program, module in zip(programs, modules, strict=True):
    with pytest.raises(ValueError, match="no") as raised, cg.errors():
      jax.block_until_ready(program(np.float32(1)))
    assert f'called at File "{module.__file__}", line 5, in negate' in raised.value.__notes__[0]


def test_a_program_holds_the_same_of_a_call_in_any_folder() -> None:
  sites = [(f"/{folder}/src/unique_name.py", 3, "f") for folder in ("home", "other")]
  held = [targets.remember_site(site) for site in sites]
  assert held == ["unique_name.py:3 (f)", "src/unique_name.py:3 (f)"]
  assert [targets.remember_site(site) for site in sites] == held
  lines = [f'File "{file}", line 3, in f' for file, _, _ in sites]
  assert list(map(targets.traceback_line, held)) == lines


def test_a_bounded_number_of_lines_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(targets, "_sites", collections.OrderedDict())
  monkeypatch.setattr(targets, "_MOST_SITES", 5)
  for number in range(8):
    targets.remember_site((f"/cell-{number}.py", 1, "<module>"))
  assert [key.partition(".")[0] for key in targets._sites] == [f"cell-{n}" for n in range(3, 8)]
  assert targets.traceback_line("cell-0.py:1 (<module>)") == "cell-0.py:1 (<module>)"
