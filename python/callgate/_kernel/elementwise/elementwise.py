"""`callgate.elementwise`: pointwise kernels from one expression, broadcasting and derivatives."""

from __future__ import annotations

from callgate._call.options import shared
from callgate._core import factories, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.registry import caller_module
from callgate._kernel.elementwise import params
from callgate._kernel.elementwise.cuda import CudaOptions
from callgate._kernel.elementwise.kernel import FLAGS, ElementwiseKernel
from callgate._kernel.elementwise.options import ElementwiseOptions
from callgate._kernel.elementwise.source import Code
from callgate._kernel.options import KernelOptions
from callgate._kernel.program import parse_arch


@factories.of_code(ElementwiseOptions)
def elementwise(
  in_params: str,
  out_params: str,
  operation: str,
  name: str | None = None,
  *,
  options: ElementwiseOptions,
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

  Returns:
    A `Kernel`. Its calls take the arguments by position or name; `size=` where all are raw; and the
    dtype of a letter by keyword (`T="float32"`) where no argument has it. They return an array, or
    a tuple of them for several results.

  Raises:
    CompileError: the compiler refuses the code, at the first call with such dtypes; or there is no
      compiler.
    GateDefinitionError: a parameter or an option is wrong.
  """
  name = check.name("elementwise", name)
  name = name or registry.free_name(f"{caller_module()}.elementwise")
  label = f"kernel '{name}'"
  around = (options.preamble, options.loop_prep, options.after_loop)
  check.texts(
    label, in_params=in_params, out_params=out_params, operation=operation, preamble=around[0],
    loop_prep=around[1], after_loop=around[2],
  )  # fmt: skip
  inputs = params.parse(label, "in_params", in_params)
  outputs = params.parse(label, "out_params", out_params)
  if not outputs:
    raise GateDefinitionError(f"{label}: out_params: expected one result or more, got none")
  names = [p.name for p in (*inputs, *outputs)]
  for twice in (name for name in names if names.count(name) > 1):
    raise GateDefinitionError(f"{label}: expected names that differ, got '{twice}' twice")
  for position in check.aliases(label, options.aliases):
    if 0 <= position < len(inputs) and inputs[position].raw:
      raise GateDefinitionError(
        f"{label}: aliases: '{inputs[position].name}' is raw, so that elements would read what "
        "others have written; expected an argument that is not"
      )
  check.boolean(label, "debug", options.debug)
  check.optional_texts(label, jvp=options.jvp)
  return ElementwiseKernel(
    name,
    Code(inputs, outputs, operation, *around),
    shared(KernelOptions, options, thread_safe=True),
    build_options=options.building(label, *FLAGS),
    cuda_options=CudaOptions(
      check.strings(label, "cuda_options", options.cuda_options), parse_arch(label, options.arch)
    ),
    jvp=options.jvp,
  )
