# SPDX-License-Identifier: Apache-2.0
"""Options that several kinds of kernels share."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from callgate._build import toolchain
from callgate._call.options import CallOptions
from callgate._core import options as check

Paths = Sequence[str | os.PathLike[str]]
Arch = str | int | Sequence[str | int] | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KernelOptions(CallOptions):
  """The options of a kernel.

  Attributes:
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`. "grid", where the kernel runs on
      CUDA devices: one launch, with the lanes along the grid's z axis; on the CPU as "each".
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns.
  """

  thread_safe: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LaunchOptions:
  """Describes how a kernel is launched on CUDA devices.

  Attributes:
    grid: blocks: an int, a tuple of up to three, or a function from the operands'
      ShapeDtypeStructs (of one lane, under vmap) to one; a static argument that the function has a
      parameter for is passed by name. A kernel of 0 blocks is not launched, nor one whose results
      are all empty.
    block: threads of a block, likewise; at most 1024.
    shared: bytes of dynamic shared memory, likewise; more than 48 KiB is asked for from the driver.
    cluster: blocks of a cluster (compute capability 9.0), likewise; None for none.
    zeroed: flat positions of results that are set to zero first, for kernels that add to them.
    scratch: bytes of the memory behind parameters `T*` by their names, likewise; not initialised.
      With vmap="grid" there is as much for each lane.
  """

  grid: Any = None
  block: Any = None
  shared: Any = 0
  cluster: Any = None
  zeroed: Sequence[int] = ()
  scratch: Mapping[str, Any] | None = None

  def launching(self, label: str) -> "LaunchOptions":
    """These, checked as far as they can be before a call."""
    zeroed = check.positions(label, "zeroed", self.zeroed, what="flat positions of results")
    given = {name: getattr(self, name) for name in ("grid", "block", "shared", "cluster")}
    scratch = check.named(label, "scratch", self.scratch)
    return LaunchOptions(**given, zeroed=zeroed, scratch=scratch)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompilerOptions:
  """Describes how C++ is compiled on this machine.

  Attributes:
    flags: for the compiler, after "-O3 -march=native -DNDEBUG": "-fopenmp" for OpenMP, say.
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of every index instead of the flags above.
    cuda_options: for CUDA's run-time compiler, after callgate's own: "--use_fast_math", "-DN=4".
    arch: what to compile for, in programs for CUDA, where the process has no device: "sm_90", 90,
      or several. Default: PTX, which any device runs.
  """

  flags: Sequence[str] = ()
  include_dirs: Paths = ()
  libraries: Sequence[str] = ()
  library_dirs: Paths = ()
  debug: bool = False
  cuda_options: Sequence[str] = ()
  arch: Arch = None

  def building(self, label: str, *flags: str) -> dict[str, tuple[str, ...]]:
    """Returns what `toolchain.build` takes, with more flags in front of the user's."""
    defaults = toolchain.DEBUG_FLAGS if self.debug else toolchain.DEFAULT_FLAGS
    names = ("flags", "include_dirs", "libraries", "library_dirs")
    given = {name: check.strings(label, name, getattr(self, name)) for name in names}
    return given | {"flags": (*defaults, *flags, *given["flags"])}
