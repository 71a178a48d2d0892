# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.kernel`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the function that takes these.

import dataclasses
from collections.abc import Sequence
from typing import Any

from callgate._core import options as check
from callgate._core.options import option
from callgate._kernel.options import DeviceOptions, KernelOptions

# Which options are about one of the libraries alone.
TVM_FFI = ("arg_spec",)
WARP = ("dim", "outputs", "inouts", "zeroed", "arch")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PeerOptions(DeviceOptions, KernelOptions):
  """The options of `callgate.kernel`.

  Attributes:
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`.
    arg_spec: of a tvm_ffi function, what it takes, in order: "args", the arrays of the call;
      "rets", the results; "attrs.eps", the number or string that calls give as `eps=`.
    dim: of a Warp kernel, the extents of its launch: an int, a tuple of up to four, or a function
      from the operands' ShapeDtypeStructs to one. Default: the shape of the first array that the
      kernel takes.
    outputs: of a Warp kernel, the names of the parameters that take results. Default: the last one.
    inouts: of a Warp kernel, the names of the parameters that are an operand and a result in one
      memory.
    zeroed: of a Warp kernel, the flat positions of results that are set to zero first, for kernels
      that add to them.
    arch: of a Warp kernel, what to compile for, in programs for CUDA, where the process has no
      device: "sm_90", 90, or several. Default there: PTX, which the driver compiles.
  """

  arg_spec: Sequence[str] | None = option(None, check.strings)
  dim: Any = None
  outputs: Sequence[str] | str | None = option(None, check.names)
  inouts: Sequence[str] | str = option((), check.names)
  zeroed: Sequence[int] = option((), check.positions)
