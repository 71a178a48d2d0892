"""The options of `callgate.elementwise`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from callgate._call.options import CallOptions, Vmap
from callgate._kernel.options import CompilerOptions


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ElementwiseOptions(CompilerOptions, CallOptions):
  """The options of `callgate.elementwise`; what its code tells is none.

  Attributes:
    preamble: C++ in front of the kernel: functions, types, includes.
    loop_prep: statements in front of each run of elements, whose variables the operation sees.
    after_loop: statements behind each run of elements.
    jvp: the derivative: statements that give the tangent `dz` of each result `z` from the
      arguments, the results and the arguments' tangents `dx`, in which they are linear.
    like: a JAX-traceable reference of the same signature: gives derivatives where there is no
      `jvp`, and those of higher order where there is; and `check`'s truth.
    sharding: which dimensions of the arrays may stay split over devices. Default: all, as operands
      broadcast. "gather", or a rule or function as for `callgate.gate`, for less.
    gradient: "finite-difference": derivatives by central differences, element by element.
    debug: "-O0 -g" and bounds checks of raw arguments; on the CPU.
  """

  out: Any = dataclasses.field(init=False, default=None)
  vmap: Vmap | Callable[..., Any] = dataclasses.field(init=False, default="each")
  linear: bool | int | Sequence[int] = dataclasses.field(init=False, default=False)
  preamble: str = ""
  loop_prep: str = ""
  after_loop: str = ""
  jvp: str | None = None
