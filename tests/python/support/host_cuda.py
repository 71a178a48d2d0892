# SPDX-License-Identifier: Apache-2.0
"""Runs CUDA source on the host: each thread in turn, compiled by the C++ compiler.

For kernels whose threads don't wait for each other. Faults that the host's compiler can't find are
left to the tests with CUDA's own compiler and to those on a device.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callgate._build import toolchain

_BEFORE = """
#include <math.h>
#include <stdlib.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct Dim { unsigned x = 1, y = 1, z = 1; };
static Dim blockIdx, threadIdx, gridDim, blockDim;
"""
_AFTER = """
template <class... T, std::size_t... I>
void call(void (*kernel)(T...), void** values, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<T>*>(values[I])...);
}
template <class... T>
void call(void (*kernel)(T...), void** values) {
  call(kernel, values, std::index_sequence_for<T...>());
}
extern "C" void run(unsigned grid, unsigned block, void** values) {
  gridDim.x = grid, blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) call(&ENTRY, values);
}
"""


@functools.cache
def build(source: str, entry: str) -> Any:
  """A CUDA source as a library of the host; skips the test where there is no compiler."""
  compiler = shutil.which("g++") or shutil.which("clang++")
  if compiler is None:
    pytest.skip("no C++ compiler to run the CUDA source with")
  text = _BEFORE + source + _AFTER.replace("ENTRY", entry)
  digest = hashlib.sha256(text.encode()).hexdigest()[:16]
  folder = Path(tempfile.mkdtemp(prefix=f"callgate-host-cuda-{digest}-"))
  unit, library = folder / "unit.cc", folder / "unit.so"
  unit.write_text(text)
  command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(unit), "-o", str(library)]
  done = subprocess.run(
    [*command, f"-I{toolchain.include_dir()}"], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  loaded = ctypes.CDLL(str(library))
  shutil.rmtree(folder)
  return loaded


def run(library: Any, launch: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
  """One launch, with the arrays' own memory."""
  arrays = {"operand": operands, "result": results}
  held: list[Any] = []
  for parameter in launch.parameters:
    data = bytearray(parameter.data)
    for address in parameter.addresses:
      pointer = arrays[address.of][address.index].ctypes.data
      data[address.offset : address.offset + 8] = np.uint64(pointer).tobytes()
    held.append(aligned(bytes(data)))
  values = (ctypes.c_void_p * len(held))(*(h.ctypes.data for h in held))
  library.run(launch.grid[0], launch.block[0], values)


def aligned(data: bytes) -> np.ndarray[Any, Any]:
  """A copy at an address that suits any type."""
  room = np.zeros(len(data) + 16, np.uint8)
  start = -room.ctypes.data % 16
  room[start : start + len(data)] = np.frombuffer(data, np.uint8)
  return room[start : start + len(data)]
