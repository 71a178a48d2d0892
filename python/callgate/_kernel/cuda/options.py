# SPDX-License-Identifier: Apache-2.0
"""The options of kernels for CUDA devices alone."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

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
    vmap: "each" (a launch for each lane), "grid" (one launch, with the lanes along the grid's z
      axis), "whole" (batched arguments have a leading axis), "broadcast" (all have) or a rule, as
      for `callgate.gate`.
  """

  thread_safe: bool = dataclasses.field(init=False, default=False)  # the GPU's streams order calls


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CudaSourceOptions(LaunchOptions, CudaOptions):
  """The options of `callgate.cuda`.

  Attributes:
    options: for NVRTC, after callgate's own: "--use_fast_math", "-DN=4", "-lineinfo"; one with
      "--gpu-architecture=sm_90a" replaces callgate's choice.
    include_dirs: folders of headers.
  """

  grid: Any = dataclasses.field()
  block: Any = dataclasses.field()
  options: Sequence[str] = option((), check.strings)
  include_dirs: Paths = option((), check.strings)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CupyOptions(LaunchOptions, CudaOptions):
  """The options of `callgate.cupy`.

  Attributes:
    jvp: of an ElementwiseKernel: its derivative's code, as for `callgate.elementwise`.
  """

  jvp: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NamedOptions(CudaOptions):
  """The options of a kernel of named parameters.

  Attributes:
    outputs: names of the parameters that take the results.
    aliases: flat input position to flat output position: both are one memory. Such a result needs
      no parameter of its own.
  """

  outputs: Sequence[str] | str | None = option(None, check.names)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumbaCudaOptions(NamedOptions):
  """The options of `callgate.numba_cuda`.

  Attributes:
    griddim: blocks along x, y and z: a number, a tuple of up to three, or a function of the
      operands' ShapeDtypeStructs, and of static arguments by name, that gives one of them.
    blockdim: threads of a block, likewise.
    sharedmem: bytes of dynamic shared memory; a number or such a function.
    vmap: "each" is a launch for each lane. "grid" is one launch, with the lanes along the grid's z
      axis: all arrays then have the lanes as their first axis, of extent 1 without a batch, and the
      kernel takes its lane from `cuda.blockIdx.z`. "whole", "broadcast", or a rule.
  """

  griddim: Any
  blockdim: Any
  sharedmem: Any = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TritonOptions(NamedOptions):
  """The options of `callgate.triton`.

  Attributes:
    grid: programs along x, y and z: a tuple of one to three, an int, or a function of the dict of
      all arguments, constants and options (as Triton's); if it has two parameters, the second gets
      the ShapeDtypeStructs of the operands and then of the results.
    num_warps: of a program. Default: 4, or the configuration's.
    num_stages: of software pipelines. Default: 3, or the configuration's.
    num_ctas: blocks of a cluster, for compute capability 9.0 and newer. Default: 1.
    zeroed_outputs: results that are set to zero before the launch: positions, names of their
      parameters, or a function of the same dict as `grid` that gives them.
    options: more options of Triton's compiler, such as `{"maxnreg": 128}`.
    vmap: "each" is a launch for each lane; "grid" one launch, for kernels that take their lane
      from `tl.program_id(2)` and step through the arrays by it; "whole", "broadcast", or a rule.
  """

  grid: Any
  num_warps: int | None = None
  num_stages: int | None = None
  num_ctas: int | None = None
  zeroed_outputs: Any = ()
  options: Mapping[str, Any] | None = None
