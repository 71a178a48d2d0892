"""What a call of a CUDA kernel launches: functions of a compiled image with their parameters.

Worked out when the call is lowered, from one lane's shapes and the static arguments. Programs hold
plain numbers: the runtime fills in addresses and launches, without Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from callgate._build.nvrtc import Image
from callgate._core import attributes
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError

Extent = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Address:
  """An address that the runtime writes into a parameter."""

  offset: int  # where in the parameter, in bytes
  of: Literal["operand", "result", "scratch"]  # whose address: of what the call has
  index: int  # which of them, counted flat


class Parameter(NamedTuple):
  """One parameter of a kernel, by value, as it lies in memory."""

  data: bytes
  addresses: tuple[Address, ...] = ()

  @staticmethod
  def pointer(of: Literal["operand", "result", "scratch"], index: int) -> Parameter:
    return Parameter(bytes(8), (Address(0, of, index),))

  @staticmethod
  def scalar(value: Any, dtype: Any) -> Parameter:
    return Parameter(np.asarray(value, dtype=dtype).tobytes())

  @staticmethod
  def null() -> Parameter:
    return Parameter(bytes(8))


class Launch(NamedTuple):
  """One launch; extents are along x, y and z."""

  entry: str  # the function's name in the image, mangled if it is
  grid: Extent  # blocks
  block: Extent  # threads
  parameters: tuple[Parameter, ...]  # in the function's order
  shared: int = 0  # bytes of dynamic shared memory
  cluster: Extent | None = None  # blocks of a cluster


class Plan(NamedTuple):
  """All that one call of a kernel does on the device."""

  key: str  # names the images among the kernel's variants; the same in every process
  images: tuple[Image, ...]  # one for each compute capability that it was compiled for
  launches: tuple[Launch, ...]  # in order, on one stream
  scratch: tuple[int, ...] = ()  # bytes of each block of scratch memory, from XLA's allocator
  zeroed: tuple[int, ...] = ()  # results that are set to zero first, by flat position


_GRID = (2**31 - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)
_THREADS = 1024
_CLUSTER = 16  # blocks; more than 8 where the device allows it


def is_int(value: Any) -> bool:
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def extent(label: str, what: str, value: Any) -> Extent:
  """An int or a tuple of up to three as x, y and z; what is left out is 1."""
  values: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not 1 <= len(values) <= 3 or not all(map(is_int, values)):
    check.refuse(label, what, "an int or a tuple of up to three", value)
  x, y, z = (*map(int, values), 1, 1)[:3]
  return x, y, z


def checked(
  label: str, grid: Any, block: Any, shared: Any = 0, cluster: Any = None
) -> tuple[Extent, Extent, int, Extent | None]:
  """A launch's configuration; raises where it is not within CUDA's limits.

  A grid's extent of 0, of an array without elements, launches nothing.
  """
  blocks, threads = extent(label, "grid", grid), extent(label, "block", block)
  for what, values, least, limits in (("grid", blocks, 0, _GRID), ("block", threads, 1, _BLOCK)):
    for axis, value, most in zip("xyz", values, limits, strict=True):
      if not least <= value <= most:
        check.refuse(label, f"{what}.{axis}", f"{least} to {most}", value)
  if (product := math.prod(threads)) > _THREADS:
    expected = f"expected at most {_THREADS} threads"
    raise GateDefinitionError(f"{label}: block: {expected}, got {threads}, which are {product}")
  what = "bytes of dynamic shared memory"
  shared = check.count(label, "shared", shared, most=2**31 - 1, what=what)
  if cluster is None:
    return blocks, threads, shared, None
  groups = extent(label, "cluster", cluster)
  if min(groups) < 1 or math.prod(groups) > _CLUSTER:
    check.refuse(label, "cluster", f"1 to {_CLUSTER} blocks", groups)
  if any(b % c for b, c in zip(blocks, groups, strict=True)):
    expected = f"extents that divide the grid's, {blocks}"
    raise GateDefinitionError(f"{label}: cluster: expected {expected}; got {groups}")
  return blocks, threads, shared, groups


_OF = ("operand", "result", "scratch")
_ALIGNMENT = 16  # of a parameter; more than any type asks for


def encode(label: str, plan: Plan) -> dict[str, Any]:
  """A plan as src/cuda/launch.h reads it; without its images."""

  def integers(**values: Sequence[int]) -> dict[str, Any]:
    return {name: np.array([int(i) for i in held], np.int64) for name, held in values.items()}

  launches: list[dict[str, Any]] = []
  for launch in plan.launches:
    if not launch.entry:
      problem = "expected a function's name as the image has it, got none"
      raise GateDefinitionError(f"{label}: {problem}")
    block, starts, addresses = b"", list[int](), list[int]()
    for parameter in launch.parameters:
      block += bytes(-len(block) % _ALIGNMENT)
      starts.append(len(block))
      for address in parameter.addresses:
        addresses += [len(block) + address.offset, _OF.index(address.of), address.index]
      block += parameter.data
    held = {"entry": launch.entry, "shared": np.int64(launch.shared)}
    held |= integers(grid=launch.grid, block=launch.block, starts=starts, addresses=addresses)
    held |= {} if launch.cluster is None else integers(cluster=launch.cluster)
    launches.append(held | {"bytes": np.frombuffer(block, np.uint8)})
  held = integers(scratch=plan.scratch, zeroed=plan.zeroed)
  return held | {"launches": attributes.listed(launches)}
