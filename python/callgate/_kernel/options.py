# SPDX-License-Identifier: Apache-2.0
"""Options that several kinds of kernels share."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from callgate._build import toolchain
from callgate._call.options import CallOptions, Vmap, check_vmap
from callgate._core import options as check
from callgate._core import registry
from callgate._core.options import option
from callgate._core.where import where

Paths = Sequence[str | os.PathLike[str]]
Arch = str | int | Sequence[str | int] | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KernelOptions(CallOptions):
  """The options of a kernel.

  Attributes:
    vmap: "each" (a loop over the lanes in C++), "whole" (the batched arguments have a leading batch
      axis), "broadcast" (all arguments have it) or a rule, as for `callgate.gate`. "grid" makes one
      launch for all lanes on CUDA devices, with the lanes along the grid's z axis; on the CPU it is
      the same as "each".
    thread_safe: True lets several calls run at the same time, from several devices and programs,
      and runs the lanes of vmap="each" in parallel. By default calls take turns.
  """

  vmap: Vmap | Callable[..., Any] = option("each", check_vmap, more=("grid",))
  thread_safe: bool = option(False, check.boolean)

  def label(self, maker: str) -> str:
    """Returns the kernel's name for messages: the option `name`, or the function that makes it."""
    name = check.name(maker, self.name)
    return f"kernel '{name}'" if name else maker

  def named(self, function: str) -> str:
    """Returns the kernel's name: the option `name`, or the module and the function's name."""
    return self.name or registry.free_name(f"{where().module}.{function}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LaunchOptions:
  """Describes how a kernel is launched on CUDA devices.

  Attributes:
    grid: the number of blocks: an int, a tuple of up to three ints, or a function that takes the
      operands' ShapeDtypeStructs (of one lane, under vmap) and returns one of these. The function
      also gets the static arguments that it has parameters for, by name. callgate launches nothing
      if there are 0 blocks or all results are empty.
    block: the number of threads per block, at most 1024; same form as `grid`.
    shared: bytes of dynamic shared memory, also above 48 KiB if the device supports it; an int or a
      function as for `grid`.
    cluster: the number of blocks per cluster (compute capability 9.0), same form as `grid`.
      Default: no clusters.
    zeroed: flat positions of the results that are set to zero before the launch, for kernels that
      add to them.
    scratch: memory for the launch: a dict from names of parameters `T*` to numbers of bytes, each
      an int or a function as for `grid`. The memory is uninitialized. With vmap="grid" each lane
      gets that much.
  """

  grid: Any = None
  block: Any = None
  shared: Any = 0
  cluster: Any = None
  zeroed: Sequence[int] = option((), check.positions, what="flat positions of results")
  scratch: Mapping[str, Any] | None = option(None, check.named)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceOptions:
  """Describes the devices that a kernel is compiled for.

  Attributes:
    arch: the GPU architectures to compile for, if the process has no GPU: "sm_90", 90, or several.
      Default: PTX, which the driver compiles when the program is loaded.
  """

  arch: Arch = None

  def capabilities(self, label: str) -> tuple[int, ...]:
    """Returns the compute capabilities of `arch`, such as 90; none for PTX."""
    several: Any = self.arch if isinstance(self.arch, (list, tuple)) else [self.arch]
    found: set[int] = set()
    for each in several if self.arch is not None else ():
      text = str(each).removeprefix("sm_").removeprefix("compute_").rstrip("af").replace(".", "")
      known = isinstance(each, (str, int)) and not isinstance(each, bool)
      if not known or not text.isdigit() or not 30 <= int(text) <= 999:
        check.refuse(label, "arch", "a compute capability such as 'sm_90' or 90", each)
      found.add(int(text))
    return tuple(sorted(found))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompilerOptions(DeviceOptions):
  """Describes how C++ is compiled on this machine.

  Attributes:
    flags: compiler flags after "-O3 -march=native -DNDEBUG", such as "-fopenmp".
    include_dirs: folders with headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders with these libraries, for linking and at run time.
    debug: True compiles with "-O0 -g" instead, and checks the bounds of each index.
    cuda_options: options of CUDA's run-time compiler after callgate's own, such as
      "--use_fast_math" or "-DN=4".
  """

  flags: Sequence[str] = option((), check.strings)
  include_dirs: Paths = option((), check.strings)
  libraries: Sequence[str] = option((), check.strings)
  library_dirs: Paths = option((), check.strings)
  debug: bool = option(False, check.boolean)
  cuda_options: Sequence[str] = option((), check.strings)

  def building(self, *flags: str) -> dict[str, tuple[str, ...]]:
    """Returns the arguments of `toolchain.build`, with more flags before the user's."""
    defaults = toolchain.DEBUG_FLAGS if self.debug else toolchain.DEFAULT_FLAGS
    names = ("include_dirs", "libraries", "library_dirs")
    given = {name: tuple(getattr(self, name)) for name in names}
    return given | {"flags": (*defaults, *flags, *self.flags)}
