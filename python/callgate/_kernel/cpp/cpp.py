"""`callgate.cpp`: kernels from C++ source, compiled by the system's compiler when they are made."""

# Annotations are evaluated here, for `typing.get_type_hints` of the function.

import dataclasses

from callgate._core import factories, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._kernel import program
from callgate._kernel import source as _source
from callgate._kernel.cpp.kernel import CppKernel
from callgate._kernel.cuda import part
from callgate._kernel.kernel import Kernel
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


@factories.of_two(CppOptions)
def cpp(source: str, function: str | None = None, /, *, options: CppOptions) -> Kernel:
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

  Raises:
    CompileError: the compiler refuses the source, with its message and your line numbers; or there
      is no compiler.
    GateDefinitionError: an option is wrong.
  """
  name = check.name("cpp", options.name)
  check.text("cpp", "source", source)
  cuda_source, cuda_kernel = options.cuda_source, options.cuda_kernel
  check.optional_texts("cpp", function=function, cuda_source=cuda_source, cuda_kernel=cuda_kernel)
  check.boolean("cpp", "debug", options.debug)
  known = _source.find("cpp" if name is None else f"kernel '{name}'", source, function)
  label = f"kernel '{name or known.name}'"
  build_options = options.building(label)
  if cuda_source is None and any(x is not None for x in (options.grid, options.block, cuda_kernel)):
    problem = "expected with cuda_source= alone, got one without it"
    raise GateDefinitionError(f"{label}: grid, block, cuda_kernel: {problem}")
  name = name or registry.free_name(f"{registry.caller_module()}.{known.name}")
  made = CppKernel(name, source, function, build_options, options)
  launching, arch = options.launching(label), program.parse_arch(label, options.arch)
  given = check.strings(label, "cuda_options", options.cuda_options)
  building = part.BuildOptions(given, build_options["include_dirs"], arch)
  if cuda_source is not None:
    parts = (cuda_source, cuda_kernel, launching, building, made.aliases)
    made.cuda = part.SourcePart(made.label, *parts)
  return made
