# SPDX-License-Identifier: Apache-2.0
"""The layer check of tests/check_layers.py, on this tree and on trees with planted violations."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECK = ROOT / "tests" / "check_layers.py"


LAYERS = runpy.run_path(str(CHECK))["PYTHON_LAYERS"]


def run_check(root: Path) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, str(CHECK), str(root)], capture_output=True, text=True, check=False
  )


def plant(root: Path, name: str, text: str) -> None:
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def test_this_tree_has_no_violation():
  result = run_check(ROOT)
  assert result.returncode == 0, result.stdout + result.stderr


ALLOWED = {
  "src/core/a.cc": '#include "core/a.h"\n#include "a.h"\n#include <vector>\n',
  "src/channel/ring.cc": '#include "core/a.h"\n#include "channel/ring.h"\n',
  "src/cuda/driver.cc": '#include "core/a.h"\n#include <dlfcn.h>\n',
  "src/xla/tap.cc": '#include "channel/ring.h"\n#include "xla/ffi/api/ffi.h"\n',
  "src/bindings/m.cc": "#include <Python.h>\n#include <nanobind/nanobind.h>\n",
  "src/bindings/python/gil.h": "struct GilScope { int s = PyGILState_Ensure(); };\n",
  "src/bindings/g.cc": (
    "// not by nb::gil_scoped_release\n/* nor\n gil_scoped_acquire */ int f;\n"
  ),
  "src/bindings/n.cc": '#include <numpy/arrayobject.h>\n#include "xla/tap.h"\n',
  "include/callgate/kernel.h": '#include "callgate/types.h"\n#include <span>\n',
  "tests/cpp/test_tap.cc": (
    '#include "xla/tap.h"\n#include <gtest/gtest.h>\nusing testing::Eq;\nEq used;\n'
  ),
  "python/callgate/_jax/__init__.py": '"""Private names."""\n',
  "python/callgate/_jax/tracing.py": "import jax._src.core\nfrom jaxlib import _jax\n",
  "python/callgate/_core/__init__.py": '"""Values."""\n',
  "python/callgate/_gate/__init__.py": '"""Gates."""\n',
  "python/callgate/_kernel/kernel.py": "",
  "python/callgate/_tap/__init__.py": '"""Taps."""\n',
  "python/callgate/_tap/tap.py": "",
  "python/callgate/_core/log.py": (
    'import logging\n\nlog = logging.getLogger("jax._src.callback")\n'
  ),
  "python/callgate/_gate/gate.py": '"""Says jax._src in words."""\nimport jax  # not jax._src\n',
  "src/core/a.h": "",
  "tools/requirements.py": "",
  "virtual_gpu/ptx/ptx.h": "#include <vector>\n",
  "virtual_gpu/ptx/grid.cc": '#include "ptx.h"\n#include "ptx/ptx.h"\n',
  "virtual_gpu/driver/start.cc": '#include "../ptx/ptx.h"\n#include <gtest/gtest.h>\n',
  "virtual_gpu/tests/test_a.py": "import os, jax.numpy, pytest\nfrom test_b import f\n",
  "virtual_gpu/tests/test_b.py": "def f(): ...\n",
  "virtual_gpu/build/site/a.py": "import callgate\n",
}


def test_includes_that_the_design_allows_pass(tmp_path):
  for name, text in ALLOWED.items():
    plant(tmp_path, name, text)
  result = run_check(tmp_path)
  assert result.returncode == 0, result.stdout


VIOLATIONS = [
  ("src/core/a.cc", '#include "channel/ring.h"'),
  ("src/core/a.cc", '#include "xla/gate.h"'),
  ("src/core/a.cc", "#  include <xla/ffi/api/ffi.h>"),
  ("src/core/a.h", "#include <Python.h>"),
  ("src/core/a.cc", '#include "../bindings/gil.h"'),
  ("src/channel/ring.cc", '#include "cuda/driver.h"'),
  ("src/channel/sinks/jsonl.cc", '#include "xla/tap.h"'),
  ("src/cuda/driver.cc", '#include "channel/ring.h"'),
  ("src/cuda/driver.cc", '#include "xla/ffi/api/c_api.h"'),
  ("src/xla/gate.cc", '#include "bindings/gil.h"'),
  ("src/xla/gate.h", "#include <nanobind/nanobind.h>"),
  ("src/xla/gate.cc", "#include <numpy/arrayobject.h>"),
  ("src/strange/a.cc", "int x;"),
  ("include/callgate/kernel.h", '#include "core/dtype.h"'),
  ("include/callgate/kernel.h", '#include "xla/ffi/api/ffi.h"'),
  ("src/bindings/m.cc", "void f() { /* waits */ nb::gil_scoped_release unlocked; }"),
  ("src/bindings/m.cc", 'm.def("f", f, nb::call_guard<nb::gil_scoped_release>());'),
  ("src/bindings/m.h", "inline void f() { nanobind::gil_scoped_acquire locked; }"),
  ("src/bindings/m.cc", "void f() { PyThreadState* state = PyEval_SaveThread(); }"),
  ("src/bindings/m.cc", "void f() { Py_BEGIN_ALLOW_THREADS g(); }"),
  ("tests/cpp/test_gate.cc", '#include "bindings/gil.h"'),
  ("tests/cpp/test_gate.cc", "#include <Python.h>"),
  ("tests/cpp/test_gate.cc", "using ::testing::HasSubstr;  // HasSubstr"),
  ("python/callgate/_gate/gate.py", "import jax._src.core"),
  ("python/callgate/_gate/gate.py", "from jax._src import core"),
  ("python/callgate/_gate/gate.py", "from jax import _src"),
  ("python/callgate/_gate/gate.py", "import jax; core = jax._src.core"),
  ("python/callgate/sinks/plot.py", "from jaxlib import _jax"),
  ("python/callgate/_gate/gate.py", "def f():\n  from jaxlib._jax import Client"),
  (
    "python/callgate/_gate/gate.py",
    'import importlib; m = importlib.import_module("jax._src.core")',
  ),
  ("python/callgate/_gate/gate.py", 'import sys; core = sys.modules["jax._src.core"]'),
  ("python/callgate/_gate/gate.py", 'import sys; core = sys.modules.get("jax._src.core")'),
  ("python/callgate/compat/_jax.py", "import jax._src"),
  ("python/callgate/_core/a.py", "from callgate._gate import gate"),
  ("python/callgate/a.py", "from callgate._gate import gate"),
  ("python/callgate/_core/a.py", "def f():\n  from callgate._gate.gate import g"),
  ("python/callgate/_gate/a.py", "from callgate._kernel import kernel"),
  ("python/callgate/_gate/a.py", "import callgate._tap.tap"),
  ("python/callgate/_gate/a.py", 'import importlib; x = importlib.import_module("callgate._tap")'),
  ("python/callgate/_gate/a.py", "print()"),
  ("python/callgate/_gate/a.py", "import sys; sys.excepthook = None"),
  ("python/callgate/_gate/a.py", "for x in (): pass"),
  ("virtual_gpu/driver/a.cc", '#include "../../src/core/a.h"'),
  ("virtual_gpu/driver/a.cc", '#include "core/a.h"'),
  ("virtual_gpu/ptx/a.h", "#include <callgate/kernel.h>"),
  ("virtual_gpu/ptx/a.cc", 'const char* output = getenv("CALLGATE_NVRTC_OUTPUT");'),
  ("virtual_gpu/tests/a.py", "import callgate as cg"),
  ("virtual_gpu/virtual_gpu/a.py", "def f():\n  from requirements import requirements"),
  ("virtual_gpu/CMakeLists.txt", "target_link_libraries(cuda PRIVATE callgate_options)"),
]


@pytest.mark.parametrize(("name", "text"), VIOLATIONS)
def test_a_planted_violation_is_found_with_its_file_and_line(tmp_path, name, text):
  for allowed, content in ALLOWED.items():
    plant(tmp_path, allowed, content)
  plant(tmp_path, name, "\n" * 2 + text + "\n")
  result = run_check(tmp_path)
  line = 1 if "strange" in name else 2 + len(text.splitlines())
  assert result.returncode == 1
  assert result.stdout.startswith(f"{name}:{line}: ")
  assert len(result.stdout.splitlines()) == 1


def long_file(root: Path) -> str:
  plant(root, "python/callgate/_gate/long.py", "x = 1\n" * 401)
  return "python/callgate/_gate/long.py:401: 401 lines"


def circle(root: Path) -> str:
  plant(root, "python/callgate/_gate/a.py", "from callgate._gate import b\n")
  plant(root, "python/callgate/_gate/b.py", "from callgate._gate.c import x\n")
  plant(root, "python/callgate/_gate/c.py", "def f():\n  from callgate._gate.a import y\n")
  return "python/callgate/_gate/a.py:1: a circle"


def folder_that_says_too_much(root: Path) -> str:
  plant(root, "python/callgate/_tap/__init__.py", '"""Taps."""\nx = 1\n')
  return "python/callgate/_tap/__init__.py:1: expected one sentence"


@pytest.mark.parametrize("make", [long_file, circle, folder_that_says_too_much])
def test_a_planted_fault_of_form_is_found(tmp_path, make):
  for allowed, content in ALLOWED.items():
    plant(tmp_path, allowed, content)
  expected = make(tmp_path)
  result = run_check(tmp_path)
  assert result.returncode == 1
  assert expected in result.stdout


def test_the_picture_of_the_imports_is_what_the_code_says():
  command = [sys.executable, str(ROOT / "tools" / "draw_imports.py"), "--check"]
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout + result.stderr


def test_the_design_s_table_has_each_folder_of_the_package():
  page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
  named = re.findall(r"^\| `(\w+(?:/\w+)*)` \|", page, re.MULTILINE)
  assert sorted(named) == sorted(LAYERS)


def test_files_that_contributors_are_told_to_look_at_are_there():
  page = (ROOT / "CONTRIBUTING.md").read_text()
  section = page.partition("### Where do I find\n")[2].partition("\n### ")[0]
  rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][2:]
  assert len(rows) == 26
  for path in re.findall(r"`([^`]+)`", "".join(rows)):
    inside = ROOT if path.startswith(("src/", "include/")) else ROOT / "python" / "callgate"
    assert (inside / path).exists(), path
