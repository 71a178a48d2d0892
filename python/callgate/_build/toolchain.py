# SPDX-License-Identifier: Apache-2.0
"""The system's C++ compiler: finding it, calling it, its messages.

The results are cached (`_build/cache.py`). A cached kernel needs no run of the compiler, not even
for its version.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from callgate import _callgate
from callgate._build import cache
from callgate._build.files import checksum
from callgate._core.errors import CompileError
from callgate._core.paths import ROOT
from callgate._core.terminal import Command

DEFAULT_FLAGS = ("-O3", "-march=native", "-DNDEBUG")
DEBUG_FLAGS = ("-O0", "-g", "-DCALLGATE_BOUNDS_CHECK=1")
_ALWAYS = ("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")
_OMP = re.compile(r"^\s*#\s*pragma\s+omp\b", re.MULTILINE)
_COMPILERS = ("c++", "g++", "clang++")
# Environment variables that change a compiler's result.
_ENVIRONMENT = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "SDKROOT")
# Flags with a path that the compiler resolves in the current directory.
_PATH_FLAGS = ("-I", "-i", "-L", "-B", "-f", "@")
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}  # guarded by _lock; never emptied: libraries stay loaded
_c = ctypes.CDLL(None)


def include_dir(folder: str = "include") -> Path:
  """Returns the folder of `callgate/kernel.h`, in the installed package or in a source tree."""
  installed = ROOT / folder
  return installed if installed.exists() else ROOT.parents[1] / folder


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  """`include-dir` and `cmake-dir`: the latter has `callgateConfig.cmake` for find_package."""
  del parser
  folder = include_dir("cmake" if name == "cmake-dir" else "include")
  return lambda _: print(folder) or 0


@functools.cache  # at most one entry for each set of headers
def headers_digest(*patterns: str) -> str:
  """Returns a digest of callgate's own headers, for the keys of sources that include them."""
  folder = include_dir() / "callgate"
  return cache.digest([checksum(f) for pattern in patterns for f in sorted(folder.glob(pattern))])


def compiler() -> list[str]:
  """Returns the C++ compiler's command: `CXX`, which may have arguments, or c++, g++, clang++."""
  given = os.environ.get("CXX", "").strip()
  try:
    commands = [shlex.split(given)] if given else [[name] for name in _COMPILERS]
  except ValueError as error:
    expected = "a compiler's command in shell syntax"
    problem = f"environment variable CXX: expected {expected}, got {given!r}: {error}"
    raise CompileError(problem) from None
  for name, *arguments in commands:
    if found := shutil.which(name):
      return [found, *arguments]
  looked = f"CXX={given}" if given else ", ".join(_COMPILERS)
  raise CompileError(
    f"no C++ compiler was found (searched for {looked}). Kernels in C++ need a C++20 compiler: "
    "install g++ 11 or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
    "conda: conda install gxx) or clang++ 14 or newer, or set the environment variable CXX"
  )


@functools.cache
def cpu() -> str:
  """Returns the meaning of `-march=native` on this machine."""
  fields: list[tuple[str, str]] = []
  with contextlib.suppress(OSError):
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    first = text.partition("\n\n")[0]  # the first processor
    fields = re.findall(r"^(model name|flags|Features|CPU part)\s*: (.*\S)", first, re.MULTILINE)
  return f"{platform.machine()} {sorted(fields) or platform.processor()}"


def build(
  what: str,
  source: str,
  *,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Path:
  """Returns the shared library of a C++ source, from the cache if it is there.

  Flags come after callgate's own. Libraries are names for `-l`, or paths; their folders are also in
  the library's run path. Messages call the kernel `what`, and use the source's `#line`s.
  """
  if _OMP.search(source) and "_OPENMP" not in source and not any("openmp" in f for f in flags):
    told = "without flags=['-fopenmp'] the compiler ignores it, and the code runs on one thread"
    warnings.warn(f"{what}: the source has '#pragma omp': {told}", stacklevel=2)
  command, folders = compiler(), [os.path.abspath(d) for d in library_dirs]
  arguments = [*_ALWAYS, f"-I{include_dir()}", *(f"-I{os.path.abspath(d)}" for d in include_dirs)]
  arguments += flags
  paths = [os.path.abspath(name) if os.sep in name else "" for name in libraries]
  run_path = dict.fromkeys([*folders, *(os.path.dirname(path) for path in paths if path)])
  links = [*(f"-L{d}" for d in folders), *(f"-Wl,-rpath,{d}" for d in run_path)]
  links += [path or f"-l{name}" for name, path in zip(libraries, paths, strict=True)]
  here = os.getcwd() if any(flag.startswith(_PATH_FLAGS) for flag in flags) else ""
  environment = [os.environ.get(name, "") for name in _ENVIRONMENT]
  # The headers represent callgate's version: the library contains nothing else of callgate.
  own = [headers_digest("kernel*.h", "elementwise*.h"), _callgate.KERNEL_ABI]
  # The compiler's version is queried once for each state of its files.
  programs = [os.path.realpath(found) for part in command if (found := shutil.which(part))]
  stamps = [(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in programs]
  version = _version(tuple(command), cache.digest([command, stamps])[:32])
  key = cache.digest([source, arguments, links, here, environment, version, cpu(), *own])

  def make(folder: Path) -> tuple[Path, list[str]]:
    made, read = _compile(what, source, [*command, *arguments], links, folder)
    # Static libraries become part of the kernel's library, so their content is in the key.
    archives = [os.path.join(d, f"lib{name}.a") for name in libraries for d in folders]
    archives += [path for path in paths if path.endswith((".a", ".o"))]
    return made, [*read, *filter(os.path.exists, archives)]

  return cache.find_or_make(key, make)


def open_library(path: str) -> ctypes.CDLL:
  """Loads a library, and restores the thread's floating-point mode.

  GCC's `-ffast-math` makes libraries that turn off subnormal numbers in the thread that loads them.
  """
  mode = ctypes.create_string_buffer(256)  # larger than any platform's fenv_t
  _c.fegetenv(mode)
  try:
    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
  finally:
    _c.fesetenv(mode)


def load(library: Path, what: str = "a kernel") -> ctypes.CDLL:
  """Loads the library; it stays loaded until the process ends."""
  key = str(library)
  with _lock:
    if key not in _loaded:
      try:
        _loaded[key] = open_library(key)
      except OSError as error:
        problem = str(error).removeprefix(f"{key}: ")
        advice = "Pass the libraries that it calls as libraries=, and their folders as "
        advice += "library_dirs="
        if re.search(r"\b(omp_|GOMP_|__kmpc_)", problem):
          advice = "It uses OpenMP; pass flags=['-fopenmp']"
        raise CompileError(
          f"{what}: the compiled library can't be loaded: {problem}. {advice}", problem
        ) from None
    return _loaded[key]


@functools.cache  # never emptied: one entry for each state of a compiler's files
def _version(command: tuple[str, ...], state: str) -> str:
  ask = [*command, "--version"]
  return cache.remembered(state, lambda: _run(ask, "its version").stdout.strip() or "unknown")


def _run(command: Sequence[str], what: str) -> subprocess.CompletedProcess[str]:
  try:
    return subprocess.run(
      command, capture_output=True, errors="replace", check=False, stdin=subprocess.DEVNULL
    )
  except OSError as error:
    raise CompileError(
      f"{what}: the C++ compiler {command[0]} can't be run: {error}; set CXX to another"
    ) from None


def _compile(
  what: str, source: str, command: Sequence[str], links: Sequence[str], folder: Path
) -> tuple[Path, list[str]]:
  """Returns the library, and the files other than the source that it depends on."""
  unit, made, read = folder / "kernel.cc", folder / "kernel.so", folder / "kernel.d"
  unit.write_text(source, encoding="utf-8")
  own = (f"{folder}{os.sep}", f"{include_dir()}{os.sep}")
  # -MMD omits the system's headers, which the compiler's version covers.
  result = _run([*command, "-MMD", "-MF", str(read), str(unit), "-o", str(made), *links], what)
  if result.returncode != 0 or not made.exists():
    output = result.stderr.replace(own[0], "").rstrip()
    said = output or f"exit status {result.returncode}, no message"
    raise CompileError(
      f"{what}: the C++ compiler ({command[0]}) reported an error:\n{said}", output
    )
  # The Makefile rule that compilers write.
  text = read.read_text("utf-8", "surrogateescape") if read.exists() else ""
  rule = text.replace("\\\n", " ").partition(": ")[2].partition("\n")[0]
  words = [re.sub(r"\\([ #])", r"\1", word) for word in re.findall(r"(?:\\[ #]|[^\s])+", rule)]
  files = [os.path.abspath(word.replace("$$", "$")) for word in words]
  return made, [file for file in files if not file.startswith(own)]
