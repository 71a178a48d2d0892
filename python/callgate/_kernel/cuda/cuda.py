# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callgate._build.nvrtc import CompiledImage
from callgate._core import factories
from callgate._core import options as check
from callgate._kernel.cuda import part as _part
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.kernel import CudaKernel
from callgate._kernel.cuda.options import CudaOptions, CudaSourceOptions, CupyOptions
from callgate._kernel.cuda.part import SourcePart
from callgate._kernel.files import no_new_calls
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import CudaCall, LaunchPlan
from callgate._kernel.options import Paths


class CudaSourceKernel(CudaKernel):
  """A kernel from CUDA C++; see `callgate.cuda`."""

  def __init__(self, name: str, part: SourcePart, options: CudaOptions) -> None:
    self.part = part
    self._template = part.function.template
    super().__init__(name, part.signature(), options)

  def plan(self, call: CudaCall) -> LaunchPlan:
    return self.part.plan(call)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    return self.part.images(key, capabilities)

  def saved_form(self) -> dict[str, Any] | None:
    return {"kind": "cuda", "name": self.name, "cuda": _part.saved(self.part)}


def restore(form: dict[str, Any]) -> CudaSourceKernel:
  """A kernel from its saved form, for programs."""
  part = _part.restored(f"kernel '{form['name']}'", form["cuda"])
  options = CudaOptions(out=no_new_calls(form["name"]), aliases=part.aliases, arch=part.arch)
  return CudaSourceKernel(form["name"], part, options)


@factories.of_two(CudaSourceOptions)
def cuda(source: str, kernel: str | None = None, /, *, options: CudaSourceOptions) -> Kernel:
  """Makes a kernel in CUDA C++ a JAX function: compiled once, launched on XLA's stream.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  saxpy = cg.cuda(\"\"\"
    __global__ void saxpy(float a, const float* x, const float* y, float* z, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) z[i] = a * x[i] + y[i];
    }\"\"\",
    grid=lambda x, y: -(-x.size // 256), block=256,
    out=lambda a, x, y, n: x, arch="sm_90")

  step = jax.jit(lambda x, y: saxpy(2.0, x, y, n=x.size))
  traced = step.trace(jnp.ones(1000), jnp.ones(1000))
  # On a machine with a GPU, step(x, y) runs it. Compiling needs none:
  # traced.lower(lowering_platforms=("cuda",))
  ```

  A program launches the kernel from the runtime: no Python, no copy, no synchronisation; the launch
  may become part of a CUDA graph. The `__global__` function's parameters say, in order, what a call
  gives and gets:

  - `const T*`: the next operand, an array of any rank. `T*`: the next result; an operand and a
    result in one memory where `aliases` says that the operand at its place is that result.
  - `cg::In<T, Rank>`, `cg::Out<T, Rank>`, `cg::InOut<T, Rank>`: the same as views, which know their
    extents (callgate/kernel_device.h, which is included).
  - numbers by value (`float a`, `int n`): fixed when the program is traced, given by position or by
    keyword. A value that a program computes is passed as an array, `const float*`.
  - pointers that `scratch` names: memory for the launch alone.

  `T` may be a parameter of the kernel's template, which is compiled for the dtypes of a call.
  `__half` and `__nv_bfloat16` are float16 and bfloat16, `float2` and `double2` complex64 and
  complex128; their headers are included where the source names them. A pointer to another type,
  `float4` or a struct, takes arrays of any dtype.

  Args:
    source: CUDA C++17 with the kernel, for NVRTC (pip's nvidia-cuda-nvrtc, which the extra
      callgate[cuda] brings, or CUDA's toolkit). Compiled kernels are kept on disk.
    kernel: which kernel, where the source has several; with template arguments if the calls don't
      tell them: "scale<float, 4>".

  Returns:
    A `Kernel`.

  Raises:
    GateDefinitionError: an option or a parameter's type is wrong; or, when a call is lowered, grid
      or block are outside CUDA's limits.
    CompileError: when a call is lowered: NVRTC refuses the source, with its message and your line
      numbers; or there is no NVRTC.
  """
  what = options.label("cuda")
  check.text("cuda", "source", source)
  check.optional_texts("cuda", kernel=kernel)
  options = check.checked(what, options)
  return made(what, source, kernel, options, options.options, options.include_dirs)


def made(
  what: str, source: str, kernel: str | None, options: CudaSourceOptions | CupyOptions,
  flags: Sequence[str], folders: Paths,
) -> Kernel:  # fmt: skip
  """The kernel of a source, named after the user's module if `options` don't say."""
  name = options.named(_source.find(what, source, kernel).name)
  label = f"kernel '{name}'"
  building = _part.BuildOptions(tuple(flags), tuple(map(str, folders)), options.capabilities(label))
  part = SourcePart(label, source, kernel, options, building, options.aliases or {})
  return Kernel(CudaSourceKernel(name, part, options))
