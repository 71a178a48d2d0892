# SPDX-License-Identifier: Apache-2.0
"""Computes, when a call of a CUDA kernel is lowered, its launches for the program.

A kernel's *CUDA part* returns the launches of a call (`LaunchPlan`). A program contains the plan as
plain numbers, and a variant's name, "name[cuda:key]", for the images of its functions. The runtime
fills in addresses and launches, without Python. Plans depend on shapes. If XLA's partitioner splits
a call's arrays into tiles, `Kernel.retile` makes a plan for a tile from the call's attributes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from callgate import _callgate
from callgate._build.nvrtc import CompiledImage
from callgate._call.site import Call, Callee, Emission
from callgate._core import attributes, registry, static_values
from callgate._core import options as check
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._kernel.parameters import Side
from callgate._kernel.variants import to_json
from callgate._runtime import targets

Extent = tuple[int, int, int]
Of = Literal["operand", "result", "scratch"]


@dataclasses.dataclass(frozen=True)
class Address:
  """An address that the runtime writes into a parameter."""

  offset: int  # the offset in the parameter, in bytes
  of: Of  # the kind of memory of the call
  index: int  # its flat index


class LaunchParameter(NamedTuple):
  """One parameter of a kernel, by value, in its memory layout."""

  data: bytes
  addresses: tuple[Address, ...] = ()

  @staticmethod
  def pointer(of: Of, index: int, extents: Sequence[int] = ()) -> LaunchParameter:
    """Returns a pointer, and the extents after it in a view."""
    return LaunchParameter(bytes(8) + np.array(extents, "<i8").tobytes(), (Address(0, of, index),))

  @staticmethod
  def scalar(value: Any, dtype: Any) -> LaunchParameter:
    return LaunchParameter(static_values.in_dtype(value, dtype).tobytes())


class Launch(NamedTuple):
  """One launch; extents are along x, y and z."""

  entry: str  # the function's name in the image, possibly mangled
  grid: Extent  # blocks
  block: Extent  # threads
  parameters: tuple[LaunchParameter, ...]  # in the function's order
  shared: int = 0  # bytes of dynamic shared memory
  cluster: Extent | None = None  # blocks of a cluster


class LaunchPlan(NamedTuple):
  """All device work of one call of a kernel."""

  key: str  # the key of the images among the kernel's variants; the same in every process
  images: tuple[CompiledImage, ...]  # one for each compute capability
  launches: tuple[Launch, ...]  # in order, on one stream
  scratch: tuple[int, ...] = ()  # bytes of each block of scratch memory, from XLA's allocator
  zeroed: tuple[int, ...] = ()  # results that are set to zero first, by flat position


_GRID = (2**31 - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)
_THREADS = 1024
_CLUSTER = 16  # blocks; more than 8 only if the device supports it


def is_int(value: Any) -> bool:
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def extent(label: str, what: str, value: Any) -> Extent:
  """Returns an int or a tuple of up to three as x, y and z; missing ones are 1."""
  values: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  if not 1 <= len(values) <= 3 or not all(map(is_int, values)):
    check.refuse(label, what, "an int or a tuple of up to three", value)
  x, y, z = (*map(int, values), 1, 1)[:3]
  return x, y, z


def checked(
  label: str, grid: Any, block: Any, shared: Any = 0, cluster: Any = None
) -> tuple[Extent, Extent, int, Extent | None]:
  """Returns a configuration within CUDA's limits; a grid extent of 0 launches nothing."""
  blocks, threads = extent(label, "grid", grid), extent(label, "block", block)
  for what, values, least, limits in (("grid", blocks, 0, _GRID), ("block", threads, 1, _BLOCK)):
    for axis, value, most in zip("xyz", values, limits, strict=True):
      if not least <= value <= most:
        check.refuse(label, f"{what}.{axis}", f"{least} to {most}", value)
  if (product := math.prod(threads)) > _THREADS:
    expected = f"expected at most {_THREADS} threads"
    raise GateDefinitionError(f"{label}: block: {expected}, got {threads}, {product} threads")
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
_ALIGNMENT = 16  # of a parameter; at least that of any type


def encode(label: str, plan: LaunchPlan) -> dict[str, Any]:
  """Returns a plan, without its images, in the form of src/cuda/launch.h."""

  def integers(**values: Sequence[int]) -> dict[str, Any]:
    return {name: np.array([int(i) for i in held], np.int64) for name, held in values.items()}

  launches: list[dict[str, Any]] = []
  for launch in plan.launches:
    if not launch.entry:
      problem = "entry: expected the name of a function in the image, got none"
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


# The prefix of a variant's key, which distinguishes it from variants for the CPU.
PREFIX = "cuda:"
_MAX_BATCH = 65535  # blocks along z
# PTX is for this architecture, the oldest that CUDA 12 and 13 both support.
LOWEST = 75
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CudaCall:
  """One lane of a call, for a plan."""

  operands: tuple[jax.ShapeDtypeStruct, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  static: Mapping[str, Any]  # arguments by name, with Python numbers
  # The number of lanes of the launch, along the grid's z axis (vmap="grid"). The arrays then have
  # the lanes as their leading axis, which `operands` and `results` leave out.
  batch: int | None = None
  capabilities: tuple[int, ...] = ()  # compute capabilities, such as 90; () for PTX for any device

  def array(self, side: Side, index: int) -> jax.ShapeDtypeStruct:
    return (self.operands if side == "operand" else self.results)[index]


class CudaPart(abc.ABC):
  """Runs a kernel on CUDA devices; `Kernel.cuda` of kernels that support them."""

  arch: tuple[int, ...] = ()  # used if this process has no device; () for PTX

  @abc.abstractmethod
  def plan(self, call: CudaCall) -> LaunchPlan:
    """Returns the launches of a call; raises if it can't run or be compiled."""

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    """Returns the images of a plan's key, for another process's program; None if it can't."""
    return None

  @functools.cached_property
  def cuda_variants(self) -> dict[str, _callgate.CudaKernel]:
    """The runtime's handles on the kernel's variants, by their plans' keys."""
    return {}


def capabilities(part: CudaPart) -> tuple[int, ...]:
  """Returns the architectures of this process's devices; without devices, those of the part."""
  return tuple(sorted(set(_callgate.cuda_capabilities()))) or part.arch


def variant(
  kernel: Callee, part: CudaPart, key: str, images: Sequence[CompiledImage]
) -> _callgate.CudaKernel:
  """Returns the runtime's handle on the kernel's variant with these images."""
  with _lock:  # so that concurrent lowerings get the same variant
    if key not in part.cuda_variants:
      pairs = [(image.code, image.capability) for image in images]
      name = f"{kernel.name}[{PREFIX}{key}]"
      registry.await_free(name)
      part.cuda_variants[key] = _callgate.CudaKernel(name, pairs)
    return part.cuda_variants[key]


def lane(
  operands: Sequence[Any], results: Sequence[Any], masks: Sequence[Sequence[bool]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Returns the types of a call's operands and results without the batch axes of the masks."""
  inner = (
    jax.ShapeDtypeStruct(aval.shape[sum(mask[i] for mask in masks) :], aval.dtype)
    for i, aval in enumerate(operands)
  )
  return tuple(inner), tuple(jax.ShapeDtypeStruct(r.shape[len(masks) :], r.dtype) for r in results)


def emission(kernel: Callee, part: CudaPart, call: Call) -> Emission:
  """Returns a program's attributes for a call of a kernel, whose CUDA part is `part`."""
  batch, axes = None, call.levels
  for shape in (aval.shape for aval in (*call.operands, *call.results)):
    if any(map(is_open, shape)):
      fault = f"the launch depends on shapes: expected known extents, got {shape}"
      raise GateDefinitionError(f"{kernel.label}: in a program for CUDA {fault}")
  if kernel.vmap == "grid" and call.whole is not None:
    batch, axes = call.whole[0], (*axes, call.whole)
  types = lane(call.operands, call.results, [mask for _, mask in axes])
  static = {name: static_values.thaw(value) for name, value in call.site.static}
  plan = planned(kernel, part, CudaCall(*types, static, batch, capabilities(part)))
  attributes: dict[str, Any] = {"plan": encode(kernel.label, plan)}
  if call.devices > 1:  # more data for `Kernel.retile`
    attributes["tiles"] = tiles(kernel.label, static, grid=batch is not None)
  # Calls with scratch memory are not captured in graphs, because replays would not have it.
  target = targets.KERNEL_SCRATCH_TARGET if plan.scratch else targets.KERNEL_TARGET
  return Emission(variant(kernel, part, plan.key, plan.images), target, attributes, call)


def tiles(label: str, static: Mapping[str, Any], *, grid: bool = False) -> str:
  """Returns the attributes of a call for the plans of its tiles, in addition to shapes."""
  held = {name: _encoded(label, name, value) for name, value in sorted(static.items())}
  return json.dumps({"grid": grid, "static": held}, separators=(",", ":"))


def planned(kernel: Callee, part: CudaPart, call: CudaCall) -> LaunchPlan:
  """Returns the checked plan of a call."""
  batch, grid = call.batch, f"{kernel.label}: vmap='grid': expected"
  if batch is not None and batch > _MAX_BATCH:
    most = f"{_MAX_BATCH} lanes, the limit of a grid's z"
    raise GateDefinitionError(f"{grid} at most {most}; got {batch}")
  plan = part.plan(call)
  for launch in plan.launches:
    if batch is not None and launch.grid[2] not in (batch, 0):
      free = f"a grid whose z is left to the {batch} lanes"
      raise GateDefinitionError(f"{grid} {free}, got {launch.grid}")
  return plan


def _encoded(label: str, name: str, value: Any) -> Any:
  try:
    return to_json(value, dtypes=True)
  except TypeError:
    what = "a number, a string, a dtype or a tuple of these in a program over several devices"
    check.refuse(label, f"static argument '{name}'", what, value)
