"""How programs for CUDA hold the calls of kernels: from a plan to a call's attributes.

A kernel's *CUDA part* says what a call launches (`Plan`). Programs hold the plan, and the name of a
variant of the kernel, "name[cuda:key]", which stands for the images of the plan's functions; the
runtime's handle on it lives as long as the kernel. Plans depend on shapes: where XLA's partitioner
cuts a call's arrays into tiles, `Kernel.retile` makes one for a tile from what the call holds.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from callgate import _callgate
from callgate._build.nvrtc import Image
from callgate._call.site import Call, Callee, Emission
from callgate._core import options as check
from callgate._core import static_values
from callgate._core.errors import GateDefinitionError
from callgate._kernel.launch import Plan, encode
from callgate._kernel.variants import to_json
from callgate._runtime import targets

# A variant's key begins so, which tells it from those of the same kernel on the CPU.
PREFIX = "cuda:"
_MAX_BATCH = 65535  # blocks along z
# What PTX is compiled for: the oldest architecture that CUDA 12 and 13 both compile for.
LOWEST = 75
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CudaCall:
  """What a plan is made for: one lane of a call."""

  operands: tuple[jax.ShapeDtypeStruct, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  static: Mapping[str, Any]  # arguments by name: numbers are Python's
  # How many lanes the launch serves along the grid's z axis (vmap="grid"); the arrays then have
  # them as their leading axis, which `operands` and `results` leave out.
  batch: int | None = None
  capabilities: tuple[int, ...] = ()  # to compile for, as 90; () for PTX that any device runs


class CudaPart(abc.ABC):
  """What runs a kernel on CUDA devices; `Kernel.cuda` of kernels that have one."""

  arch: tuple[int, ...] = ()  # to compile for where this process has no device; () for PTX

  @abc.abstractmethod
  def plan(self, call: CudaCall) -> Plan:
    """What a call launches; raises where it can't take it, or can't be compiled."""

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    """The images of a plan of this key, for another process's program; None where it can't tell."""
    return None

  @functools.cached_property
  def cuda_variants(self) -> dict[str, _callgate.CudaKernel]:
    """The runtime's handles on the kernel's variants, by the keys of their plans."""
    return {}


def capabilities(part: CudaPart) -> tuple[int, ...]:
  """Those of this process's devices; where it has none, what the part was told to compile for."""
  return tuple(sorted(set(_callgate.cuda_capabilities()))) or part.arch


def parse_arch(label: str, arch: Any) -> tuple[int, ...]:
  """Compute capabilities from what the option `arch` takes: None, "sm_90", 90 or several."""
  several: Any = () if arch is None else arch if isinstance(arch, (list, tuple)) else [arch]
  found: set[int] = set()
  for each in several:
    text = str(each).removeprefix("sm_").removeprefix("compute_").rstrip("af").replace(".", "")
    known = isinstance(each, (str, int)) and not isinstance(each, bool)
    if not known or not text.isdigit() or not 30 <= int(text) <= 999:
      check.refuse(label, "arch", "a compute capability such as 'sm_90' or 90", each)
    found.add(int(text))
  return tuple(sorted(found))


def variant(
  kernel: Callee, part: CudaPart, key: str, images: Sequence[Image]
) -> _callgate.CudaKernel:
  """The runtime's handle on the variant of a kernel that has these images."""
  with _lock:  # threads that lower at once get the same variant
    if key not in part.cuda_variants:
      pairs = [(image.code, image.capability) for image in images]
      part.cuda_variants[key] = _callgate.CudaKernel(f"{kernel.name}[{PREFIX}{key}]", pairs)
    return part.cuda_variants[key]


def lane(
  operands: Sequence[Any], results: Sequence[Any], masks: Sequence[Sequence[bool]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """The types of a call's operands and results without the batch axes that the masks are of."""
  inner = (
    jax.ShapeDtypeStruct(aval.shape[sum(mask[i] for mask in masks) :], aval.dtype)
    for i, aval in enumerate(operands)
  )
  return tuple(inner), tuple(jax.ShapeDtypeStruct(r.shape[len(masks) :], r.dtype) for r in results)


def emission(kernel: Callee, part: CudaPart, call: Call) -> Emission:
  """What a program for CUDA holds of a call of a kernel, whose part for CUDA is `part`."""
  batch, axes = None, call.levels
  if kernel.vmap == "grid" and call.whole is not None:
    batch, axes = call.whole[0], (*axes, call.whole)
  types = lane(call.operands, call.results, [mask for _, mask in axes])
  static = {name: static_values.thaw(value) for name, value in call.site.static}
  plan = planned(kernel, part, CudaCall(*types, static, batch, capabilities(part)))
  attributes: dict[str, Any] = {"plan": encode(kernel.label, plan)}
  if call.devices > 1:  # what `Kernel.retile` has to know beside shapes
    held = {k: _encoded(kernel.label, k, v) for k, v in sorted(static.items())}
    about = {"grid": batch is not None, "static": held}
    attributes["tiles"] = json.dumps(about, separators=(",", ":"))
  # Calls with scratch memory are not captured in graphs, whose replays would not have it.
  target = targets.KERNEL_SCRATCH_TARGET if plan.scratch else targets.KERNEL_TARGET
  return Emission(variant(kernel, part, plan.key, plan.images), target, attributes, call)


def planned(kernel: Callee, part: CudaPart, call: CudaCall) -> Plan:
  """The plan of a call, checked."""
  batch, grid = call.batch, f"{kernel.label}: vmap='grid': expected"
  if batch is not None and batch > _MAX_BATCH:
    most = f"{_MAX_BATCH} lanes, as many as a grid has blocks along z"
    raise GateDefinitionError(f"{grid} at most {most}; got {batch}")
  plan = part.plan(call)
  for launch in plan.launches:
    if batch is not None and launch.grid[2] not in (batch, 0):
      free = f"a grid whose z is free for the {batch} lanes"
      raise GateDefinitionError(f"{grid} {free}, got {launch.grid}")
  return plan


def _encoded(label: str, name: str, value: Any) -> Any:
  try:
    return to_json(value, dtypes=True)
  except TypeError:
    what = "a number, a string, a dtype or a tuple of these in a program over several devices"
    check.refuse(label, f"static argument '{name}'", what, value)
