"""`callgate.cpp`: kernels from C++ source, compiled by the system's compiler when they are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from callgate._build import toolchain
from callgate._call.operation import Effect, Vmap
from callgate._core import options, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.registry import caller_module
from callgate._kernel import program
from callgate._kernel import source as _source
from callgate._kernel.cpp.kernel import CppKernel
from callgate._kernel.cuda import part
from callgate._kernel.kernel import Kernel


def cpp(
  source: str,
  function: str | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  thread_safe: bool = False,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
  debug: bool = False,
  cuda_source: str | None = None,
  cuda_kernel: str | None = None,
  grid: Any = None,
  block: Any = None,
  shared: Any = 0,
  cluster: Any = None,
  zeroed: Sequence[int] = (),
  scratch: Mapping[str, Any] | None = None,
  cuda_options: Sequence[str] = (),
  arch: str | int | Sequence[str | int] | None = None,
) -> Kernel:
  """Makes a C++ function a JAX function: compiled once, cached on disk, no Python at run time.

  ```python
  import callgate as cg, jax.numpy as jnp

  saxpy = cg.cpp(\"\"\"
    void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
      for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
    }\"\"\", out=lambda a, x, y: x)

  assert saxpy(2.0, jnp.ones(3), jnp.arange(3.0)).tolist() == [2.0, 3.0, 4.0]
  ```

  Args:
    source: C++20 with a function `void name(...)` of callgate's views (see callgate/kernel.h, which
      is included, as are <algorithm> and <cmath>). A template is compiled for the dtypes and ranks
      of each call; what these don't tell is given by keyword.
    function: which function, where the source has several.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the kernel has no rule of its own, and `check`'s truth.
    name: what programs call the kernel by. Default: the calling module and the function's name.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat input position to flat output position: both are one memory. An `InOut` is aliased
      without being named here.
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`; "grid" as for `callgate.cuda`, and
      on the CPU as "each".
    sharding: which dimensions may stay split over devices: None or "gather" (none), "shard", a rule
      such as "i [j] -> i" or a function, as for `callgate.gate`.
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns, with those of all such kernels of the same
      source, or, with `libraries`, of all that link some.
    flags: for the compiler, after "-O3 -march=native -DNDEBUG".
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of every index instead of the flags above.
    cuda_source: CUDA C++ with the same kernel, which runs in programs for CUDA. Its arrays are
      those of the C++ function, in the same order: pointers or views, `const T*` also where that
      takes a number by value; its numbers by value are the C++ function's `cg::Attr` of the same
      names.
    cuda_kernel: which kernel of it, where it has several.
    grid: with cuda_source, blocks of its launch, as for `callgate.cuda`; also all that follow.
    block: threads of a block.
    shared: bytes of dynamic shared memory.
    cluster: blocks of a cluster.
    zeroed: flat positions of results that are set to zero before a launch.
    scratch: bytes of the memory behind parameters, by their names.
    cuda_options: for NVRTC.
    arch: what to compile for where the process has no CUDA device.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: the compiler refuses the source, with its message and your line numbers; or there
      is no compiler.
    GateDefinitionError: an option is wrong.
  """
  name = options.name("cpp", name)
  options.text("cpp", "source", source)
  options.optional_texts("cpp", function=function, cuda_source=cuda_source, cuda_kernel=cuda_kernel)
  options.boolean("cpp", "debug", debug)
  defaults = toolchain.DEBUG_FLAGS if debug else toolchain.DEFAULT_FLAGS
  known = _source.find("cpp" if name is None else f"kernel '{name}'", source, function)
  label = f"kernel '{name or known.name}'"
  build_options = {
    "flags": (*defaults, *options.strings(label, "flags", flags)),
    "include_dirs": options.strings(label, "include_dirs", include_dirs),
    "libraries": options.strings(label, "libraries", libraries),
    "library_dirs": options.strings(label, "library_dirs", library_dirs),
  }
  if cuda_source is None and any(x is not None for x in (grid, block, cuda_kernel)):
    raise GateDefinitionError(
      f"{label}: grid, block, cuda_kernel: expected with cuda_source= alone, got one without it"
    )
  if name is None:
    name = registry.free_name(f"{caller_module()}.{known.name}")
  made = CppKernel(
    name,
    source,
    function,
    build_options,
    out=out,
    like=like,
    effect=effect,
    aliases=aliases,
    vmap=vmap,
    sharding=sharding,
    linear=linear,
    gradient=gradient,
    thread_safe=thread_safe,
  )
  launching = part.launch_options(label, grid, block, shared, cluster, zeroed, scratch)
  building = part.build_options(
    options.strings(label, "cuda_options", cuda_options),
    build_options["include_dirs"],
    program.parse_arch(label, arch),
  )
  if cuda_source is not None:
    made.cuda = part.SourcePart(
      made.label, cuda_source, cuda_kernel, launching, building, made.aliases
    )
  return made
