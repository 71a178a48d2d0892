"""What a call of a CUDA kernel launches: functions of a compiled image with their parameters.

Worked out when the call is lowered, from the shapes of one lane and the static arguments, and held
by the program as plain numbers: the runtime fills in addresses and launches, without Python.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, Literal

import numpy as np

Extent = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Image:
  """Machine code, or PTX for the driver to compile.

  Attributes:
    code: a cubin, or PTX as text that ends in a zero byte.
    capability: the compute capability that a cubin is for, as 90; 0 for PTX.
  """

  code: bytes
  capability: int


@dataclasses.dataclass(frozen=True)
class Address:
  """An address that the runtime writes into a parameter.

  Attributes:
    offset: where in the parameter, in bytes.
    of: what it is the address of: the call's operands, its results, or scratch memory.
    index: which of them, counted flat.
  """

  offset: int
  of: Literal["operand", "result", "scratch"]
  index: int


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter of a kernel, by value, as it lies in memory."""

  data: bytes
  addresses: tuple[Address, ...] = ()

  @staticmethod
  def pointer(of: Literal["operand", "result", "scratch"], index: int) -> Parameter:
    """A pointer to an array."""
    return Parameter(bytes(8), (Address(0, of, index),))

  @staticmethod
  def scalar(value: Any, dtype: Any) -> Parameter:
    """A number of a dtype."""
    return Parameter(np.asarray(value, dtype=dtype).tobytes())

  @staticmethod
  def null() -> Parameter:
    """A null pointer."""
    return Parameter(struct.pack("<Q", 0))


@dataclasses.dataclass(frozen=True)
class Launch:
  """One launch.

  Attributes:
    entry: the function's name in the image, mangled if it is.
    grid: blocks along x, y and z.
    block: threads along x, y and z.
    shared: bytes of dynamic shared memory.
    cluster: blocks of a cluster along x, y and z; None for none.
    parameters: in the function's order.
  """

  entry: str
  grid: Extent
  block: Extent
  parameters: tuple[Parameter, ...]
  shared: int = 0
  cluster: Extent | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that one call of a kernel does on the device.

  Attributes:
    key: names the images among the kernel's variants; the same in every process.
    images: one for each compute capability that it was compiled for.
    launches: in order, on one stream.
    scratch: bytes of each block of scratch memory, from XLA's allocator.
    zeroed: results that are set to zero first, by flat position.
  """

  key: str
  images: tuple[Image, ...]
  launches: tuple[Launch, ...]
  scratch: tuple[int, ...] = ()
  zeroed: tuple[int, ...] = ()
