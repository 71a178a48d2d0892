# SPDX-License-Identifier: Apache-2.0
"""A GPU's arrays for array libraries: CuPy's, PyTorch's and Numba's, on XLA's stream.

A `GpuLibrary` converts the runtime's Buffers to the library's arrays without a copy. It runs the
callable with XLA's stream and the program's GPU as the current ones. Each library is imported by
the first call that needs it. All of this runs under the GIL, on XLA's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from callgate._arrays.torch import to_numpy, torch_converter
from callgate._core import extras, options
from callgate._core.errors import GateDefinitionError

KINDS = ("buffer", "cupy", "torch", "numba")
# The package to install for each library, and the module to import.
_EXTRAS = {
  "cupy": ("CuPy", "cupy", "cupy"),
  "torch": ("PyTorch", "torch", "torch"),
  "numba": ("Numba for CUDA", "numba.cuda", "numba-cuda"),
  "cuda": ("cuda-python", "cuda.bindings.driver", "cuda"),
}
STREAMS = tuple(_EXTRAS)


class GpuLibrary(NamedTuple):
  """A library's functions for callables on a GPU."""

  convert: Callable[[Any], Any]  # makes the library's array from a Buffer on a GPU
  result: Callable[[Any], Any]  # converts a returned value to one that the runtime can copy
  # Calls a function with this stream (an address) of this GPU (its number) as the current one.
  run: Callable[[int, int, Callable[[], Any]], Any]


@functools.cache  # at most one entry for each library
def library(kind: str) -> GpuLibrary:
  """Imports the library of `arrays=kind`; raises GateDefinitionError if it is not installed."""
  if kind == "buffer":
    return GpuLibrary(same, returned, lambda stream, ordinal, function: function())
  return {"cupy": _cupy, "torch": _torch, "numba": _numba}[kind]()


def stream_as(library: str, stream: int, ordinal: int) -> Any:
  """Returns XLA's stream, an address, as a library's object; ordinal -1 is the CPU."""
  options.choice("Context.stream_as", "library", library, STREAMS)
  who = f"Context.stream_as({library!r})"
  if ordinal < 0:
    got = "a call on the CPU, which has no stream"
    raise GateDefinitionError(f"{who}: expected a call on a CUDA device, got {got}")
  module = _import(library, who)
  if library in ("cupy", "torch"):
    return (_cupy_stream if library == "cupy" else _torch_stream)(module, stream, ordinal)
  return module.external_stream(stream) if library == "numba" else module.CUstream(stream)


def _import(name: str, who: str) -> Any:
  title, module, extra = _EXTRAS[name]
  return extras.library(module, title, extra, by=who)


def returned(value: Any) -> Any:
  """Returns a returned array for the runtime; makes PyTorch's tensors detached and contiguous."""
  if hasattr(value, "data_ptr") and hasattr(value, "detach") and value.is_cuda:
    return value.detach().resolve_conj().resolve_neg().contiguous()
  return to_numpy(value)


def same(value: Any) -> Any:
  return value


# -- CuPy ----------------------------------------------------------------------------------------
def _cupy() -> GpuLibrary:
  cupy = _import("cupy", "arrays='cupy'")

  def convert(buffer: Any) -> Any:
    try:
      if not buffer.size:
        return cupy.empty(buffer.shape, buffer.dtype)
      # The owner keeps the Buffer, whose references show if an array outlives the call.
      ordinal = buffer.__dlpack_device__()[1]
      memory = cupy.cuda.UnownedMemory(buffer._data, buffer.nbytes, buffer, device_id=ordinal)
      pointer = cupy.cuda.MemoryPointer(memory, 0)
      return cupy.ndarray(buffer.shape, buffer.dtype, memptr=pointer)
    except (TypeError, ValueError) as error:
      has = f"CuPy has no arrays of {buffer.dtype.name} ({error})"
      use = "use arrays='buffer' or 'torch', or convert the array in the program"
      raise TypeError(f"arrays='cupy': {has}; {use}") from error

  def result(value: Any) -> Any:
    return cupy.ascontiguousarray(value) if isinstance(value, cupy.ndarray) else returned(value)

  def run(stream: int, ordinal: int, function: Callable[[], Any]) -> Any:
    with cupy.cuda.Device(ordinal), _cupy_stream(cupy, stream, ordinal):
      return function()

  return GpuLibrary(convert, result, run)


class _Stream:
  """A stream in the protocol of CUDA's Python libraries; CuPy supports it since version 14."""

  def __init__(self, stream: int) -> None:
    self._stream = stream

  def __cuda_stream__(self) -> tuple[int, int]:
    return 0, self._stream  # the protocol's version, and the address


@functools.lru_cache(maxsize=64)
def _cupy_stream(cupy: Any, stream: int, ordinal: int) -> Any:
  if not hasattr(cupy.cuda.Stream, "from_external"):
    return cupy.cuda.ExternalStream(stream, ordinal)
  with cupy.cuda.Device(ordinal):
    return cupy.cuda.Stream.from_external(_Stream(stream))


# -- PyTorch -------------------------------------------------------------------------------------
def _torch() -> GpuLibrary:
  torch = _import("torch", "arrays='torch'")

  def run(stream: int, ordinal: int, function: Callable[[], Any]) -> Any:
    # The block also makes the stream's device the current one.
    with torch.cuda.stream(_torch_stream(torch, stream, ordinal)):
      return function()

  return GpuLibrary(torch_converter(), returned, run)


@functools.lru_cache(maxsize=64)
def _torch_stream(torch: Any, stream: int, ordinal: int) -> Any:
  return torch.cuda.ExternalStream(stream, device=torch.device("cuda", ordinal))


# -- Numba ---------------------------------------------------------------------------------------
def _numba() -> GpuLibrary:
  cuda = _import("numba", "arrays='numba'")

  def run(stream: int, ordinal: int, function: Callable[[], Any]) -> Any:
    del stream  # Numba has no current stream
    with cuda.gpus[ordinal]:
      return function()

  # Without waiting, because the array's `stream` is XLA's, and the runtime makes the default stream
  # wait.
  return GpuLibrary(functools.partial(cuda.as_cuda_array, sync=False), returned, run)
