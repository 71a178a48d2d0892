# SPDX-License-Identifier: Apache-2.0
"""A library of arrays on the fake driver: what CuPy or PyTorch do on a GPU, for tests of gates.

`kernel` enqueues a NumPy function over device memory on a stream; `Array` is what such a library
returns, with either protocol. `read_capsule` looks into a DLPack capsule.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_cuda import DeviceArray, FakeCuda, Stream

LEGACY = 1  # the default stream, as the protocols number it


@dataclasses.dataclass(frozen=True)
class Memory:
  """Device memory as `Stream.enqueue` takes it."""

  pointer: int


def memory_of(array: Any) -> Memory:
  """The memory of a Buffer, or of an array of the tests' own."""
  return Memory(array.pointer if hasattr(array, "pointer") else array._data)


def kernel(
  fake: FakeCuda,
  function: Callable[..., object],
  *,
  reads: Sequence[Any] = (),
  writes: Sequence[Any] = (),
  stream: int,
) -> None:
  """Runs `function` on NumPy arrays over the memory of `reads`, then `writes`, on the stream."""
  views = [
    fake.view(memory_of(a).pointer, a.shape, a.dtype) for a in (*reads, *writes) if np.prod(a.shape)
  ]
  Stream(fake, stream).enqueue(
    lambda: (function(*views), None)[1],
    reads=[memory_of(a) for a in reads],  # pyright: ignore[reportArgumentType]
    writes=[memory_of(a) for a in writes],  # pyright: ignore[reportArgumentType]
  )


def copy(fake: FakeCuda, source: Any, target: Any, stream: int) -> None:
  """target[...] = source, on the stream."""
  kernel(
    fake, lambda a, b: np.copyto(b, a), reads=[source], writes=[target], stream=stream
  ) if np.prod(source.shape) else None


class Array:
  """An array with CUDA's array interface; `stream` is that of the work on it."""

  def __init__(self, memory: DeviceArray, stream: int | None, **entries: Any) -> None:
    self.memory, self.stream, self.entries = memory, stream, entries
    self.shape, self.dtype, self.pointer = memory.shape, memory.dtype, memory.pointer

  @property
  def __cuda_array_interface__(self) -> dict[str, Any]:
    return {
      "shape": self.shape,
      "typestr": self.dtype.str,
      "data": (self.pointer, False),
      "strides": None,
      "version": 3,
      "stream": self.stream,
      **self.entries,
    }


# -- DLPack --------------------------------------------------------------------------------------
class Tensor(ctypes.Structure):
  """DLTensor."""

  _fields_ = (
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
  )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
  _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


class _Versioned(ctypes.Structure):
  _fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", _DELETER),
    ("flags", ctypes.c_uint64),
    ("tensor", Tensor),
  )


@dataclasses.dataclass(frozen=True)
class Read:
  """The fields of a capsule."""

  name: str
  data: int
  device: tuple[int, int]
  dtype: tuple[int, int, int]
  shape: tuple[int, ...]
  strides: tuple[int, ...]
  version: tuple[int, int] | None
  flags: int | None


_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_api.PyCapsule_GetName.argtypes, _api.PyCapsule_GetName.restype = (
  [ctypes.py_object],
  ctypes.c_char_p,
)
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_New.restype = ctypes.py_object


def read_capsule(capsule: Any) -> Read:
  """Reads a capsule that nobody has consumed."""
  name = _api.PyCapsule_GetName(capsule)
  pointer = _api.PyCapsule_GetPointer(capsule, name)
  assert pointer is not None
  versioned = name == b"dltensor_versioned"
  managed = (_Versioned if versioned else _Managed).from_address(pointer)
  tensor: Tensor = managed.tensor
  return Read(
    name.decode(),
    tensor.data or 0,
    (tensor.device_type, tensor.device_id),
    (tensor.code, tensor.bits, tensor.lanes),
    tuple(tensor.shape[: tensor.ndim]),
    tuple(tensor.strides[: tensor.ndim]),
    (managed.major, managed.minor) if versioned else None,
    managed.flags if versioned else None,
  )


class DlpackArray:
  """An array with DLPack alone, of version 0; notes the streams that consumers name."""

  CODES = types.MappingProxyType({"i": 0, "u": 1, "f": 2, "c": 5, "b": 6})

  def __init__(self, memory: DeviceArray, strides: Sequence[int] | None = None) -> None:
    self.memory, self.streams = memory, []
    self.shape, self.dtype, self.pointer = memory.shape, memory.dtype, memory.pointer
    self.strides = strides

  def __dlpack_device__(self) -> tuple[int, int]:
    return 2, self.memory.device

  def __dlpack__(self, *, stream: int | None = None) -> Any:
    self.streams.append(stream)
    rank = len(self.shape)
    managed = _Managed()
    managed.tensor.data = self.pointer
    managed.tensor.device_type, managed.tensor.device_id = 2, self.memory.device
    managed.tensor.ndim = rank
    managed.tensor.code = self.CODES[self.dtype.kind]
    managed.tensor.bits, managed.tensor.lanes = self.dtype.itemsize * 8, 1
    self._shape = (ctypes.c_int64 * max(rank, 1))(*self.shape)
    managed.tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
    if self.strides is not None:
      self._strides = (ctypes.c_int64 * max(rank, 1))(*self.strides)
      managed.tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
    _alive[ctypes.addressof(managed)] = managed, self
    return _api.PyCapsule_New(ctypes.addressof(managed), b"dltensor", _destructor_pointer)


_alive: dict[int, Any] = {}


@_DESTRUCTOR
def _destructor(capsule: int) -> None:
  get = ctypes.pythonapi["PyCapsule_GetPointer"]
  get.argtypes, get.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
  _alive.pop(get(capsule, b"dltensor"), None)


_destructor_pointer = ctypes.cast(_destructor, ctypes.c_void_p)
