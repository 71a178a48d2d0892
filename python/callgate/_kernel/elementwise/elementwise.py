"""`callgate.elementwise`: pointwise kernels from one expression, broadcasting and derivatives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from callgate._build import toolchain
from callgate._call.operation import Effect
from callgate._core import options, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.registry import caller_module
from callgate._kernel.elementwise import params
from callgate._kernel.elementwise.cuda import CudaOptions
from callgate._kernel.elementwise.kernel import FLAGS, ElementwiseKernel
from callgate._kernel.elementwise.params import Param
from callgate._kernel.elementwise.source import Code
from callgate._kernel.program import parse_arch


def elementwise(
  in_params: str,
  out_params: str,
  operation: str,
  name: str | None = None,
  *,
  preamble: str = "",
  loop_prep: str = "",
  after_loop: str = "",
  jvp: str | None = None,
  like: Callable[..., Any] | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  sharding: Any = None,
  gradient: Literal["finite-difference"] | None = None,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
  debug: bool = False,
  cuda_options: Sequence[str] = (),
  arch: str | int | Sequence[str | int] | None = None,
) -> ElementwiseKernel:
  """Makes a JAX function of the C++ for one element; arguments broadcast as NumPy's do.

  The same code is compiled for the CPU, and by CUDA's run-time compiler for GPUs.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  power = cg.elementwise(
    "T x, T y", "T z", "z = pow(x, y)",
    jvp="dz = y * pow(x, y - 1) * dx + z * log(x) * dy",
  )
  assert power(jnp.array([[2.0], [3.0]]), jnp.arange(2.0)).tolist() == [[1.0, 2.0], [1.0, 3.0]]
  assert jax.grad(power)(3.0, 2.0) == 6.0
  ```

  Args:
    in_params: the arguments, such as "T x, raw float32 y": a dtype's name, or a letter that stands
      for one and is bound by each call; then a name. A `raw` argument is no element but the whole
      array, which the code indexes itself.
    out_params: the results, likewise; none is raw.
    operation: C++ statements that give the results' elements. `i` is the element's index in the
      result in row-major order, `n` and `_ind.size()` are their number.
    name: what programs call the kernel by. Default: the calling module's name and "elementwise".
    preamble: C++ in front of the kernel: functions, types, includes.
    loop_prep: statements in front of each run of elements, whose variables the operation sees.
    after_loop: statements behind each run of elements.
    jvp: the derivative: statements that give the tangent `dz` of each result `z` from the
      arguments, the results and the arguments' tangents `dx`, in which they are linear.
    like: a JAX-traceable reference of the same signature: gives derivatives where there is no
      `jvp`, and those of higher order where there is; and `check`'s truth.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat input position to flat output position: both are one memory.
    sharding: which dimensions of the arrays may stay split over devices. Default: all, as operands
      broadcast. "gather", or a rule or function as for `callgate.gate`, for less.
    gradient: "finite-difference": derivatives by central differences, element by element.
    flags: for the compiler, after callgate's own.
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of raw arguments; on the CPU.
    cuda_options: for CUDA's run-time compiler, after callgate's own; "--use_fast_math", say.
    arch: what to compile for, in programs for CUDA, where the process has no device: "sm_90", 90,
      or several. Default: PTX, which any device runs.

  Returns:
    A `Kernel`. Its calls take the arguments by position or name; `size=` where all are raw; and the
    dtype of a letter by keyword (`T="float32"`) where no argument has it. They return an array, or
    a tuple of them for several results.

  Raises:
    CompileError: the compiler refuses the code, at the first call with such dtypes; or there is no
      compiler.
    GateDefinitionError: a parameter or an option is wrong.
  """
  name = options.name("elementwise", name)
  if name is None:
    name = registry.free_name(f"{caller_module()}.elementwise")
  label = f"kernel '{name}'"
  options.texts(
    label, in_params=in_params, out_params=out_params, operation=operation, preamble=preamble,
    loop_prep=loop_prep, after_loop=after_loop,
  )  # fmt: skip
  inputs = params.parse(label, "in_params", in_params)
  outputs = params.parse(label, "out_params", out_params)
  params.check(label, inputs, outputs)
  _check_aliases(label, inputs, options.aliases(label, aliases))
  options.boolean(label, "debug", debug)
  options.optional_texts(label, jvp=jvp)
  defaults = toolchain.DEBUG_FLAGS if debug else toolchain.DEFAULT_FLAGS
  return ElementwiseKernel(
    name,
    Code(inputs, outputs, operation, preamble, loop_prep, after_loop),
    build_options={
      "flags": (*defaults, *FLAGS, *options.strings(label, "flags", flags)),
      "include_dirs": options.strings(label, "include_dirs", include_dirs),
      "libraries": options.strings(label, "libraries", libraries),
      "library_dirs": options.strings(label, "library_dirs", library_dirs),
    },
    cuda_options=CudaOptions(
      options.strings(label, "cuda_options", cuda_options), parse_arch(label, arch)
    ),
    jvp=jvp,
    like=like,
    effect=effect,
    aliases=aliases,
    sharding=sharding,
    gradient=gradient,
  )


def _check_aliases(label: str, inputs: Sequence[Param], aliases: Mapping[int, int]) -> None:
  for position in aliases:
    if 0 <= position < len(inputs) and inputs[position].raw:
      raise GateDefinitionError(
        f"{label}: aliases: '{inputs[position].name}' is raw, so that elements would read what "
        "others have written; expected an argument that is not"
      )
