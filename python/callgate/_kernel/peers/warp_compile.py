# SPDX-License-Identifier: Apache-2.0
"""The only module that depends on the installed Warp; tested with version 1.19.

Warp compiles modules: all kernels of a Python file at once, with its own disk cache. A call needs
Warp's structs, in the layout of the installed version.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# These packages need not be installed where types are checked.

from __future__ import annotations

import ctypes
import json
import math
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import warp as wp
from warp._src import codegen
from warp._src import types as warp_types

from callgate._build.nvrtc import CompiledImage, makes_machine_code
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel.cuda.kernel import entries
from callgate._kernel.launch import LOWEST, Address, Extent, LaunchParameter, Of

_LOCK = threading.RLock()
_MOST = 2**31 - 1  # the limit of an array's extents, and of its strides in bytes
_EXTENT_OF_Y = 65535


class WarpArgument(NamedTuple):
  """A parameter of a kernel: an array, or a number by value."""

  name: str
  dtype: np.dtype[Any]
  rank: int = -1  # Warp's rank; -1 for a number
  inner: tuple[int, ...] = ()  # extents of an element that is a vector or a matrix

  @property
  def is_array(self) -> bool:
    return self.rank >= 0

  @property
  def alignment(self) -> int:
    return ctypes.alignment(warp_types.array_t) if self.is_array else self.dtype.itemsize


class WarpCompiled(NamedTuple):
  image: CompiledImage
  entry: str  # the kernel's name in the image
  shared: int  # bytes of dynamic shared memory
  sizes: list[int] | None  # the parameters' sizes, if the image has them


def arguments(label: str, kernel: Any) -> list[WarpArgument]:
  """Returns the parameters of a kernel; raises for those that callgate can't pass."""
  if kernel.is_generic:
    hint = "use wp.overload(kernel, ...)"
    raise GateDefinitionError(f"{label}: expected a kernel without generic types; {hint}")
  if not kernel.adj.args:
    raise GateDefinitionError(f"{label}: expected a kernel with parameters, got one without")
  return [_argument(label, each.label, each.type) for each in kernel.adj.args]


def _argument(label: str, name: str, declared: Any) -> WarpArgument:
  scalars = (wp.bool, *warp_types.scalar_types)
  if isinstance(declared, wp.array):
    element = declared.dtype
    inner = tuple(getattr(element, "_shape_", ()))
    scalar = getattr(element, "_wp_scalar_type_", element)
    if scalar in scalars:
      return WarpArgument(name, np.dtype(wp.dtype_to_jax(scalar)), declared.ndim, inner)
  elif declared in scalars:
    return WarpArgument(name, np.dtype(wp.dtype_to_jax(declared)))
  expected = "an array of numbers, vectors or matrices, or a number"
  got = warp_types.type_repr(declared)
  raise GateDefinitionError(f"{label}: parameter '{name}': expected {expected}, got {got}")


# -- a call's arguments ----------------------------------------------------------------------------
def bounds(kernel: Any, extents: Sequence[int]) -> LaunchParameter:
  """Returns a launch's extents; those beyond `wp.tid()`'s axes repeat its threads, as in Warp."""
  with _LOCK:
    kernel.module.get_module_hash(1)  # generates code, which is needed below
  rank = kernel.adj.kernel_dim
  held = warp_types.launch_bounds_t((*extents, 1, 1, 1, 1)[:rank])
  held.coord_mult = math.prod(extents[rank:])
  held.size *= held.coord_mult
  return LaunchParameter(bytes(held))


def array(
  label: str, declared: WarpArgument, shape: Sequence[int], of: Of, index: int
) -> LaunchParameter:
  """Returns the parameter for a contiguous array."""
  item = declared.dtype.itemsize * math.prod(declared.inner)
  strides = [item * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)]
  if max((*shape, *strides)) > _MOST:
    what = f"parameter '{declared.name}'"
    expected = f"extents and row strides of at most {_MOST} bytes, Warp's limit"
    raise GateDefinitionError(f"{label}: {what}: expected {expected}, got shape {tuple(shape)}")
  held = warp_types.array_t(ndim=len(shape), shape=shape, strides=strides)
  return LaunchParameter(bytes(held), (Address(warp_types.array_t.data.offset, of, index),))


# -- compiled code ---------------------------------------------------------------------------------
def load(label: str, kernel: Any) -> tuple[int, Any]:
  """Returns the address of a kernel's CPU function, and an object that keeps it loaded."""
  try:
    with _LOCK:
      loaded = kernel.module.load(wp.get_device("cpu"), 1)
      forward = loaded.get_kernel_hooks(kernel).forward
  except Exception as error:  # Warp raises many kinds
    raise CompileError(
      f"{label}: Warp can't compile the kernel for the CPU: {error}", str(error)
    ) from error
  return ctypes.cast(forward, ctypes.c_void_p).value or 0, loaded


def compile_for(label: str, kernel: Any, capabilities: tuple[int, ...]) -> list[WarpCompiled]:
  """Returns the kernel for each capability; without capabilities as PTX for any device."""
  module, options = kernel.module, kernel.module.options | kernel.options
  refused = {
    "without cluster_dim": options.get("cluster_dim", 1) not in (1, None),
    "without deterministic=": options.get("deterministic", 0)
      not in (0, wp.config.DeterministicMode.NOT_GUARANTEED),
    "without entry_point_abi": options.get("entry_point_abi", "warp") != "warp",
  }  # fmt: skip
  for expected in (text for text, wrong in refused.items() if wrong):
    fault = f"expected a kernel {expected}, which callgate doesn't support in programs for CUDA"
    raise GateDefinitionError(f"{label}: {fault}")
  found: list[WarpCompiled] = []
  for capability in capabilities or (0,):
    ptx, target = capability == 0 or not makes_machine_code(), capability or LOWEST
    try:
      with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warnings about the file's generic kernels
        (path,) = map(Path, wp.compile_aot_module(module, arch=target, use_ptx=ptx))
        # The CUDA variant's hash, which differs from the CPU's.
        block = module.options["block_dim"]
        module.get_module_hash(block)
        own = kernel.get_mangled_name(kernel_hash=module.hashers[block].kernel_hashes[kernel])
        name = codegen.cuda_kernel_forward_name(kernel, name=own)
        meta = path.with_name(f"{path.name.rsplit('.', 2)[0]}.meta")  # next to "name.sm90.cubin"
        code, about = path.read_bytes(), json.loads(meta.read_text(encoding="utf-8"))
    except Exception as error:  # Warp raises many kinds
      fault = f"Warp can't compile the kernel for sm_{target}: {error}"
      raise CompileError(f"{label}: {fault}", str(error)) from error
    declared = entries(code.decode())[name] if ptx else None
    sizes = None if declared is None else [size for size, _ in declared]
    image = CompiledImage(code + b"\0", 0) if ptx else CompiledImage(code, capability)
    found.append(WarpCompiled(image, name, int(about[f"{name}_smem_bytes"]), sizes))
  return found


def grid(kernel: Any, threads: int) -> tuple[Extent, Extent]:
  """Returns the grid and block of a launch, as in Warp's launcher; () for no threads."""
  block = int(kernel.module.options["block_dim"])
  blocks = -(-threads // block)
  if kernel.grid_stride:  # the kernel itself loops over the rest
    return (min(blocks, _MOST), 1, 1), (block, 1, 1)
  x = min(blocks, 2**24 // block)
  y = min(-(-blocks // x), _EXTENT_OF_Y) if x else 0
  return (x, y, -(-blocks // (x * y)) if x else 0), (block, 1, 1)
