# SPDX-License-Identifier: Apache-2.0
"""CUDA without a GPU: the fake driver of virtual_gpu/fake_driver for tests in Python.

`open_fake()` builds the fake driver and XLA's side of an FFI call, once for each version of their
sources, makes the driver callgate's, and gives the process's one `FakeCuda`. The fixture `fake` in
conftest.py wraps it: it clears what earlier tests did and fails a test whose work broke a rule of
CUDA's. Programs run with `fake_programs`; what the parts of the driver do is told in
virtual_gpu/fake_driver/fakecuda.h.

Memory and streams made here are the test's own; `live()` counts callgate's alone. Kernels and works
given as Python functions run on a stream's thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

_ROOT = Path(__file__).parents[3]
_DRIVER = _ROOT / "virtual_gpu" / "fake_driver"
_INTERPRETER = _ROOT / "virtual_gpu" / "ptx" / "ptx.h"  # which the driver includes
_RUNNER = _ROOT / "tests" / "ffi_runner"

ILLEGAL_ADDRESS, LAUNCH_FAILED, OUT_OF_MEMORY = 700, 719, 2

_KERNEL = ctypes.CFUNCTYPE(
  ctypes.c_int,
  ctypes.POINTER(ctypes.c_void_p),
  ctypes.POINTER(ctypes.c_uint),
  ctypes.POINTER(ctypes.c_uint),
  ctypes.c_uint,
  ctypes.c_void_p,
)
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Launch(ctypes.Structure):
  _fields_ = (
    ("name", ctypes.c_char_p),
    ("grid", ctypes.c_uint * 3),
    ("block", ctypes.c_uint * 3),
    ("cluster", ctypes.c_uint * 3),
    ("shared_bytes", ctypes.c_uint),
    ("stream", ctypes.c_void_p),
    ("replayed", ctypes.c_int),
  )


class _Live(ctypes.Structure):
  _fields_ = tuple(
    (name, ctypes.c_size_t)
    for name in (
      "device_allocations",
      "device_bytes",
      "pinned_allocations",
      "pinned_bytes",
      "streams",
      "events",
      "modules",
      "graphs",
    )
  )


@dataclasses.dataclass(frozen=True)
class Launch:
  """A kernel's launch; `cluster` is (0, 0, 0) where none was asked for."""

  name: str
  grid: tuple[int, ...]
  block: tuple[int, ...]
  cluster: tuple[int, ...]
  shared_bytes: int
  stream: int
  replayed: bool


# -- building ------------------------------------------------------------------------------------
def _compile(compiler: str, folder: Path, name: str, sources: list[Path], *flags: str) -> Path:
  library = folder / name
  if library.exists():
    return library
  part = folder / f"{name}.{os.getpid()}"
  command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", *flags]
  together = "".join(
    f'#include "{file}"\n' for file in sources
  )  # a third of the time of one by one
  done = subprocess.run(
    [*command, "-x", "c++", "-", "-o", str(part)],
    input=together,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  part.replace(library)  # at once, whoever builds it too
  return library


def _build() -> tuple[Path, Path]:
  """The fake driver and the runner, as files; skips the test where there is no compiler."""
  compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
  if compiler is None:
    pytest.skip("no C++ compiler, which the fake CUDA driver is built with")
  include = jax.ffi.include_dir()
  driver, runner = sorted(_DRIVER.glob("*.cc")), sorted(_RUNNER.glob("*.cc"))
  files = [*driver, *runner, *sorted(_DRIVER.glob("*.h")), *sorted(_RUNNER.glob("*.h"))]
  files.append(_INTERPRETER)
  text = b"".join(file.read_bytes() for file in files) + include.encode() + compiler.encode()
  user = os.getuid() if hasattr(os, "getuid") else 0
  folder = Path(tempfile.gettempdir()) / f"callgate-fake-cuda-{user}"
  folder = folder / hashlib.blake2b(text, digest_size=12).hexdigest()
  folder.mkdir(parents=True, exist_ok=True)
  return (
    _compile(compiler, folder, "libfake_cuda.so", driver),
    _compile(compiler, folder, "libcallgate_runner.so", runner, f"-I{include}"),
  )


# -- what tests hold -----------------------------------------------------------------------------
class DeviceArray:
  """An array in a device's memory, freed when it is dropped and no work uses it any more.

  The host can't touch what `pointer` points to.
  """

  def __init__(self, fake: FakeCuda, shape: Sequence[int], dtype: Any, device: int) -> None:
    self.fake, self.shape, self.device = fake, tuple(shape), device
    self.dtype = np.dtype(dtype)
    self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
    self.pointer: int = fake.driver.fakecuda_new_memory(device, self.nbytes)
    assert self.pointer, f"no memory on device {device}: expected one below the number of devices"

  def __del__(self) -> None:
    if getattr(self, "pointer", 0):
      self.fake.driver.fakecuda_drop_memory(self.pointer)

  def get(self) -> np.ndarray[Any, Any]:
    """The memory's content now; work that is under way is not waited for."""
    out = np.empty(self.shape, self.dtype)
    assert self.fake.driver.fakecuda_read(out.ctypes.data, self.pointer, self.nbytes) == 0
    return out

  def set(self, array: Any) -> None:
    """Writes the memory now, past all streams."""
    array = np.ascontiguousarray(np.broadcast_to(np.asarray(array, self.dtype), self.shape))
    assert self.fake.driver.fakecuda_write(self.pointer, array.ctypes.data, self.nbytes) == 0

  def view(self) -> np.ndarray[Any, Any]:
    """The memory itself; for functions that run on a stream."""
    return self.fake.view(self.pointer, self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Stream:
  """A stream of the fake driver's; `handle` is what CUDA calls it."""

  fake: FakeCuda
  handle: int

  @property
  def device(self) -> int:
    return self.fake.driver.fakecuda_device_of(self.handle)

  def hold(self) -> None:
    """From now on nothing of it runs, until it is released."""
    self.fake.driver.fakecuda_hold(self.handle)

  def release(self) -> None:
    self.fake.driver.fakecuda_release(self.handle)

  def finish(self) -> int:
    """Waits until it has nothing to do; what it failed with, 0 if it did not."""
    return self.fake.driver.fakecuda_finish(self.handle)

  def queued(self) -> int:
    """How many works it was given that have not ended."""
    return self.fake.driver.fakecuda_queued(self.handle)

  def fail(self, result: int = LAUNCH_FAILED) -> None:
    """Its next work fails, and all that comes after it."""
    self.fake.driver.fakecuda_fail_stream(self.handle, result)

  def enqueue(
    self,
    function: Callable[[], object] | None,
    *,
    reads: Sequence[DeviceArray] = (),
    writes: Sequence[DeviceArray] = (),
  ) -> None:
    """Work for the stream: a Python function, with the arrays that it reads and writes."""
    call = _WORK() if function is None else _WORK(lambda _: function() and None)
    self.fake.keep(call)
    pointers = [(ctypes.c_uint64 * len(x))(*(a.pointer for a in x)) for x in (reads, writes)]
    result = self.fake.driver.fakecuda_enqueue(
      self.handle, call, None, pointers[0], len(reads), pointers[1], len(writes)
    )
    assert result == 0, f"fakecuda_enqueue: error {result}"

  def begin_capture(self) -> None:
    assert self.fake.driver.fakecuda_begin_capture(self.handle) == 0

  def end_capture(self) -> Graph | None:
    """None where the capture was invalidated."""
    graph = self.fake.driver.fakecuda_end_capture(self.handle)
    return Graph(self.fake, graph) if graph else None


class Graph:
  """A captured graph; it keeps alive what its work uses, once told so in `kept`."""

  def __init__(self, fake: FakeCuda, handle: int) -> None:
    self.fake, self.handle = fake, handle
    self.kept: list[Any] = []

  def __del__(self) -> None:
    self.fake.driver.fakecuda_delete_graph(self.handle)

  def __len__(self) -> int:
    return self.fake.driver.fakecuda_graph_size(self.handle)

  def replay(self, stream: Stream) -> None:
    result = self.fake.driver.fakecuda_replay(self.handle, stream.handle)
    assert result == 0, f"fakecuda_replay: error {result}"


class FakeCuda:
  """The fake driver. One a process; `open_fake()` gives it."""

  def __init__(self, path: Path, runner: Path) -> None:
    self.path = path
    self.driver = ctypes.CDLL(str(path))
    self.runner = ctypes.CDLL(str(runner))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, *arguments in (
      ("new_stream", pointer, integer),
      ("new_memory", ctypes.c_uint64, integer, size),
      ("drop_memory", None, ctypes.c_uint64),
      ("read", integer, pointer, ctypes.c_uint64, size),
      ("write", integer, ctypes.c_uint64, pointer, size),
      ("host", pointer, ctypes.c_uint64),
      ("enqueue", integer, pointer, _WORK, pointer, pointer, size, pointer, size),
      ("register_kernel", None, ctypes.c_char_p, _KERNEL, size, pointer, pointer),
      ("declare", None, ctypes.c_char_p, size, integer),
      ("image_of", size, pointer, pointer, size),
      ("end_capture", pointer, pointer),
      ("replay", integer, pointer, pointer),
      ("graph_size", size, pointer),
      ("delete_graph", None, pointer),
      ("launch_count", size),
      ("violation_count", size),
      ("violation_at", ctypes.c_char_p, size),
      ("launch_at", integer, size, pointer),
      ("calls", size, ctypes.c_char_p),
      ("streams", size, pointer, size),
      ("queued", size, pointer),
      ("fail", None, ctypes.c_char_p, integer, integer, integer),
      ("fail_stream", None, pointer, integer),
      ("delay_copies", None, ctypes.c_uint),
      *((n, integer, pointer) for n in ("hold", "release", "finish", "device_of", "begin_capture")),
    ):
      function = getattr(self.driver, f"fakecuda_{name}")
      function.restype, function.argtypes = result, arguments
    address = lambda name: ctypes.cast(getattr(self.driver, name), ctypes.c_void_p)
    self.runner.runner_use_memory(address("fakecuda_new_memory"), address("fakecuda_delete_memory"))
    self._kept: list[Any] = []
    self._kernels: list[Any] = []

  def keep(self, value: Any) -> None:
    """Keeps something until `forget()`: a stream may call it at any time."""
    self._kept.append(value)

  def forget(self) -> None:
    """Drops what was kept, when no stream has work and no graph will be replayed."""
    self._kept.clear()

  # -- arrays and streams
  def put(self, array: Any, device: int = 0) -> DeviceArray:
    array = np.asarray(array)
    out = DeviceArray(self, array.shape, array.dtype, device)
    out.set(array)
    return out

  def empty(self, shape: Sequence[int], dtype: Any, device: int = 0) -> DeviceArray:
    return DeviceArray(self, shape, dtype, device)

  def view(self, pointer: int, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """The memory at a device pointer, as the device itself sees it; for kernels."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    at = self.driver.fakecuda_host(pointer)
    assert at, f"no device memory at {pointer:#x}"
    return np.frombuffer((ctypes.c_char * size).from_address(at), dtype).reshape(shape)

  def stream(self, device: int = 0) -> Stream:
    handle = self.driver.fakecuda_new_stream(device)
    assert handle, f"no device {device}"
    return Stream(self, handle)

  def streams(self) -> list[Stream]:
    """All that are alive, callgate's too, in the order in which they were made."""
    handles, count = (ctypes.c_void_p * 0)(), 256
    while count > len(handles):
      handles = (ctypes.c_void_p * count)()
      count = self.driver.fakecuda_streams(handles, count)
    return [Stream(self, handle) for handle in handles[:count] if handle]

  # -- time and faults
  def hold_all(self, hold: bool = True) -> None:
    """Holds all streams, those that are made later too."""
    self.driver.fakecuda_hold_all(int(hold))

  def delay_copies(self, seconds: float) -> None:
    self.driver.fakecuda_delay_copies(int(seconds * 1e6))

  def fail(self, symbol: str, result: int, *, after: int = 0, count: int = 1) -> None:
    """Calls of a function of the driver fail: `count` of them, after `after` that don't."""
    self.driver.fakecuda_fail(symbol.encode(), result, after, count)

  def lose(self, lost: bool = True) -> None:
    """The device is gone: every call fails."""
    self.driver.fakecuda_lose(int(lost))

  # -- kernels
  def register_kernel(
    self,
    name: str,
    function: Callable[..., object] | None,
    sizes: Sequence[int],
    *,
    reads: Sequence[int] = (),
    writes: Sequence[int] = (),
  ) -> None:
    """Defines the launches of a kernel.

    Args:
      name: as the module has it.
      function: called with the parameters as bytes, the grid and the block. None does nothing.
      sizes: in bytes, of its parameters.
      reads: which of them point to what it reads.
      writes: to what it writes.
    """

    def call(parameters: Any, grid: Any, block: Any, _shared: int, _user: Any) -> int:
      values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
      assert function is not None
      function(values, tuple(grid[:3]), tuple(block[:3]))
      return 0

    kernel = _KERNEL() if function is None else _KERNEL(call)
    self._kernels.append(kernel)  # the driver knows it until the process ends
    array = (ctypes.c_size_t * len(sizes))(*sizes)
    self.driver.fakecuda_register_kernel(name.encode(), kernel, len(sizes), array, None)
    for index in {*reads, *writes}:
      access = (index in reads) + 2 * (index in writes)
      self.driver.fakecuda_declare(name.encode(), index, access)

  def image_of(self, function: int) -> bytes:
    """The image from which the module of a function was loaded."""
    size = self.driver.fakecuda_image_of(function, None, 0)
    text = ctypes.create_string_buffer(size)
    self.driver.fakecuda_image_of(function, text, size)
    return text.raw

  # -- what happened
  def launches(self) -> list[Launch]:
    """Launches that have run, in the order in which they did."""
    out: list[Launch] = []
    for index in range(self.driver.fakecuda_launch_count()):
      one = _Launch()
      self.driver.fakecuda_launch_at(index, ctypes.byref(one))
      sizes = tuple(one.grid), tuple(one.block), tuple(one.cluster)
      name = one.name.decode()
      out.append(Launch(name, *sizes, one.shared_bytes, one.stream or 0, bool(one.replayed)))
    return out

  def violations(self) -> list[str]:
    """Rules of CUDA's that were broken."""
    texts = map(self.driver.fakecuda_violation_at, range(self.driver.fakecuda_violation_count()))
    return [text.decode() for text in texts if text]

  def calls(self, symbol: str) -> int:
    """How often a function of the driver was called."""
    return self.driver.fakecuda_calls(symbol.encode())

  def live(self) -> dict[str, int]:
    """The number of live objects of callgate's, by kind."""
    live = _Live()
    self.driver.fakecuda_count_live(ctypes.byref(live))
    return {name: getattr(live, name) for name, _ in _Live._fields_}

  def clear(self) -> None:
    """Forgets faults, violations, launches and counts of calls; held streams go on."""
    self.driver.fakecuda_clear()


@functools.cache
def open_fake() -> FakeCuda:
  """The process's fake driver, which is callgate's from now on. Skips the test if it can't be."""
  path, runner = _build()
  before = os.environ.get("CALLGATE_CUDA_DRIVER")
  if before not in (None, str(path)):
    pytest.skip(f"CALLGATE_CUDA_DRIVER names another driver: {before}")
  os.environ["CALLGATE_CUDA_DRIVER"] = str(path)
  return FakeCuda(path, runner)


run_ids = itertools.count(1)
