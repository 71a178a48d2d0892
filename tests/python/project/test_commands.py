# SPDX-License-Identifier: Apache-2.0
"""The project's own commands: what `make test` says first, what `make quick` chooses, what is done
about a test that hangs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from interpreters import FOLDER, same_path

ROOT = Path(__file__).resolve().parents[3]


# -- before a build ------------------------------------------------------------------------------
def check_machine(what: str, python: str = sys.executable, **variables: str):
  return subprocess.run(
    ["sh", str(ROOT / "tools" / "check_machine.sh"), what, python],
    env={**os.environ, **variables}, capture_output=True, text=True, timeout=60,
  )  # fmt: skip


@pytest.mark.parametrize("what", ["test", "demo"])
def test_a_command_says_what_it_does_and_how_long_it_takes(what: str) -> None:
  if shutil.which("c++") is None:
    pytest.skip("no C++ compiler")
  done = check_machine(what, CXX="")
  assert done.returncode == 0, done.stdout
  assert re.match(rf"make {what} does \w+ things, in about \d+ minutes the first time", done.stdout)


def test_all_that_is_missing_is_named_at_once_with_how_to_get_it(tmp_path: Path) -> None:
  done = check_machine("test", python="", CXX="no-such-compiler -O2")
  assert done.returncode == 1
  for words in ("Python 3.11 or newer", "C++ compiler (no-such-compiler -O2)", "apt install g++"):
    assert words in done.stdout
  old = tmp_path / "python"
  old.write_text("#!/bin/sh\nexit 1\n")
  old.chmod(0o755)
  assert "missing: Python 3.11 or newer" in check_machine("demo", str(old)).stdout


# An interpreter as `find_python.sh` sees it: -c and a source.
INTERPRETER = """#!/bin/sh
exec {real} -c '
import sys
sys.version_info, sys.abiflags, sys.executable = {version}, "{flags}", "{path}"
exec(sys.argv[1])' "$2"
"""


def interpreter(path: Path, version: tuple[int, ...], flags: str = "") -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  text = INTERPRETER.format(real=sys.executable, version=version, flags=flags, path=path)
  path.write_text(text, encoding="utf-8")
  path.chmod(0o755)
  return str(path)


@pytest.mark.parametrize("where", ["PATH", "pyenv"])
def test_the_newest_python_with_a_gil_is_found(where: str, tmp_path: Path) -> None:
  folder, pyenv = tmp_path / "bin", tmp_path / "pyenv"

  def add(minor: int, flags: str = "", patch: str = ".0") -> str:
    path = folder / f"python3.{minor}"
    if where == "pyenv":
      path = pyenv / "versions" / f"3.{minor}{patch}{flags}" / "bin" / "python3"
    return interpreter(path, (3, minor, 0), flags)

  def found(*options: str) -> str:
    return subprocess.run(
      ["/bin/sh", str(ROOT / "tools" / "find_python.sh"), *options], check=True, timeout=60,
      env={"PATH": str(folder), "PYENV_ROOT": str(pyenv)}, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip

  interpreter(folder / "python3", (3, 10, 13))
  oldest = add(12)
  for minor in (13, 14, 15):
    newest = add(minor, patch="-dev" if minor == 15 else ".0")
    assert found("--newest") == newest
  add(16)
  assert found("--newest") == newest
  assert found() == oldest


def test_a_python_without_a_gil_is_not_found(tmp_path: Path) -> None:
  pyenv = tmp_path / "pyenv"
  usable = interpreter(pyenv / "versions" / "3.13.0" / "bin" / "python3", (3, 13, 0))
  interpreter(pyenv / "versions" / "3.14.0t" / "bin" / "python3", (3, 14, 0), "t")
  done = subprocess.run(
    ["/bin/sh", str(ROOT / "tools" / "find_python.sh"), "--newest"], check=True, timeout=60,
    env={"PATH": str(tmp_path), "PYENV_ROOT": str(pyenv)}, capture_output=True, text=True,
  )  # fmt: skip
  assert done.stdout.strip() == usable


def test_a_compiler_without_c_plus_plus_20_is_told_by_what_it_says(tmp_path: Path) -> None:
  compiler = tmp_path / "c++"
  compiler.write_text("#!/bin/sh\necho 'fatal error: latch: no such file' >&2\nexit 1\n")
  compiler.chmod(0o755)
  done = check_machine("demo", CXX=str(compiler))
  assert done.returncode == 1
  assert "fatal error: latch" in done.stdout
  assert "GCC 12 or newer" in done.stdout


# -- make quick ----------------------------------------------------------------------------------
@pytest.fixture
def tree(tmp_path: Path) -> Path:
  """A repository of callgate's shape with a commit."""
  files = {
    "python/callgate/__init__.py": "",
    "python/callgate/__init__.pyi": "from callgate.tap import tap\nfrom callgate import gate",
    "python/callgate/tap.py": "from callgate import _ring\n\ndef tap(): ...",
    "python/callgate/_ring.py": "SIZE = 1",
    "python/callgate/gate.py": "def late():\n  from callgate import _views",
    "python/callgate/_views.py": "",
    "tests/python/support/taps.py": "import callgate as cg\ntap = cg.tap",
    "tests/python/test_ring.py": "from callgate import _ring",
    "tests/python/tap/test_tap.py": "import callgate as cg\n\ndef test():\n  cg.tap()",
    "tests/python/test_far.py": "import taps",
    "tests/python/test_gate.py": "from callgate.gate import late",
    "src/core/ring.cc": "int size;",
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text + "\n")
  (tmp_path / "tools").mkdir()
  shutil.copy(ROOT / "tools" / "changed_tests.py", tmp_path / "tools")
  for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm all"):
    subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
  return tmp_path


def changed_tests(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, str(tree / "tools" / "changed_tests.py"), *options]
  return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
  ("changed", "named"),
  [
    ("python/callgate/_ring.py", ["test_ring", "test_tap", "test_far"]),
    ("python/callgate/_views.py", ["test_gate"]),
    ("tests/python/support/taps.py", ["test_far"]),
    ("tests/python/test_gate.py", ["test_gate"]),
    ("README.md", []),
  ],
)
def test_a_change_names_the_tests_that_use_it_nearest_first(
  tree: Path, changed: str, named: list[str]
) -> None:
  with (tree / changed).open("a") as file:
    file.write("# more\n")
  done = changed_tests(tree)
  assert [Path(line).stem for line in done.stdout.split()] == named, done.stderr
  assert changed_tests(tree, "--cpp").returncode == 1


def test_tests_that_take_too_long_are_left_out_and_counted(tree: Path) -> None:
  (tree / "build").mkdir()
  case = '<testcase classname="tests.python.tap.test_tap" name="a" time="100000"/>'
  (tree / "build" / "python-tests.xml").write_text(f"<testsuites>{case}</testsuites>")
  (tree / "python/callgate/_ring.py").write_text("SIZE = 2\n")
  done = changed_tests(tree)
  assert [Path(line).stem for line in done.stdout.split()] == ["test_ring", "test_far"]
  assert "1 that use it are left to make test" in done.stderr


def test_c_plus_plus_that_changed_is_told(tree: Path) -> None:
  (tree / "src/core/ring.cc").write_text("int other;\n")
  assert changed_tests(tree, "--cpp").returncode == 0


def test_the_tests_of_what_imports_jax_s_internals_are_named(tree: Path) -> None:
  for name, text in {
    "python/callgate/_jax/__init__.py": "",
    "python/callgate/_jax/tracing.py": "",
    "python/callgate/_gate/late.py": "def late():\n  from callgate._jax import tracing",
    "python/callgate/_views/views.py": "from callgate._gate import late",
    "tests/python/gate/test_gate.py": "",
    "tests/python/gate/c/test_c.py": "",
    "tests/python/views/test_views.py": "",
    "tests/python/jax/test_entries.py": "",
  }.items():
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(text + "\n")
  done = changed_tests(tree, "--jax")
  names = ["tests/python/gate/test_gate.py", "tests/python/jax/test_entries.py"]
  assert done.stdout.split() == names, done.stderr


# -- a test that hangs ---------------------------------------------------------------------------
def test_a_test_over_its_limit_shows_every_threads_stack_and_the_rest_runs(tmp_path: Path) -> None:
  (tmp_path / "test_hang.py").write_text(
    textwrap.dedent("""
      import ctypes, threading, pytest
      def wait_here():
        threading.Event().wait()
      def test_before(): pass
      @pytest.mark.limit(0.5)
      def test_hangs():
        threading.Thread(target=wait_here, daemon=True).start()
        ctypes.PyDLL(None).sleep(1000)  # with the GIL
      @pytest.mark.parametrize("i", range(5))
      def test_after(i): pass
    """)
  )
  (tmp_path / "conftest.py").write_text(
    "from limits import pytest_configure, pytest_runtest_protocol\n"
  )
  options = shlex.split("-n 1 --dist worksteal --max-worker-restart 2 -p no:cacheprovider")
  config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
  done = subprocess.run(
    [sys.executable, "-m", "pytest", *options, *config, str(tmp_path)],
    env={**os.environ, **same_path(FOLDER)},
    cwd=tmp_path, capture_output=True, text=True, timeout=100,
  )  # fmt: skip
  said = done.stdout + done.stderr
  assert done.returncode == 1, said
  assert "Timeout" in said
  assert "in test_hangs" in said
  assert "in wait_here" in said
  assert re.search(r"worker 'gw0' crashed while running '[^']*test_hangs'", said), said
  assert "1 failed, 6 passed" in said
