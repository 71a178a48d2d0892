# SPDX-License-Identifier: Apache-2.0
"""The GPU that subjects run on, and the floor on it: `raw_cuda.cc` by ctypes."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness
from benchmarks.peers import raw

SOURCE = Path(__file__).parent / "raw_cuda.cc"
HANDLERS = ("bench_cuda_launch", "bench_cuda_launch_graph")
TO_HOST, THERE_AND_BACK, ON_DEVICE = range(3)
_DISTRIBUTIONS = (
  "jax-cuda12-plugin",
  "jax-cuda13-plugin",
  "cuda-core",
  "cupy-cuda12x",
  "cupy-cuda13x",
  "jax-triton",
  "numba-cuda",
  "nvidia-cuda-nvrtc",
  "nvidia-cuda-nvrtc-cu12",
  "triton",
)


def device() -> jax.Device:
  """The first CUDA device.

  Raises:
    NoDevice: JAX has none.
  """
  try:
    return jax.devices("cuda")[0]
  except RuntimeError as error:
    reason = str(error).splitlines()[0]
    raise harness.NoDevice(f"needs a CUDA device that JAX can use, got none ({reason})") from error


def described() -> dict[str, Any]:
  """The device, its driver and the versions of what is for it."""
  found = device()
  file = Path("/proc/driver/nvidia/version")
  kernel = (
    re.search(r"(\d+\.\d+(?:\.\d+)?)", file.read_text(encoding="utf-8")) if file.exists() else None
  )
  return {
    "name": found.device_kind,
    "compute_capability": getattr(found, "compute_capability", None),
    "driver": kernel[1] if kernel else None,
    "cuda": _loaded()[1],
    "versions": {name: v for name in _DISTRIBUTIONS if (v := harness.version_of(name)) is not None},
  }


def launch(spec: jax.ShapeDtypeStruct, *, graph: bool = False) -> Callable[..., Any]:
  """A traceable function of one array that launches an empty kernel, by a hand-written handler.

  Args:
    spec: the result.
    graph: whether the handler may be captured into CUDA graphs.
  """
  _loaded()
  return jax.ffi.ffi_call(HANDLERS[graph], spec)


def launches(count: int) -> Callable[[], object]:
  """So many launches of an empty kernel by the driver alone, waited for."""
  library, _ = _loaded()
  return lambda: _check(library.bench_cuda_launches(count))


def copies(nbytes: int, way: int, count: int) -> Callable[[], object]:
  """So many copies between pinned and device memory, waited for.

  Args:
    nbytes: of each copy.
    way: TO_HOST, THERE_AND_BACK or ON_DEVICE.
    count: how many.
  """
  library, _ = _loaded()
  size = ctypes.c_size_t(nbytes)
  room(nbytes)
  return lambda: _check(library.bench_cuda_copies(size, way, count))


_room = 0


def room(nbytes: int) -> None:
  """Memory for copies of at most so many bytes, kept; 0 gives it back."""
  global _room
  if nbytes > _room or not nbytes:
    library, _ = _loaded()
    _check(library.bench_cuda_room(ctypes.c_size_t(nbytes)))
    _room = nbytes


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, str]:
  """The library, and the driver's version of CUDA."""
  found = device()
  library = ctypes.CDLL(str(raw.compiled(SOURCE, jax.ffi.include_dir())))
  for name in ("load", "launches", "room", "copies"):
    getattr(library, f"bench_cuda_{name}").restype = ctypes.c_char_p
  version = ctypes.c_int()
  _check(library.bench_cuda_load(found.local_hardware_id or 0, ctypes.byref(version)))
  for name in HANDLERS:
    handler = jax.ffi.pycapsule(getattr(library, name))
    jax.ffi.register_ffi_target(name, handler, platform="CUDA")
  return library, f"{version.value // 1000}.{version.value % 1000 // 10}"


def _check(failure: bytes | None) -> None:
  if failure is not None:
    raise RuntimeError(f"the driver: {failure.decode()}")
