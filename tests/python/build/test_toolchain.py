# SPDX-License-Identifier: Apache-2.0
"""The compiler behind `callgate.cpp` and its cache: found, run once, shared, repaired.

A script as CXX counts the compiler's runs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import interpreters
import jax.numpy as jnp
import pytest
from interpreters import Process

import callgate as cg
from callgate._build import cache as _cache
from callgate._build import files, toolchain

# In fresh processes as well.
KERNEL = """
import sys, warnings
import jax.numpy as jnp, callgate as cg

def make(factor=2, **options):
  return cg.cpp('''
    void scale(cg::In<float, 1> x, cg::Out<float, 1> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = FACTOR * x[i];
    }'''.replace("FACTOR", str(factor)), out=lambda x: x, flags=("-O0",), **options)
"""
namespace: dict[str, Any] = {}
exec(KERNEL, namespace)
make = namespace["make"]
X = jnp.ones(2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path / "cache"))
  return tmp_path / "cache"


class Compiler:
  """A script around the system's compiler that notes its runs."""

  def __init__(self, folder: Path, before: str = "") -> None:
    self.path, self.log = folder / "my c++", folder / "runs.log"
    real = shlex.join(toolchain.compiler())
    self.path.write_text(f'#!/bin/sh\necho "$@" >> "{self.log}"\n{before}\nexec {real} "$@"\n')
    self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

  @property
  def runs(self) -> list[str]:
    return self.log.read_text().splitlines() if self.log.exists() else []

  @property
  def compilations(self) -> int:
    return sum(" -o " in run for run in self.runs)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
  made = Compiler(tmp_path)
  monkeypatch.setenv("CXX", f"'{made.path}'")
  return made


def start(code: str, *, new_session: bool = False, **environment: str) -> Process:
  return interpreters.start(
    KERNEL + code, environment=environment, errors=True, new_session=new_session
  )


def output_of(process: Process) -> str:
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  return out


def libraries(cache: Path) -> list[Path]:
  return sorted(cache.glob("kernels/*/*.so"))


# -- finding a compiler --------------------------------------------------------------------------
def test_without_a_compiler_the_error_says_what_to_install(
  cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.delenv("CXX", raising=False)
  monkeypatch.setenv("PATH", "")
  with pytest.raises(cg.CompileError, match=r"searched for c\+\+, g\+\+, clang\+\+") as caught:
    make()
  for words in ("apt install g++", "dnf install gcc-c++", "conda install gxx", "CXX"):
    assert words in str(caught.value)
  monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
  with pytest.raises(cg.CompileError, match=r"searched for CXX=/nowhere/g\+\+ -m64"):
    make()
  assert not cache.exists()


def test_cxx_comes_first_and_may_have_arguments(
  cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("CXX", f"'{compiler.path}' -DEXTRA=1")
  kernel = cg.cpp("void f(cg::Out<float, 0> y) { y() = EXTRA; }", out=jnp.float32(0), flags=["-O0"])
  assert kernel() == 1
  assert compiler.compilations == 1
  assert len(libraries(cache)) == 1


def test_a_compiler_that_cannot_run_is_named(
  cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  broken = tmp_path / "broken"
  broken.write_bytes(b"\0\1\2")
  broken.chmod(0o755)
  monkeypatch.setenv("CXX", str(broken))
  with pytest.raises(cg.CompileError, match=r"(?s)broken can't be run.*; set CXX"):
    make()
  silent = tmp_path / "silent"
  silent.write_text("#!/bin/sh\nexit 3\n")
  silent.chmod(0o755)
  monkeypatch.setenv("CXX", str(silent))
  with pytest.raises(cg.CompileError, match="exit status 3"):
    make()
  assert libraries(cache) == []


# -- what the compiler says ----------------------------------------------------------------------
def test_a_compile_error_has_the_users_line_and_leaves_nothing_behind(cache: Path) -> None:
  source = "\n\nvoid wrong(cg::In<float, 1> x, cg::Out<float, 1> y) {\n  y[0] = undefined_name;\n}"
  with pytest.raises(cg.CompileError, match=r"kernel 'mine'.*reported an error") as caught:
    cg.cpp(source, out=lambda x: x, name="mine")
  assert "wrong:4:10: error:" in caught.value.output
  assert "undefined_name" in caught.value.output
  assert str(cache) not in caught.value.output
  assert [path for path in cache.rglob("*") if path.suffix in (".so", ".cc", ".json")] == []


@pytest.mark.parametrize(
  ("source", "said"),
  [
    ("void f(float* x, cg::Out<float> y) {}", "a kernel's parameters are cg::In"),
    ("void f(cg::In<const char*> x) {}", "arrays can't have"),
    ("void f(cg::In<float, 2> x, cg::Out<float> y) { y[0] = x(1); }", "an index for each axis"),
  ],
  ids=["pointer", "element type", "too few indices"],
)
def test_a_type_that_callgate_lacks_is_told_at_compile_time(
  source: str, said: str, cache: Path
) -> None:
  with pytest.raises(cg.CompileError, match=said):
    cg.cpp(source, "f", out=lambda x: x)
  assert libraries(cache) == []


def test_warnings_do_not_fail_and_errors_of_the_users_flags_do(cache: Path) -> None:
  source = "void f(cg::In<float> x, cg::Out<float> y) { int unused; y[0] = x[0]; }"
  assert cg.cpp(source, out=lambda x: x, flags=["-Wall"])(X)[0] == 1
  with pytest.raises(cg.CompileError, match="unused"):
    cg.cpp(source, out=lambda x: x, flags=["-Wall", "-Werror"])
  with pytest.raises(cg.GateDefinitionError, match=r"flags: expected a sequence of strings"):
    cg.cpp(source, out=lambda x: x, flags="-Wall")
  assert len(libraries(cache)) == 1


def test_a_long_source_in_many_characters_compiles(cache: Path) -> None:
  comment = "// " + "größer " * 40 + "\n"
  constants = "".join(f"constexpr int c{i} = {i};\n" for i in range(20000))
  source = comment * 500 + constants + "void f(cg::Out<float, 0> y) { y() = c19999; }"
  assert cg.cpp(source, out=jnp.float32(0), flags=["-O0"])() == 19999
  assert len(libraries(cache)) == 1


def test_debug_checks_every_index(cache: Path) -> None:
  source = """
    void f(cg::In<float, 2> x, cg::Out<float, 2> y, cg::Attr<int> n) {
      y(0, 0) = n < 0 ? x(0, 0) : n < 10 ? x(0, n) : x[n];
    }
  """
  kernel = cg.cpp(source, out=lambda x: x, debug=True)
  x = jnp.ones((2, 3))
  assert kernel(x, -1)[0, 0] == 1
  for index, message in (
    (3, r"index 3 of axis 1 is outside \[0, 3\)"),
    (10, r"index 10 is outside \[0, 6\)"),
  ):
    with pytest.raises(cg.KernelError, match=message), cg.errors():
      kernel(x, index)
  assert len(libraries(cache)) == 1


# -- the cache -----------------------------------------------------------------------------------
def test_a_second_start_runs_no_compiler_at_all(cache: Path, compiler: Compiler) -> None:
  code = "print(make()(jnp.ones(2)).tolist())"
  assert output_of(start(code)) == "[2.0, 2.0]\n"
  first = compiler.runs
  assert compiler.compilations == 1
  assert output_of(start(code)) == "[2.0, 2.0]\n"
  assert compiler.runs == first
  assert len(libraries(cache)) == 1


def test_a_name_is_no_part_of_what_is_compiled(cache: Path, compiler: Compiler) -> None:
  for name in ("one", "two"):
    assert make(name=f"toolchain.{name}")(X)[0] == 2
  assert compiler.compilations == 1
  assert len(libraries(cache)) == 1


def test_source_flags_compiler_and_environment_are_told_apart(
  cache: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  assert [make(factor)(X)[0] for factor in (2, 3, 2, 3)] == [2, 3, 2, 3]
  assert compiler.compilations == 2
  cg.cpp(
    "void f(cg::In<float> x, cg::Out<float> y) { y[0] = V; }", out=lambda x: x, flags=["-DV=1"]
  )
  cg.cpp(
    "void f(cg::In<float> x, cg::Out<float> y) { y[0] = V; }", out=lambda x: x, flags=["-DV=2"]
  )
  assert compiler.compilations == 4
  script = compiler.path.read_text()
  compiler.path.write_text(script.replace("exec", "# the same compiler, changed\nexec"))
  make()
  assert compiler.compilations == 4
  compiler.path.write_text(script.replace("exec", 'test "$1" = --version && exec echo 99\nexec'))
  make()
  assert compiler.compilations == 5
  monkeypatch.setenv("CPATH", str(tmp_path))
  make()
  assert compiler.compilations == 6
  monkeypatch.setattr(toolchain, "cpu", lambda: "another CPU")
  make()
  assert compiler.compilations == 7
  assert len(libraries(cache)) == 7


def test_many_processes_at_once_run_the_compiler_once(cache: Path, compiler: Compiler) -> None:
  go = cache.parent / "go"
  code = f"""
import pathlib, time
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.005)
print(make()(jnp.ones(1)).tolist())
"""
  processes = [start(code) for _ in range(4)]
  go.touch()
  assert [output_of(process) for process in processes] == ["[2.0]\n"] * 4
  assert compiler.compilations == 1
  assert len(libraries(cache)) == 1


def test_a_build_that_is_killed_leaves_nothing_broken(tmp_path: Path, cache: Path) -> None:
  go = tmp_path / "go"
  slow = Compiler(tmp_path, before=f'case "$*" in *" -o "*) test -e "{go}" || sleep 60;; esac')
  code, command = "print(make()(jnp.ones(1)).tolist())", f"'{slow.path}'"
  process = start(code, new_session=True, CXX=command)
  while slow.compilations == 0:
    assert process.poll() is None, process.communicate()
    time.sleep(0.01)
  assert len(list(cache.glob("kernels/*/*.build-*"))) == 1
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
  go.touch()
  assert output_of(start(code, CXX=command)) == "[2.0]\n"
  assert slow.compilations == 2
  assert list(cache.glob("kernels/*/*.build-*")) == []


def test_the_rest_of_a_killed_build_is_removed_by_the_next(cache: Path) -> None:
  make()
  (library,) = libraries(cache)
  (manifest,) = cache.glob("kernels/*/*.json")
  rest = manifest.with_suffix(".build-of-a-killed-process")
  rest.mkdir()
  (rest / "kernel.so").write_bytes(b"half")
  manifest.unlink()
  make()
  assert not rest.exists()
  assert libraries(cache) == [library]


def test_control_c_stops_the_compiler_and_a_later_call_works(tmp_path: Path, cache: Path) -> None:
  slow = Compiler(tmp_path, before='case "$*" in *" -o "*) test -e go || sleep 30;; esac')
  code = """
import pathlib
try:
  make()
except KeyboardInterrupt:
  print("interrupted")
pathlib.Path("go").touch()
print(make()(jnp.ones(1)).tolist())
"""
  process = interpreters.start(KERNEL + code, environment={"CXX": f"'{slow.path}'"}, cwd=tmp_path)
  while slow.compilations == 0:
    assert process.poll() is None, process.communicate()
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  assert output_of(process) == "interrupted\n[2.0]\n"
  assert list(cache.glob("kernels/*/*.build-*")) == []


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_one_with_a_warning(
  tmp_path: Path,
) -> None:
  (tmp_path / "file").write_text("no folder")
  code = """
import tempfile, pathlib
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always")
  print(make()(jnp.ones(1)).tolist(), make(3)(jnp.ones(1)).tolist())
print([str(w.message) for w in caught if "callgate" in str(w.message)])
print(len(list(pathlib.Path(tempfile.gettempdir()).glob("callgate-*/kernels/*/*.so"))))
"""
  below = str(tmp_path / "file" / "below")
  lines = output_of(start(code, CALLGATE_CACHE_DIR=below, TMPDIR=str(tmp_path))).splitlines()
  assert lines[0] == "[2.0] [3.0]"
  assert lines[1].count("CALLGATE_CACHE_DIR") == 1
  assert "file/below" in lines[1]
  assert lines[2] == "2"
  assert list(tmp_path.glob("callgate-*")) == []  # removed at exit


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_that_has_the_kernel_serves_it(cache: Path, compiler: Compiler) -> None:
  code = "print(make()(jnp.ones(1)).tolist())"
  output_of(start(code))
  folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
  for folder in folders:
    folder.chmod(0o555)
  try:
    assert output_of(start(code)) == "[2.0]\n"
  finally:
    for folder in folders:
      folder.chmod(0o755)
  assert compiler.compilations == 1


def test_the_cache_is_below_the_users_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delenv("CALLGATE_CACHE_DIR", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/caches")
  assert files.cache_dir() == Path("/somewhere/caches/callgate")
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/someone")
  assert files.cache_dir() == Path("/home/someone/.cache/callgate")


# -- headers and libraries -----------------------------------------------------------------------
INCLUDING = """
  #include "my factor.h"
  void f(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = kFactor * x[0]; }
"""


def including(folder: Path, **options: Any) -> float:
  kernel = cg.cpp(INCLUDING, out=lambda x: x, include_dirs=[folder], flags=["-O0"], **options)
  return float(kernel(X)[0])


def test_a_header_that_changes_is_noticed_and_one_that_changes_back_is_known(
  cache: Path, compiler: Compiler, tmp_path: Path
) -> None:
  folder = tmp_path / "in clude"
  folder.mkdir()
  (folder / "my factor.h").write_text('#include "deeper.h"\n')
  deeper = folder / "deeper.h"
  for factor, compilations in ((5, 1), (5, 1), (7, 2), (5, 2), (7, 2)):
    deeper.write_text(f"constexpr float kFactor = {factor};\n")
    os.utime(deeper, ns=(1, 1))  # by content, not by time
    assert including(folder) == factor
    assert compiler.compilations == compilations
  (manifest,) = cache.glob("kernels/*/*.json")
  known = {name for entry in json.loads(manifest.read_text()) for name in entry["dependencies"]}
  assert known == {str(folder / "my factor.h"), str(deeper)}
  deeper.unlink()
  with pytest.raises(cg.CompileError, match=r"deeper\.h"):
    including(folder)


def test_a_header_that_changes_while_it_is_compiled_is_compiled_again(
  cache: Path, compiler: Compiler, tmp_path: Path
) -> None:
  header = tmp_path / "my factor.h"
  header.write_text("constexpr float kFactor = 2;\n")
  os.utime(header, ns=(2**61, 2**61))  # as if written since
  for expected in (1, 2):
    assert including(tmp_path) == 2
    assert compiler.compilations == expected
  assert len(libraries(cache)) == 1


def test_only_the_newest_libraries_of_a_source_are_kept(cache: Path, tmp_path: Path) -> None:
  made: list[Path] = []
  header = tmp_path / "header.h"
  for i in range(10):

    def make_one(folder: Path, i: int = i) -> tuple[Path, list[str]]:
      (folder / "made").write_text(str(i))
      return folder / "made", [str(header)]

    header.write_text(str(i))
    made.append(_cache.find_or_make("ab" * 32, make_one))
  assert [path.exists() for path in made] == [False] * 2 + [True] * 8
  assert len(libraries(cache)) == 8


def test_relative_folders_are_those_of_the_current_directory(
  cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  for name, factor in (("a", 3), ("b", 4)):
    (tmp_path / name / "inc").mkdir(parents=True)
    (tmp_path / name / "inc" / "my factor.h").write_text(f"constexpr float kFactor = {factor};")
  for name, factor in (("a", 3), ("b", 4)):
    monkeypatch.chdir(tmp_path / name)
    assert including(Path("inc")) == factor
    kernel = cg.cpp(INCLUDING, out=lambda x: x, flags=["-O0", "-Iinc"])
    assert kernel(X)[0] == factor
  assert len(libraries(cache)) == 4


def test_a_function_of_a_header_is_a_kernel(cache: Path, tmp_path: Path) -> None:
  (tmp_path / "mine.h").write_text(
    "namespace mine { inline void f(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = 9; } }"
  )
  kernel = cg.cpp('#include "mine.h"', "mine::f", out=lambda x: x, include_dirs=[tmp_path])
  assert kernel(X)[0] == 9
  with pytest.raises(cg.GateDefinitionError, match=r"argument '0': expected float32 of rank 1"):
    kernel(jnp.ones((2, 2)))
  assert len(libraries(cache)) == 1


CALLING = """
  extern "C" float my_factor();
  void f(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = my_factor() * x[0]; }
"""


def library(folder: Path, factor: int, *, static: bool) -> None:
  unit = folder / "my.cc"
  unit.write_text(f'extern "C" float my_factor() {{ return {factor}; }}')
  cxx = toolchain.compiler()
  if not static:
    subprocess.run([*cxx, "-shared", "-fPIC", unit, "-o", folder / "libmy.so"], check=True)
    return
  subprocess.run([*cxx, "-c", "-fPIC", unit, "-o", folder / "my.o"], check=True)
  subprocess.run(["ar", "rcs", folder / "libmy.a", folder / "my.o"], check=True)


def test_libraries_are_found_at_build_and_at_run_time(cache: Path, tmp_path: Path) -> None:
  library(tmp_path, 6, static=False)
  by_name = cg.cpp(CALLING, "f", out=lambda x: x, libraries=["my"], library_dirs=[tmp_path])
  assert by_name(X)[0] == 6
  by_path = cg.cpp(CALLING, "f", out=lambda x: x, libraries=[str(tmp_path / "libmy.so")])
  assert by_path(X)[0] == 6
  with pytest.raises(cg.CompileError, match=r"can't be loaded: .*my_factor.*libraries="):
    cg.cpp(CALLING, "f", out=lambda x: x)
  with pytest.raises(cg.CompileError, match=r"cannot find -lnowhere|library 'nowhere' not found"):
    cg.cpp(CALLING, "f", out=lambda x: x, libraries=["nowhere"])
  assert len(libraries(cache)) == 3


def test_a_static_library_that_changes_is_noticed(
  cache: Path, compiler: Compiler, tmp_path: Path
) -> None:
  for factor in (6, 8):
    library(tmp_path, factor, static=True)
    kernel = cg.cpp(CALLING, "f", out=lambda x: x, libraries=["my"], library_dirs=[tmp_path])
    assert kernel(X)[0] == factor
  assert compiler.compilations == 4  # two are those of the library itself
  assert len(libraries(cache)) == 2
