# SPDX-License-Identifier: Apache-2.0
"""What `import callgate` loads, and the names that come when they are asked for."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from interpreters import output_of

import callgate as cg


def test_what_comes_later_is_what_type_checkers_see() -> None:
  tree = ast.parse(Path(inspect.getfile(cg)).read_text())
  blocks = [
    n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
  ]
  seen = {
    alias.name: imported.module
    for block in blocks
    for imported in block.body
    if isinstance(imported, ast.ImportFrom)
    for alias in imported.names
  }
  assert seen == {"executors": "callgate", "sinks": "callgate", **cg._LATER}


def test_import_leaves_out_what_most_programs_have_no_need_of() -> None:
  code = """
    import sys
    import jax, numpy
    import callgate
    parts = ["_envs", "_kernel", "_torch", "_stream", "_replay", "_watch", "_serve", "_build"]
    parts.append("sinks")
    print([name for name in sys.modules if name.startswith(tuple(f"callgate.{p}" for p in parts))])
  """
  assert output_of(code).strip() == "[]"


def test_public_names_say_that_they_are_callgates_whatever_came_first() -> None:
  code = """
    import callgate as cg
    cg.cpp
    from callgate._kernel.kernel import Kernel
    print(Kernel.__module__, cg.Kernel is Kernel)
    values = {name: getattr(cg, name) for name in cg.__all__}
    print([n for n, v in values.items() if getattr(v, "__module__", "").startswith("callgate.")])
  """
  assert output_of(code).split("\n")[:2] == ["callgate True", "[]"]


def test_another_name_is_an_error() -> None:
  with pytest.raises(AttributeError, match="module 'callgate' has no attribute 'gates'"):
    cg.gates  # noqa: B018
  assert {"cpp", "gate", "sinks"} <= set(dir(cg))


def test_a_second_import_is_an_error_and_the_first_goes_on() -> None:
  code = """
    import importlib, sys
    import jax
    import callgate as cg

    def outcome(act):
      try:
        act()
      except ImportError as error:
        return str(error).partition(":")[0]

    def second():
      for name in [name for name in sys.modules if name.startswith("callgate")]:
        del sys.modules[name]
      importlib.import_module("callgate")

    print(outcome(lambda: importlib.reload(cg)))
    print(outcome(second))
    print(jax.jit(cg.gate(lambda x: x, out=lambda x: x))(1.0))
  """
  assert output_of(code).split("\n")[:3] == [
    "importlib.reload(callgate)",
    "callgate is loaded in this process already",
    "1.0",
  ]
