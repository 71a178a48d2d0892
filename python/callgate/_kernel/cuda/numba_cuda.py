# SPDX-License-Identifier: Apache-2.0
"""`callgate.numba_cuda`: Numba kernels for CUDA, compiled when a call is lowered."""

from __future__ import annotations

import functools
import json
from typing import Any

from callgate._build.nvrtc import CompiledImage
from callgate._core import extras, factories, registry, signatures
from callgate._core.errors import CompileError
from callgate._kernel import launch
from callgate._kernel.cuda.kernel import Named, NamedKernel, evaluated
from callgate._kernel.cuda.options import NumbaCudaOptions
from callgate._kernel.kernel import Kernel


class NumbaCudaKernel(NamedKernel):
  """A kernel of `@numba.cuda.jit`; see `callgate.numba_cuda`."""

  def __init__(self, function: Any, options: NumbaCudaOptions) -> None:
    what = options.label("callgate.numba_cuda")
    # Numba's own, older CUDA target lacks this module.
    extras.library("numba.cuda.np.numpy_support", "numba-cuda", "numba-cuda", by=what)
    from callgate._kernel.cuda import numba_cuda_compile as compiler

    compiler.check(what, function)
    self._compiler, self.function, self._launching = compiler, function, options
    own = signatures.read(function.py_func).parameters.values()
    name = options.name or registry.unique_name(function.py_func)
    super().__init__(name, [Named(p.name, False, p.default) for p in own], options)

  def plan(self, call: launch.CudaCall) -> launch.LaunchPlan:
    bound, compiler, given = self.bound(call), self._compiler, self._launching
    # The leading axis of arrays with vmap="grid", also without a batch.
    lanes = (call.batch or 1,) if self.vmap == "grid" else ()
    held = [  # arguments of `compiler.type_of`
      (name, str(compiler.scalar_type(self.label, name, value)), -1, 0) if of == "static"
      else (name, value.dtype.name, len(lanes) + len(value.shape),
            int(of == "result" or index in self.aliases))
      for name, (of, index, value) in bound.items()
    ]  # fmt: skip
    key = json.dumps(held, separators=(",", ":"))
    types, built = self._built(key, call.capabilities)
    parameters: list[launch.LaunchParameter] = []
    for (of, index, value), numba_type in zip(bound.values(), types, strict=True):
      parameters += (
        compiler.scalar_parameters(value, numba_type) if of == "static"
        else compiler.array_parameters((*lanes, *value.shape), value.dtype.itemsize, of, index)
      )  # fmt: skip
    have = [len(p.data) for p in parameters]
    for declared in (declared for _, declared, _ in built if declared != have):
      fault = f"expected a kernel by Numba with parameters of {have} bytes, got {declared}"
      raise CompileError(
        f"{self.label}: {fault}; callgate doesn't support this version of numba-cuda. "
        "pip install 'callgate[numba-cuda]' installs one that it supports",
        "",
      )
    grid, block, dynamic = (
      evaluated(self.label, option, getattr(given, option), call)
      for option in ("griddim", "blockdim", "sharedmem")
    )
    grid, block = self.extent("griddim", grid, call), launch.extent(self.label, "blockdim", block)
    grid, block, shared, _ = launch.checked(self.label, grid, block, dynamic)
    launched = launch.Launch(built[0][0], grid, block, tuple(parameters), shared)
    return launch.LaunchPlan(key, tuple(image for _, _, image in built), (launched,))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    return tuple(image for _, _, image in self._built(key, capabilities)[1])

  def _built(self, key: str, capabilities: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Returns Numba's types of all parameters and the compiled code; see `compiler.compile_for`."""
    compiler, label, function = self._compiler, self.label, self.function
    types = compiler.parameter_types(label, function, json.loads(key))
    compiled = functools.partial(compiler.compile_for, label, function, types)
    return types, self.made_for(key, capabilities, compiled)


@factories.of_one(NumbaCudaOptions)
def numba_cuda(dispatcher: Any, /, *, options: NumbaCudaOptions) -> Kernel:
  """Makes a JAX function of a `@numba.cuda.jit` kernel, for CUDA devices.

  ```python
  import callgate as cg
  from numba import cuda

  @cuda.jit
  def saxpy(a, x, y, out):
    i = cuda.grid(1)
    if i < out.size:
      out[i] = a * x[i] + y[i]

  run = cg.numba_cuda(
    saxpy, griddim=lambda x, y: -(-x.size // 256), blockdim=256, out=lambda x, y: x
  )
  # jax.jit(lambda x, y: run(2.0, x, y))
  ```

  A call fills the kernel's parameters in order or by name. The remaining parameters receive the
  results, in order: name them with `outputs` ("out" for a kernel `(out, x)`), or place them after
  the arrays.

  Numba compiles the kernel for the dtypes and ranks of a call when the call is lowered, for the
  devices of this process or for `arch`. callgate launches it on XLA's stream without Python. Arrays
  are C-contiguous. Operands are read-only unless `aliases` names them: a kernel that writes to an
  operand fails to compile. A number is passed by value and fixed when the program is traced. A
  Python int is an int64, a float is a float64, and a NumPy scalar has its own type. The decorator's
  signature takes precedence.

  Args:
    dispatcher: the decorated function. callgate respects its options (fastmath, lineinfo, opt,
      launch_bounds, max_registers, link), and rejects debug and extensions.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: when a call is lowered: Numba rejects the kernel.
    GateDefinitionError: an argument is wrong, or numba-cuda is not installed.
  """
  return Kernel(NumbaCudaKernel(dispatcher, options))
