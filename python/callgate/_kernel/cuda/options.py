# SPDX-License-Identifier: Apache-2.0
"""The options of kernels for CUDA devices only."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from callgate._core import options as check
from callgate._core.options import option
from callgate._kernel.options import DeviceOptions, KernelOptions, LaunchOptions, Paths

TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CudaOptions(DeviceOptions, KernelOptions):
  """The options of a kernel for CUDA devices.

  Attributes:
    vmap: "each" (one launch for each lane), "grid" (one launch, with the lanes along the grid's z
      axis), "whole" (the batched arguments have a leading batch axis), "broadcast" (all arguments
      have it) or a rule, as for `callgate.gate`.
  """

  thread_safe: bool = dataclasses.field(init=False, default=False)  # the GPU's streams order calls


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CudaSourceOptions(LaunchOptions, CudaOptions):
  """The options of `callgate.cuda`.

  Attributes:
    options: NVRTC options after callgate's own, such as "--use_fast_math", "-DN=4" or "-lineinfo".
      "--gpu-architecture=sm_90a" replaces callgate's choice.
    include_dirs: folders with headers.
  """

  grid: Any = dataclasses.field()
  block: Any = dataclasses.field()
  options: Sequence[str] = option((), check.strings)
  include_dirs: Paths = option((), check.strings)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CupyOptions(LaunchOptions, CudaOptions):
  """The options of `callgate.cupy`.

  Attributes:
    jvp: the derivative's code of an ElementwiseKernel, as for `callgate.elementwise`.
  """

  jvp: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NamedOptions(CudaOptions):
  """The options of kernels with named parameters.

  Attributes:
    outputs: the names of the parameters that receive the results.
    aliases: a dict from flat input positions to flat output positions: each pair shares memory.
      Such a result needs no parameter of its own.
  """

  outputs: Sequence[str] | str | None = option(None, check.names)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumbaCudaOptions(NamedOptions):
  """The options of `callgate.numba_cuda`.

  Attributes:
    griddim: blocks along x, y and z: a number, a tuple of up to three, or a function that takes the
      operands' ShapeDtypeStructs, and static arguments by name, and returns one of these.
    blockdim: threads per block; same form as `griddim`.
    sharedmem: bytes of dynamic shared memory: a number, or a function as for `griddim`.
    vmap: "each" (one launch for each lane), "grid" (one launch, with the lanes along the grid's z
      axis), "whole", "broadcast" or a rule. With "grid" the first axis of each array is the lanes,
      of length 1 without a batch, and the kernel finds its lane in `cuda.blockIdx.z`.
  """

  griddim: Any
  blockdim: Any
  sharedmem: Any = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TritonOptions(NamedOptions):
  """The options of `callgate.triton`.

  Attributes:
    grid: programs along x, y and z: an int, a tuple of one to three, or a function of the dict of
      all arguments, constants and options (as Triton's). If the function has a second parameter, it
      gets the ShapeDtypeStructs of the operands and then of the results.
    num_warps: warps per program. Default: 4, or the configuration's.
    num_stages: stages of software pipelines. Default: 3, or the configuration's.
    num_ctas: blocks per cluster, for compute capability 9.0 and newer. Default: 1.
    zeroed_outputs: the results that are set to zero before the launch: positions, names of their
      parameters, or a function of the same dict as `grid` that returns them.
    options: more options of Triton's compiler, such as `{"maxnreg": 128}`.
    vmap: "each" (one launch for each lane), "grid" (one launch, for kernels that find their lane in
      `tl.program_id(2)` and offset the arrays by it), "whole", "broadcast" or a rule.
  """

  grid: Any
  num_warps: int | None = None
  num_stages: int | None = None
  num_ctas: int | None = None
  zeroed_outputs: Any = ()
  options: Mapping[str, Any] | None = None
