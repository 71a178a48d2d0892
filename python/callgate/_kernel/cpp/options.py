"""The options of `callgate.cpp`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses

from callgate._kernel.options import CompilerOptions, KernelOptions, LaunchOptions


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CppOptions(CompilerOptions, LaunchOptions, KernelOptions):
  """The options of `callgate.cpp`; those of a launch are for `cuda_source`.

  Attributes:
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns, with those of all such kernels of the same
      source, or, with `libraries`, of all that link some.
    cuda_source: CUDA C++ with the same kernel, which runs in programs for CUDA. Its arrays are
      those of the C++ function, in the same order: pointers or views, `const T*` also where that
      takes a number by value; its numbers by value are the C++ function's `cg::Attr` of the same
      names.
    cuda_kernel: which kernel of it, where it has several.
  """

  cuda_source: str | None = None
  cuda_kernel: str | None = None
