# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.kernel`."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import dataclasses
from collections.abc import Sequence
from typing import Any

from callgate._core import options as check
from callgate._core.options import option
from callgate._kernel.options import DeviceOptions, KernelOptions

# The options of one of the libraries only.
TVM_FFI = ("arg_spec",)
WARP = ("dim", "outputs", "inouts", "zeroed", "arch")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PeerOptions(DeviceOptions, KernelOptions):
  """The options of `callgate.kernel`.

  Attributes:
    vmap: "each" (a loop over the lanes in C++), "whole" (the batched arguments have a leading batch
      axis), "broadcast" (all arguments have it) or a rule, as for `callgate.gate`.
    arg_spec: for tvm_ffi, the function's arguments in order: "args", the arrays of the call;
      "rets", the results; "attrs.eps", the number or string of the call's `eps=`. Default: args,
      rets.
    dim: for Warp, the launch dimensions: an int, a tuple of up to four, or a function that takes
      the operands' ShapeDtypeStructs and returns one of these. Default: the shape of the first
      array parameter.
    outputs: for Warp, the names of the parameters for results. Default: the last one.
    inouts: for Warp, the names of parameters that are an operand and a result in the same memory.
    zeroed: for Warp, the flat positions of the results that are set to zero before the launch, for
      kernels that add to them.
    arch: for Warp, the GPU architectures to compile for, if the process has no GPU: "sm_90", 90, or
      several. Default: PTX, which the driver compiles.
  """

  arg_spec: Sequence[str] | None = option(None, check.strings)
  dim: Any = None
  outputs: Sequence[str] | str | None = option(None, check.names)
  inouts: Sequence[str] | str = option((), check.names)
  zeroed: Sequence[int] = option((), check.positions)
