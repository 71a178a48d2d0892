# SPDX-License-Identifier: Apache-2.0
"""The messages of JAX and XLA in docs/messages.md: each is raised, and its remedy works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from texts import cells_of_jax

import callgate as cg

_X = np.arange(3, dtype=np.float32)
_GATES = """
pure = cg.gate(lambda x: x + 1, out=lambda x: x, name="jax messages: pure")
io = cg.gate(lambda x: x + 1, out=lambda x: x, name="jax messages: io", effect="io")
"""
_LOAD = """
import jax, numpy as np, sys
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
print(exported.call(np.arange(3, dtype=np.float32)).tolist())
"""


def loaded(program: Path, before: str = "") -> tuple[int, str]:
  command = [sys.executable, "-c", before + _LOAD, str(program)]
  run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
  return run.returncode, run.stdout + run.stderr


def said(start: str) -> str:
  (text,) = [cell.strip("`") for cell in cells_of_jax() if cell.startswith(f"`{start}")]
  return text


@pytest.mark.limit(120)  # three processes
@pytest.mark.parametrize(("name", "start"), [("pure", "No FFI"), ("io", "cannot deserialize")])
def test_a_process_without_callgate_raises_it(name: str, start: str, tmp_path: Path) -> None:
  found: dict[str, cg.Gate] = {}
  exec(_GATES, {"cg": cg}, found)
  exported = jax.export.export(jax.jit(found[name]), disabled_checks=cg.export_checks())(_X)
  path = tmp_path / name
  path.write_bytes(exported.serialize())
  code, text = loaded(path)
  assert code
  assert said(start) in text
  assert loaded(path, f"import callgate as cg\n{_GATES}") == (0, "[1.0, 2.0, 3.0]\n")


def test_an_export_without_callgate_s_checks_raises_it() -> None:
  program = jax.jit(cg.gate(lambda x: x, out=lambda x: x, name="jax messages: export"))
  with pytest.raises(ValueError, match=said("Cannot serialize")):
    jax.export.export(program)(_X)
  jax.export.export(program, disabled_checks=cg.export_checks())(_X)
  assert len(cells_of_jax()) == 3
