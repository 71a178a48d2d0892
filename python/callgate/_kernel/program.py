"""How programs for CUDA hold the calls of kernels: from a plan to a call's attributes.

A kernel's *CUDA part* says what a call launches (`Plan`). Programs hold the plan as text, and the
name of a variant of the kernel, "name[cuda:key]", which stands for the images that the plan's
functions are in. The runtime's handle on a variant lives as long as the kernel. Plans depend on
shapes: where XLA's partitioner cuts a call's arrays into tiles, `retile` works out the tiles' plan,
from what the call holds and the kernel of its name.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from callgate import _callgate
from callgate._build.nvrtc import Image
from callgate._call.options import Vmap
from callgate._call.site import Call, Emission
from callgate._core import static_values
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.launch import Plan, encode
from callgate._runtime import targets

# A variant's key begins so, which tells it from those of the same kernel on the CPU.
PREFIX = "cuda:"
_MAX_BATCH = 65535  # blocks along z
# For driver and compiler alike the oldest architecture that CUDA 12 and 13 both compile for.
_LOWEST = 75


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CudaCall:
  """What a plan is made for: one lane of a call.

  Attributes:
    operands: ShapeDtypeStructs of the operands.
    results: of the results.
    static: the static arguments, by name: numbers are Python's.
    batch: None, or how many lanes the launch serves along the grid's z axis (vmap="grid"); the
      arrays then have them as their leading axis, which `operands` and `results` leave out.
    capabilities: compute capabilities to compile for, as 90; () for PTX that any device runs.
  """

  operands: tuple[jax.ShapeDtypeStruct, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  static: Mapping[str, Any]
  batch: int | None = None
  capabilities: tuple[int, ...] = ()


class CudaPart(abc.ABC):
  """What runs a kernel on CUDA devices; `Kernel.cuda` of kernels that have one."""

  @abc.abstractmethod
  def plan(self, call: CudaCall) -> Plan:
    """What a call launches.

    Raises:
      GateDefinitionError: it can't take the call, or its grid or block is outside CUDA's limits.
      CompileError: its source can't be compiled.
    """

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    """The images that a plan of this key has, for a program from another process.

    Args:
      key: of the plan.
      capabilities: to compile for, as `CudaCall.capabilities`.

    Returns:
      None where the key alone doesn't tell them: the kernel then has to be called first.
    """
    del key, capabilities
    return None

  def arch(self) -> tuple[int, ...]:
    """Compute capabilities to compile for where this process has no device; () for PTX."""
    return ()


class CudaCallee(Protocol):
  """The kernel that a part belongs to."""

  name: str
  vmap: Vmap
  # The runtime's handles on its variants, by the keys of their plans, and who makes one.
  cuda_variants: dict[str, _callgate.CudaKernel]
  defining: threading.RLock

  @property
  def label(self) -> str: ...


def capabilities(part: CudaPart) -> tuple[int, ...]:
  """Those of this process's devices; where it has none, what the part was told to compile for."""
  return tuple(sorted(set(_callgate.cuda_capabilities()))) or part.arch()


def ptx_capability(known: tuple[int, ...]) -> int:
  """What to compile PTX for, which newer devices run too."""
  return min(known, default=_LOWEST)


def parse_arch(label: str, arch: Any) -> tuple[int, ...]:
  """Compute capabilities from what the option `arch` takes: None, "sm_90", 90 or several."""
  if arch is None:
    return ()
  several = list(arch) if isinstance(arch, (list, tuple)) else [arch]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
  return tuple(sorted({_capability(label, each) for each in several}))


def _capability(label: str, arch: Any) -> int:
  text = str(arch).removeprefix("sm_").removeprefix("compute_").rstrip("af").replace(".", "")
  known = isinstance(arch, (str, int)) and not isinstance(arch, bool)
  if not known or not text.isdigit() or not 30 <= int(text) <= 999:
    raise GateDefinitionError(
      f"{label}: arch: expected a compute capability such as 'sm_90' or 90, got {arch!r}"
    )
  return int(text)


# -- variants ------------------------------------------------------------------------------------
def define(kernel: CudaCallee, part: CudaPart, key: str) -> bool:
  """Makes the variant that a program from elsewhere names; False where the kernel has none."""
  if key not in kernel.cuda_variants:
    images = part.images(key, capabilities(part))
    if images is None:
      return False
    _variant(kernel, key, images)
  return True


def _variant(kernel: CudaCallee, key: str, images: Sequence[Image]) -> _callgate.CudaKernel:
  with kernel.defining:  # threads that lower at once get the same variant
    known = kernel.cuda_variants
    if key not in known:
      pairs = [(image.code, image.capability) for image in images]
      known[key] = _callgate.CudaKernel(f"{kernel.name}[{PREFIX}{key}]", pairs)
    return known[key]


# -- lowering ------------------------------------------------------------------------------------
def emission(kernel: CudaCallee, part: CudaPart, call: Call) -> Emission:
  """What a program for CUDA holds of a call of a kernel, whose part for CUDA is `part`."""
  in_grid = call.whole if kernel.vmap == "grid" else None
  axes = [*call.levels, *(() if in_grid is None else (in_grid,))]
  masks = [mask for _, mask in axes]
  operands = [
    jax.ShapeDtypeStruct(aval.shape[sum(mask[i] for mask in masks) :], aval.dtype)
    for i, aval in enumerate(call.operands)
  ]
  results = [jax.ShapeDtypeStruct(aval.shape[len(axes) :], aval.dtype) for aval in call.results]
  batch = None if in_grid is None else in_grid[0]
  static = {name: static_values.thaw(value) for name, value in call.site.static}
  plan = planned(kernel.label, part, operands, results, static, batch)
  attributes: dict[str, Any] = {"plan": encode(kernel.label, plan)}
  if call.devices > 1:
    attributes["tiles"] = _held(kernel.label, static, in_grid is not None)
  return Emission(_variant(kernel, plan.key, plan.images), _target(plan), attributes, call)


def planned(
  label: str,
  part: CudaPart,
  operands: Sequence[Any],
  results: Sequence[Any],
  static: Mapping[str, Any],
  batch: int | None,
) -> Plan:
  """The plan of a call, checked."""
  if batch is not None and batch > _MAX_BATCH:
    raise GateDefinitionError(
      f"{label}: vmap='grid': expected at most {_MAX_BATCH} lanes, as many as a grid has "
      f"blocks along z; got {batch}"
    )
  call = CudaCall(tuple(operands), tuple(results), static, batch, capabilities(part))
  plan = part.plan(call)
  if batch is not None:
    for launch in plan.launches:
      if launch.grid[2] not in (batch, 0):
        raise GateDefinitionError(
          f"{label}: vmap='grid': expected a grid whose z is free for the {batch} "
          f"lanes, got {launch.grid}"
        )
  return plan


def _target(plan: Plan) -> str:
  """Calls with scratch memory are not captured in graphs, whose replays would not have it."""
  return targets.KERNEL_SCRATCH_TARGET if plan.scratch else targets.KERNEL_TARGET


# -- partitioned programs ------------------------------------------------------------------------
def _held(label: str, static: Mapping[str, Any], grid: bool) -> str:
  """What `retile` has to know of a call beside its shapes."""
  return json.dumps(
    {"grid": grid, "static": {k: _encoded(label, k, v) for k, v in sorted(static.items())}},
    separators=(",", ":"),
  )


def _encoded(label: str, name: str, value: Any) -> Any:
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    return {"float": value.hex()}
  if isinstance(value, complex):
    return {"complex": [value.real.hex(), value.imag.hex()]}
  if isinstance(value, tuple):
    return {"tuple": [_encoded(label, name, v) for v in value]}  # pyright: ignore[reportUnknownVariableType]
  if isinstance(value, np.generic):
    return _encoded(label, name, value.item())
  try:
    return {"dtype": np.dtype(value).name}
  except TypeError:
    raise GateDefinitionError(
      f"{label}: static argument '{name}': expected a number, a string, a dtype or a tuple "
      f"of these in a program over several devices, got {value!r}"
    ) from None


def _decoded(value: Any) -> Any:
  if not isinstance(value, dict):
    return value
  (kind, held), *_ = value.items()  # pyright: ignore[reportUnknownVariableType]
  if kind == "float":
    return float.fromhex(held)  # pyright: ignore[reportUnknownArgumentType]
  if kind == "complex":
    return complex(*map(float.fromhex, held))  # pyright: ignore[reportUnknownArgumentType]
  if kind == "tuple":
    return tuple(map(_decoded, held))  # pyright: ignore[reportUnknownArgumentType]
  return dtype_named(held)  # pyright: ignore[reportUnknownArgumentType]


def retile(
  kernel: CudaCallee,
  part: CudaPart,
  held: dict[str, Any],
  lanes: Sequence[str],
  operands: Sequence[tuple[tuple[int, ...], Any]],
  results: Sequence[tuple[tuple[int, ...], Any]],
  target: str,
) -> str:
  """Gives a call's attributes the plan for its tiles.

  Args:
    kernel: that is called.
    part: its part for CUDA.
    held: the attributes, changed in place.
    lanes: the masks of the batch levels that the runtime loops over, outermost first.
    operands: shape and dtype of each tile, batch axes included.
    results: likewise.
    target: of the call on whole arrays.

  Returns:
    The target: what not all devices run reads its number, and no graph may.
  """
  about = json.loads(held["tiles"])
  if about["grid"]:
    lanes = [*lanes, "1" * len(operands)]
  inner = [
    jax.ShapeDtypeStruct(shape[sum(mask[i] == "1" for mask in lanes) :], dtype)
    for i, (shape, dtype) in enumerate(operands)
  ]
  outer = [jax.ShapeDtypeStruct(shape[len(lanes) :], dtype) for shape, dtype in results]
  batch = results[0][0][len(lanes) - 1] if about["grid"] else None
  static = {name: _decoded(value) for name, value in about["static"].items()}
  plan = planned(kernel.label, part, inner, outer, static, batch)
  held["plan"] = encode(kernel.label, plan)
  held["name"] = _variant(kernel, plan.key, plan.images).name
  return targets.KERNEL_SCRATCH_TARGET if "0" in held.get("shards", "") else target
