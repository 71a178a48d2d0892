"""What a call of a CUDA kernel launches: functions of a compiled image with their parameters.

Worked out when the call is lowered, from the shapes of one lane and the static arguments, and held
by the program as plain numbers: the runtime fills in addresses and launches, without Python.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from callgate._build.nvrtc import Image
from callgate._core import attributes
from callgate._core.errors import GateDefinitionError

Extent = tuple[int, int, int]


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


# -- limits --------------------------------------------------------------------------------------
_GRID = (2**31 - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)
_THREADS = 1024
_CLUSTER = 16  # blocks; more than 8 where the device allows it
_AXES = "xyz"


def extent(label: str, what: str, value: Any) -> Extent:
  """An int or a tuple of up to three as x, y and z; what is left out is 1.

  Args:
    label: the kernel, for messages.
    what: the option.
    value: as given.
  """
  values = tuple(value) if isinstance(value, (tuple, list)) else (value,)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
  if not 1 <= len(values) <= 3 or not all(_is_int(v) for v in values):
    raise GateDefinitionError(
      f"{label}: {what}: expected an int or a tuple of up to three, got {value!r}"
    )
  x, y, z = (*(int(v) for v in values), 1, 1)[:3]
  return x, y, z


def checked(
  label: str, grid: Any, block: Any, shared: Any = 0, cluster: Any = None
) -> tuple[Extent, Extent, int, Extent | None]:
  """A launch's configuration within CUDA's limits.

  Args:
    label: the kernel, for messages.
    grid: blocks; an extent of 0, of an array without elements, launches nothing.
    block: threads of a block.
    shared: bytes of dynamic shared memory.
    cluster: blocks of a cluster, or None.

  Raises:
    GateDefinitionError: one of them is outside the limits, or not an extent.
  """
  blocks = extent(label, "grid", grid)
  threads = extent(label, "block", block)
  for axis in range(3):
    _within(label, f"grid.{_AXES[axis]}", blocks[axis], 0, _GRID[axis])
    _within(label, f"block.{_AXES[axis]}", threads[axis], 1, _BLOCK[axis])
  product = threads[0] * threads[1] * threads[2]
  if product > _THREADS:
    raise GateDefinitionError(
      f"{label}: block: expected at most {_THREADS} threads, got {threads}, which are {product}"
    )
  if not _is_int(shared) or not 0 <= shared < 2**31:
    raise GateDefinitionError(
      f"{label}: shared: expected bytes of dynamic shared memory, got {shared!r}"
    )
  if cluster is None:
    return blocks, threads, int(shared), None
  groups = extent(label, "cluster", cluster)
  count = groups[0] * groups[1] * groups[2]
  if min(groups) < 1 or count > _CLUSTER:
    raise GateDefinitionError(f"{label}: cluster: expected 1 to {_CLUSTER} blocks, got {groups}")
  if any(b % c for b, c in zip(blocks, groups, strict=True)):
    raise GateDefinitionError(
      f"{label}: cluster: expected extents that divide the grid's, {blocks}; got {groups}"
    )
  return blocks, threads, int(shared), groups


def _is_int(value: Any) -> bool:
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _within(label: str, what: str, value: int, least: int, most: int) -> None:
  if not least <= value <= most:
    raise GateDefinitionError(f"{label}: {what}: expected {least} to {most}, got {value}")


# -- as programs hold it -------------------------------------------------------------------------
_OF = ("operand", "result", "scratch")
_ALIGNMENT = 16  # of a parameter; more than any type asks for


def encode(label: str, plan: Plan) -> dict[str, Any]:
  """A plan as src/cuda/launch_plan.cc reads it; without its images.

  Args:
    label: the kernel, for messages.
    plan: what to write down.
  """
  return {
    "scratch": _integers(plan.scratch),
    "zeroed": _integers(plan.zeroed),
    "launches": attributes.listed(_launch(label, launch) for launch in plan.launches),
  }


def _launch(label: str, launch: Launch) -> dict[str, Any]:
  if not launch.entry:
    raise GateDefinitionError(f"{label}: expected a function's name as the image has it, got none")
  block, starts, addresses = b"", list[int](), list[int]()
  for parameter in launch.parameters:
    block += bytes(-len(block) % _ALIGNMENT)
    starts.append(len(block))
    for address in parameter.addresses:
      addresses += [len(block) + address.offset, _OF.index(address.of), address.index]
    block += parameter.data
  held: dict[str, Any] = {
    "entry": launch.entry,
    "grid": _integers(launch.grid),
    "block": _integers(launch.block),
    "shared": np.int64(launch.shared),
    "bytes": np.frombuffer(block, np.uint8),
    "starts": _integers(starts),
    "addresses": _integers(addresses),
  }
  return held if launch.cluster is None else {**held, "cluster": _integers(launch.cluster)}


def _integers(values: Sequence[int]) -> np.ndarray[Any, Any]:
  return np.array([int(value) for value in values], np.int64)
