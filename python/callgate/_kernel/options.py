# SPDX-License-Identifier: Apache-2.0
"""Options that several kinds of kernels share."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

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
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`. "grid", where the kernel runs on
      CUDA devices: one launch, with the lanes along the grid's z axis; on the CPU as "each".
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns.
  """

  vmap: Vmap | Callable[..., Any] = option("each", check_vmap, more=("grid",))
  thread_safe: bool = option(False, check.boolean)

  def label(self, maker: str) -> str:
    """How messages name the kernel: by the name that it is given, else by what makes it."""
    name = check.name(maker, self.name)
    return f"kernel '{name}'" if name else maker

  def named(self, function: str) -> str:
    """The kernel's name: the given one, or one of the user's module and the function's."""
    return self.name or registry.free_name(f"{where().module}.{function}")


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
  zeroed: Sequence[int] = option((), check.positions, what="flat positions of results")
  scratch: Mapping[str, Any] | None = option(None, check.named)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceOptions:
  """Describes the devices that a kernel is compiled for.

  Attributes:
    arch: what to compile for, in programs for CUDA, where the process has no device: "sm_90", 90,
      or several. Default there: PTX, which the driver compiles when the program is loaded.
  """

  arch: Arch = None

  def capabilities(self, label: str) -> tuple[int, ...]:
    """The compute capabilities of `arch`, as 90; none for PTX."""
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
    flags: for the compiler, after "-O3 -march=native -DNDEBUG": "-fopenmp" for OpenMP, say.
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of every index instead of the flags above.
    cuda_options: for CUDA's run-time compiler, after callgate's own: "--use_fast_math", "-DN=4".
  """

  flags: Sequence[str] = option((), check.strings)
  include_dirs: Paths = option((), check.strings)
  libraries: Sequence[str] = option((), check.strings)
  library_dirs: Paths = option((), check.strings)
  debug: bool = option(False, check.boolean)
  cuda_options: Sequence[str] = option((), check.strings)

  def building(self, *flags: str) -> dict[str, tuple[str, ...]]:
    """Returns what `toolchain.build` takes, with more flags in front of the user's."""
    defaults = toolchain.DEBUG_FLAGS if self.debug else toolchain.DEFAULT_FLAGS
    names = ("include_dirs", "libraries", "library_dirs")
    given = {name: tuple(getattr(self, name)) for name in names}
    return given | {"flags": (*defaults, *flags, *self.flags)}
