# SPDX-License-Identifier: Apache-2.0
"""The package's help for builds: `python -m callgate include-dir` and `cmake-dir`, and CMake's
`find_package(callgate)`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest
import quick_cpp
from interpreters import same_path

import callgate as cg
from callgate.__main__ import main

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

SOURCE = """
  #include "callgate/kernel.h"
  #if __cplusplus < 201703L
  #error "cxx_std_17 did not arrive"
  #endif
  void twice(cg::In<float, 1> x, cg::Out<float, 1> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
  }
  CALLGATE_KERNEL(twice, x, y);
"""


def folder(command: str, capsys: pytest.CaptureFixture[str]) -> Path:
  assert main([command]) == 0
  return Path(capsys.readouterr().out.rstrip("\n"))


def cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
  program = shutil.which("cmake", path=PATH)
  if program is None or not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
    pytest.skip("cmake and a C++ compiler are needed")
  return subprocess.run(
    [program, *map(str, arguments)],
    env={**os.environ, "PATH": PATH, "CXX": quick_cpp.plain()},
    capture_output=True, text=True, timeout=300,
  )  # fmt: skip


def project(where: Path, find: str = "find_package(callgate CONFIG REQUIRED)") -> Path:
  """A user's project; C++14 is its own default."""
  where.mkdir()
  (where / "kernels.cc").write_text(SOURCE)
  (where / "CMakeLists.txt").write_text(
    textwrap.dedent(f"""
      cmake_minimum_required(VERSION 3.18...4.3)
      project(user LANGUAGES CXX)
      set(CMAKE_CXX_STANDARD 14)
      {find}
      add_library(user MODULE kernels.cc)
      target_link_libraries(user PRIVATE callgate::kernel)
    """)
  )
  return where


def test_the_folders_hold_the_header_and_the_package(capsys: pytest.CaptureFixture[str]) -> None:
  assert (folder("include-dir", capsys) / "callgate" / "kernel.h").is_file()
  assert (folder("include-dir", capsys) / "callgate" / "kernel_abi.h").is_file()
  assert (folder("cmake-dir", capsys) / "callgateConfig.cmake").is_file()


def test_the_command_prints_the_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
  environment = {**os.environ, **same_path()}
  done = subprocess.run(
    [sys.executable, "-m", "callgate", "cmake-dir"],
    env=environment, capture_output=True, text=True, timeout=120, check=True,
  )  # fmt: skip
  assert done.stdout == f"{folder('cmake-dir', capsys)}\n"


def test_a_user_s_cmake_project_builds_a_library_that_callgate_loads(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  source, build = project(tmp_path / "source"), tmp_path / "build"
  where = folder("cmake-dir", capsys)
  done = cmake("-S", source, "-B", build, f"-Dcallgate_DIR={where}")
  assert done.returncode == 0, done.stderr
  done = cmake("--build", build)
  assert done.returncode == 0, done.stdout + done.stderr
  assert cg.library(build / "libuser.so").twice(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_the_package_may_be_moved_and_found_twice(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  moved = tmp_path / "a folder" / "callgate"
  shutil.copytree(folder("include-dir", capsys), moved / "include")
  shutil.copytree(folder("cmake-dir", capsys), moved / "cmake")
  twice = "find_package(callgate CONFIG REQUIRED)\nfind_package(callgate CONFIG REQUIRED)"
  source, build = project(tmp_path / "source", twice), tmp_path / "build"
  done = cmake("-S", source, "-B", build, f"-Dcallgate_ROOT={moved}")
  assert done.returncode == 0, done.stderr
  done = cmake("--build", build, "--verbose")
  assert done.returncode == 0, done.stdout + done.stderr
  assert str(moved / "include") in done.stdout.replace("\\", "")


def test_a_package_without_its_header_says_what_is_missing(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  shutil.copytree(folder("cmake-dir", capsys), tmp_path / "cmake")
  source = project(tmp_path / "source")
  done = cmake("-S", source, "-B", tmp_path / "build", f"-Dcallgate_DIR={tmp_path / 'cmake'}")
  assert done.returncode != 0
  assert "callgate/kernel.h is missing" in " ".join(done.stderr.split())


def test_a_version_may_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  where = folder("cmake-dir", capsys)
  if not (where / "callgateConfigVersion.cmake").exists():
    pytest.skip("a source tree has no version file: an installed package has")
  wanted = f"{cg.__version__} CONFIG REQUIRED", f"{cg.__version__} EXACT CONFIG REQUIRED"
  found = [f"find_package(callgate {version})\nmessage(STATUS found)" for version in wanted]
  find = "\n".join([*found, "find_package(callgate 9.9 CONFIG REQUIRED)"])
  source = project(tmp_path / "source", find)
  done = cmake("-S", source, "-B", tmp_path / "build", f"-Dcallgate_DIR={where}")
  assert done.returncode != 0
  assert done.stdout.count("-- found") == 2
  assert f"version: {cg.__version__}" in done.stderr
