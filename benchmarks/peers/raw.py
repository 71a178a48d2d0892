# SPDX-License-Identifier: Apache-2.0
"""Builds and loads `raw_ffi.cc`: the handlers that show what XLA's FFI itself costs.

The library lies in `benchmarks/build/` under a name made from the source and the versions that it
was compiled against, so a second run finds it and a changed one rebuilds it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness

SOURCE = Path(__file__).parent / "raw_ffi.cc"
BUILD = Path(__file__).parent.parent / "build"
TARGETS = ("bench_noop", "bench_memcpy", "bench_call_python")


def raw_call(target: str, spec: jax.ShapeDtypeStruct, **options: Any) -> Callable[..., Any]:
  """A traceable function of one array that runs one of `TARGETS`."""
  library()
  return jax.ffi.ffi_call(target, spec, **options)


@functools.cache
def library() -> ctypes.PyDLL:
  """The compiled handlers, registered with JAX; the bare callable is a Python no-op."""
  handle = ctypes.PyDLL(str(_compiled()))
  for target in TARGETS:
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="cpu")
  handle.bench_set_callable.argtypes = [ctypes.py_object]
  handle.bench_set_callable.restype = None
  handle.bench_set_callable(_nothing)
  return handle


def _nothing() -> None:
  """The least that Python can do."""


def _compiled() -> Path:
  """The handlers' library, compiled first where it is not there yet."""
  return compiled(SOURCE, jax.ffi.include_dir(), sysconfig.get_path("include"))


def compiled(source: Path, *include_dirs: str) -> Path:
  """The shared library of a C++ source, compiled first where it is not there yet."""
  versions = f"{jax.lib.__version__} {sysconfig.get_config_var('SOABI')}"
  digest = hashlib.sha256(source.read_bytes() + versions.encode()).hexdigest()[:12]
  path = BUILD / f"{source.stem}-{digest}.so"
  if not path.exists():
    BUILD.mkdir(exist_ok=True)
    _compile(source, include_dirs, path)
  return path


def _compile(source: Path, include_dirs: Sequence[str], path: Path) -> None:
  """One compiler run; written under another name first, so that a broken run leaves nothing."""
  partial = path.with_suffix(f".{os.getpid()}.tmp")
  includes = [part for directory in include_dirs for part in ("-isystem", directory)]
  flags = ["-std=c++17", "-O3", "-fPIC", "-shared", *includes]
  command = [compiler(), *flags, str(source), "-o", str(partial)]
  subprocess.run(command, check=True, capture_output=True, text=True)
  partial.replace(path)


def compiler() -> str:
  """The system's C++ compiler, or NotInstalled."""
  found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
  if found is None:
    raise harness.NotInstalled("no C++ compiler (c++, g++ or $CXX)")
  return found
